"""What a sequence mixer is: anything a block can hold between its norm and its residual."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

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
    """The interface of ``nn.KLA`` and of every baseline.

    A state is a named tuple of tensors with one row per sequence first (and of such tuples), or of
    plain values that all rows share. Windows of convolutions are in fields named ``conv``.
    Parameters start by the ``reset_parameters`` of the modules that hold them, inner ones first;
    the model around then scales ``out_proj`` and touches nothing else.

    Attributes:
        out_proj: the matrix that writes into the residual stream; deep stacks start it smaller.
    """

    out_proj: nn.Linear

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


def map_state(change: Callable[[Tensor], Tensor], state: Any) -> Any:
    """The same state with ``change`` applied to its tensors, which have rows first.

    Args:
        change: what to do with a tensor, such as picking rows.
        state: of any mixer.
    """
    if isinstance(state, Tensor):
        return change(state)
    if isinstance(state, tuple) and hasattr(state, "_make"):
        return state._make(map_state(change, part) for part in state)
    return state


def state_tensors(state: Any, field: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a state, each with the dotted name of its field."""
    if isinstance(state, Tensor):
        yield field, state
    elif isinstance(state, tuple) and hasattr(state, "_asdict"):
        for name, part in state._asdict().items():
            yield from state_tensors(part, f"{field}.{name}" if field else name)
