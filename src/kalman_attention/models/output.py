"""The output of a model, and the interface that losses and predictions need."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor


class ModelOutput(NamedTuple):
    """One pass over tokens.

    Attributes:
        logits: ``[B, T, vocab_size]``; fewer positions if fewer were requested.
        states: one state per block, to continue from.
        hidden: the input of the head: the residual stream after the final norm,
            ``[B, T, d_model]``, or the output of a decoder, ``[B, T, head_width]``.
        variances: posterior variance of every block's read-out, ``[B, T, d_inner]`` (None for a
            block without one); None if not requested.
    """

    logits: Tensor
    states: tuple[Any, ...]
    hidden: Tensor
    variances: tuple[Tensor | None, ...] | None


class Writer(Protocol):
    """A model that can continue from a read-out."""

    @property
    def write(self) -> Callable[..., Tensor]:
        """From read-outs ``[..., T, d_inner]`` and their context to logits ``[..., T, V]``."""
