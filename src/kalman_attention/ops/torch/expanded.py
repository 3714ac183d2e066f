"""Engines ``mobius`` and ``torch_scan``: the paper's scans over all of T, states expanded.

``mobius`` is Algorithm 1 (``alg:kla``): a scan over Mobius maps for the variances, then one over
affine maps for the means. ``torch_scan`` runs the single scan over segments with torch's own
``associative_scan``. Both hold ``[B, T, N, D]`` several times; they exist for comparison, and to
show that the theorems can be computed with.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kalman_attention.filtering import moment
from kalman_attention.filtering.evidence import token_evidence
from kalman_attention.filtering.gaps import transition
from kalman_attention.filtering.maps import Affine, Mobius
from kalman_attention.filtering.moment import KLAState
from kalman_attention.filtering.readout import read_mean, read_variance
from kalman_attention.filtering.segment import FilterMap
from kalman_attention.ops.contract import CHUNK, ScanGrads, ScanInputs, ScanResult
from kalman_attention.ops.torch import reverse
from kalman_attention.ops.torch.prefix_scan import prefix_scan, torch_scan
from kalman_attention.ops.torch.rows import to_rows

BeliefScan = Callable[[Tensor, Tensor, Tensor, Tensor, KLAState], KLAState]
"""From a_bar, p_bar, phi, b (``[R, T, N, D]`` each) and an initial belief to all beliefs."""


class ExpandedEngine:
    """An engine that computes the belief at every token and then reads it out."""

    def __init__(self, beliefs: BeliefScan) -> None:
        self._beliefs = beliefs

    def forward(self, inputs: ScanInputs, *, return_variance: bool, save: bool) -> ScanResult:
        """See ``EngineModule.forward``."""
        rows = to_rows(inputs)
        # Float64: the maps contain a_bar^2, whose rounding to float32 is the same in every step and
        # adds up over the memory of the filter.
        state_0 = KLAState(*(x.double().unsqueeze(1) for x in (inputs.mean_0, inputs.variance_0)))
        v, lam_v = (x.double().flatten(1, 2) for x in (rows.v, rows.lam_v))
        q, k = (x.double().flatten(1, 2).squeeze(-1) for x in (rows.q, rows.k))  # blocks of one
        phi, b = token_evidence(k, v, lam_v)
        # At padding, a_bar = 1 and p_bar = 0 make the step the exact identity.
        real = rows.real.flatten(1, 2).squeeze(-1)
        a, p = inputs.a_bar.double(), inputs.p_bar.double()
        if rows.dt is not None:
            a, p = transition(a, p, rows.dt.double().flatten(1, 2))
        a_bar, p_bar = torch.where(real, a, 1.0), torch.where(real, p, 0.0)
        path = self._beliefs(a_bar, p_bar, phi, b, state_0)  # [R, T, N, D] twice
        path = KLAState(*(torch.cat(pair, dim=1) for pair in zip(state_0, path, strict=True)))
        dtype = inputs.compute_dtype
        starts = KLAState(*(x[:, :-1:CHUNK].unsqueeze(-2) for x in path))
        y = read_mean(q, path.mean[:, 1:]).view_as(rows.v)
        y_var = read_variance(q, path.variance[:, 1:]).view_as(rows.v) if return_variance else None
        return ScanResult(
            y=rows.layout.scatter(y, inputs.v),
            y_var=None if y_var is None else rows.layout.scatter(y_var, inputs.v),
            mean=path.mean[:, -1].to(dtype, copy=True),
            variance=path.variance[:, -1].to(dtype, copy=True),
            checkpoints=rows.layout.save(starts, dtype) if save else None,
        )

    def backward(
        self,
        inputs: ScanInputs,
        checkpoints: Tensor,
        dy: Tensor | None,
        dy_var: Tensor | None,
        dmean: Tensor | None,
        dvariance: Tensor | None,
    ) -> ScanGrads:
        """Exact gradients by the reverse recursion."""
        return reverse.backward(inputs, checkpoints, dy, dy_var, dmean, dvariance)


def mobius_beliefs(
    a_bar: Tensor, p_bar: Tensor, phi: Tensor, b: Tensor, state_0: KLAState
) -> KLAState:
    """Two scans (``cor:parallel-scan``, ``cor:mean-parallel-scan``).

    The second runs in moment form (``cor:moment-form``), where the gate r a_bar is at most 1; the
    gate of the information form grows without bound when p_bar = 0.
    """
    maps = prefix_scan(Mobius.compose, Mobius.from_evidence(a_bar, p_bar, phi))
    variance = maps.apply_variance(state_0.variance)
    before = torch.cat([state_0.variance, variance], dim=1)[:, :-1]
    r = moment.retention(a_bar * (a_bar * before) + p_bar, phi)
    mean = prefix_scan(Affine.compose, Affine(f=r * a_bar, b=variance * b)).apply(state_0.mean)
    return KLAState(mean, variance)


def torch_beliefs(
    a_bar: Tensor, p_bar: Tensor, phi: Tensor, b: Tensor, state_0: KLAState
) -> KLAState:
    """One scan over segments of one token each, by torch's ``associative_scan``."""
    tokens = FilterMap.identity_like(KLAState(phi, phi)).then(a_bar, p_bar, phi, b)
    return torch_scan(FilterMap.compose, tokens).apply(state_0)


mobius = ExpandedEngine(mobius_beliefs)
torch_associative = ExpandedEngine(torch_beliefs)
