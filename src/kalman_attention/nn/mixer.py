"""What a sequence mixer is: anything a block can hold between its norm and its residual."""

from typing import Any, NamedTuple, Protocol

from torch import Tensor

from kalman_attention._typing import Mask


class LayerOutput(NamedTuple):
    """What every mixer returns, always.

    Attributes:
        y: output, ``[B, T, d_model]`` (``[B, d_model]`` from ``step``); 0 at padding.
        variance: posterior variance of the read-out, ``[B, T, d_inner]``, or None when it was not
            asked for or the mixer has none.
        state: what the next call needs; opaque to the caller, one row per sequence.
    """

    y: Tensor
    variance: Tensor | None
    state: Any


class Mixer(Protocol):
    """The interface of ``nn.KLA`` and of every baseline."""

    def __call__(
        self,
        x: Tensor,
        state: Any = None,
        mask: Mask | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        return_variance: bool = False,
    ) -> LayerOutput:
        """Mix a sequence ``[B, T, d_model]``, going on from ``state``."""
        ...

    def step(
        self, x: Tensor, state: Any, *, mask: Mask | None = None, return_variance: bool = False
    ) -> LayerOutput:
        """Mix one token ``[B, d_model]``."""
        ...

    def init_state(self, batch_size: int, *, capacity: int = 0) -> Any:
        """The state before the first token; ``capacity`` is how many tokens will follow."""
        ...
