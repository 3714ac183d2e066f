"""What a model returns, and what the losses and predictions need of one."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor


class ModelOutput(NamedTuple):
    """One pass over tokens.

    Attributes:
        logits: ``[B, T, vocab_size]``; fewer positions if fewer were asked for.
        states: one state per block, to go on from.
        hidden: what the head sees: the residual stream after the final norm, ``[B, T, d_model]``,
            or what a decoder makes of it, ``[B, T, head_width]``.
        variances: posterior variance of every block's read-out, ``[B, T, d_inner]`` (None for a
            block without one); None when not asked for.
    """

    logits: Tensor
    states: tuple[Any, ...]
    hidden: Tensor
    variances: tuple[Tensor | None, ...] | None


class Writer(Protocol):
    """A model that can go on from a read-out."""

    @property
    def write(self) -> Callable[..., Tensor]:
        """From read-outs ``[..., T, d_inner]`` and their context to logits ``[..., T, V]``."""
