"""The posterior of a read-out: the point at which a layer, block or model can be interrupted."""

from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kalman_attention._typing import Keys, Precisions, Values
from kalman_attention.filtering.readout import sample_readout


class Evidence(NamedTuple):
    """The inputs of a scan: query, evidence and dynamics of each token.

    Attributes:
        q: query, ``[B, T, N]``.
        k: key, ``[B, T, N]``.
        v: value, ``[B, T, D]``.
        lam_v: its precision, ``[B, T, D]``.
        dt: time that passes before the token, ``[B, T]`` or ``[B, T, D]``; None means 1.
        u_h: reflections that rotate the blocks of slots, ``[B, T, n_h, G, m]``; None for none.
            Queries and keys are those of the layer, not yet in the rotating frame.
    """

    q: Keys
    k: Keys
    v: Values
    lam_v: Precisions
    dt: Tensor | None = None
    u_h: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> "Evidence":
        """Apply a function that selects positions to all tensors."""
        return Evidence(*(None if x is None else change(x) for x in self))  # type: ignore[arg-type]


class Readout(NamedTuple):
    """The posterior of a read-out, with everything needed to continue from it.

    ``layer.write(latent, *context)`` continues from the mean or from samples. So do
    ``Block.resume`` and the ``write`` of the models, each with the context of its own read-outs.

    Attributes:
        mean: ``[B, T, D]`` (``[B, D]`` for one token).
        variance: of the same shape, or None if it was not requested.
        context: what ``write`` needs besides a read-out at each position, ``[B, T, ...]`` each.
        evidence: the inputs of the scan, for inspection.
        state: the state after the last token; of a model, one per block.
    """

    mean: Values
    variance: Values | None
    context: tuple[Tensor, ...]
    evidence: Evidence
    state: Any

    def map(self, change: Callable[[Tensor], Tensor]) -> "Readout":
        """The read-out at other positions, such as ``map(lambda z: z[:, -n:])``.

        Args:
            change: picks positions of a tensor ``[B, T, ...]``.
        """
        return Readout(
            change(self.mean),
            None if self.variance is None else change(self.variance),
            tuple(map(change, self.context)),
            self.evidence.map(change),
            self.state,
        )

    def sample(self, num_samples: int = 1, generator: torch.Generator | None = None) -> Values:
        """Samples from the posterior, ``[S, B, T, D]``; differentiable.

        Args:
            num_samples: number S of samples.
            generator: random generator; None for torch's default one.
        """
        if self.variance is None:
            raise ValueError("there is no variance to sample with: read(..., return_variance=True)")
        mean, shape = self.mean, (num_samples, *self.mean.shape)
        noise = torch.randn(shape, dtype=mean.dtype, device=mean.device, generator=generator)
        return sample_readout(mean, self.variance, noise)

    def split(self, size: int) -> tuple["Readout", ...]:
        """Successive pieces of at most ``size`` positions."""
        starts = range(0, max(1, self.mean.shape[1]), size)
        return tuple(self.map(itemgetter((slice(None), slice(i, i + size)))) for i in starts)
