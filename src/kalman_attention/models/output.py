"""What a model returns."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from kalman_attention.models.block import HeldReadout


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


class PosteriorReadout(Protocol):
    """One pass stopped at a posterior: what the decoder of KLA+ averages over."""

    @property
    def mean(self) -> Tensor:
        """Posterior mean of the read-out, ``[B, T, d_inner]``."""

    @property
    def variance(self) -> Tensor:
        """Posterior variance of the read-out, likewise."""

    @property
    def context(self) -> tuple[Tensor, ...]:
        """What the decoder needs beside a read-out, ``[B, T, ...]`` each."""


class Writer(Protocol):
    """A model that can go on from a read-out."""

    @property
    def write(self) -> Callable[..., Tensor]:
        """From read-outs ``[..., T, d_inner]`` and their context to logits ``[..., T, V]``."""


class ModelReadout(NamedTuple):
    """One pass over tokens, stopped at the posterior of the last block's read-out.

    Attributes:
        held: the last block where it stopped.
        states: one state per block, to go on from.
    """

    held: HeldReadout
    states: tuple[Any, ...]

    @property
    def mean(self) -> Tensor:
        """Posterior mean of the read-out, ``[B, T, d_inner]``."""
        return self.held.readout.mean

    @property
    def variance(self) -> Tensor:
        """Posterior variance of the read-out, ``[B, T, d_inner]``."""
        variance = self.held.readout.variance
        assert variance is not None
        return variance

    @property
    def context(self) -> tuple[Tensor, Tensor, Tensor]:
        """What ``LanguageModel.write`` needs beside a read-out, ``[B, T, ...]`` each."""
        return self.held.context
