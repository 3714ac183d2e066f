"""Compare an engine with the float64 reference: values and all gradients of one call.

Used by ``kla check --run`` on the user's machine and by the tests, so that both check the same.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kalman_attention.filtering.moment import KLAState
from kalman_attention.ops.contract import ScanOutput
from kalman_attention.ops.kla_scan import kla_scan
from kalman_attention.ops.reference import kla_scan_ref

# About 100 and 1,000 units in the last place of float32: errors of a step accumulate over the
# memory of a slot, and gradients accumulate those of both passes.
OUTPUT_TOLERANCE = 1e-5
"""Largest error of y and y_var, relative to max|reference|, in float32 arithmetic."""

TOLERANCE = 1e-4
"""The same for the last belief and for each gradient."""

# Intermediate results below 1.2e-38 are 0 in float32, and may later be multiplied by a precision of
# 1e6 and by keys, values and gradients of thousands: up to 1e-28 of a result may be missing. That
# is the contract's 1e-4 of a result of 1e-24.
VANISHING = 1e-24
"""Errors are relative to the largest entry of a result, but at least to this."""

INPUT_NAMES = ("q", "k", "v", "lam_v", "a_bar", "p_bar", "state.mean", "state.variance", "dt")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A random call.

    Attributes:
        B: batch rows; must be 1 when documents are packed.
        T: tokens.
        N: slots.
        D: channels.
        a_min: smallest magnitude of the decay; magnitudes are log-uniform in 1 - a or a.
        signed: make a third of the decays negative.
        p_max: largest process noise; 0 for none.
        lam_max: largest value precision; they are log-uniform over six decades, with some zeros.
        padding: "none", "left", "right" or "random".
        documents: number of packed documents, or 0 for plain rows.
        share: slots that share a precision; must divide N.
        gaps: time between tokens: "none", "token" (``[B, T]``) or "channel" (``[B, T, D]``), with
            some of length 0; decays are then positive.
        seed: random seed.
    """

    B: int = 2
    T: int = 100
    N: int = 4
    D: int = 8
    a_min: float = 0.1
    signed: bool = True
    p_max: float = 0.1
    lam_max: float = 10.0
    padding: str = "none"
    documents: int = 0
    share: int = 1
    gaps: str = "none"
    seed: int = 0


class Call(NamedTuple):
    """Arguments of one call in float64 (dt last, if given), and gradients of its outputs."""

    tensors: tuple[Tensor, ...]
    options: dict[str, Any]
    cotangents: tuple[Tensor, ...]


def make_call(case: Case) -> Call:
    """Draw the arguments of a case."""
    generator = torch.Generator().manual_seed(case.seed)
    B, T, N, D, R = case.B, case.T, case.N, case.D, case.documents or case.B
    G = N // case.share

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    # Decays cluster at both ends: near 1, where memory is long, and down to a_min.
    near_one = 1.0 - 10.0 ** (-5.0 * uniform(G, D))
    a_bar = torch.where(uniform(G, D) < 0.5, near_one, case.a_min ** uniform(G, D))
    a_bar = a_bar.clamp(min=case.a_min)
    if case.signed and case.gaps == "none":
        a_bar = torch.where(uniform(G, D) < 1 / 3, -a_bar, a_bar)
    lam_v = case.lam_max * 10.0 ** (-6.0 * uniform(B, T, D))
    lam_v = torch.where(uniform(B, T, D) < 0.05, 0.0, lam_v)
    key_scale = 1.0 / math.sqrt(N)
    v, k, q = normal(B, T, D), normal(B, T, N) * key_scale, normal(B, T, N) * key_scale
    drawn: tuple[Tensor, ...] = (
        q,
        k,
        v,
        lam_v,
        a_bar,
        case.p_max * uniform(G, D) ** 2,
        normal(R, N, D),
        0.1 + uniform(R, G, D),
    )
    if case.gaps != "none":
        size = (B, T, D) if case.gaps == "channel" else (B, T)
        drawn = (*drawn, torch.where(uniform(*size) < 0.1, 0.0, 10.0 ** (2.0 * uniform(*size) - 1)))
    # Rounded to float32, so that engine and reference get exactly the same inputs.
    tensors = tuple(x.float().double() for x in drawn)
    cotangents = (normal(B, T, D), normal(B, T, D), normal(R, N, D), normal(R, G, D))
    return Call(tensors, _options(case, generator), cotangents)


def _options(case: Case, generator: torch.Generator) -> dict[str, Any]:
    if case.documents:
        inner = torch.randint(0, case.T + 1, (case.documents - 1,), generator=generator)
        ends = torch.tensor([0, case.T])
        return {"cu_seqlens": torch.cat([ends[:1], inner.sort().values, ends[1:]])}
    if case.padding == "none":
        return {}
    place = torch.arange(case.T)
    length = torch.randint(0, case.T + 1, (case.B, 1), generator=generator)
    masks = {
        "left": place >= case.T - length,
        "right": place < length,
        "random": torch.rand(case.B, case.T, generator=generator) < 0.7,
    }
    return {"mask": masks[case.padding]}


def run_call(
    call: Call,
    engine: str,
    dtype: torch.dtype,
    *,
    use: Iterable[int] = (0, 1, 2, 3),
    device: str = "cpu",
) -> dict[str, Tensor]:
    """Run a call and return y, y_var, the final belief and all gradients, by name.

    Args:
        call: a call from ``make_call``.
        engine: name of an engine, or "reference".
        dtype: dtype of all floating inputs.
        use: which of y, y_var, mean, variance enter the loss.
        device: device to run on.
    """
    tensors = [x.to(device, dtype).requires_grad_() for x in call.tensors]
    options: dict[str, Any] = {name: x.to(device) for name, x in call.options.items()}
    options |= {"state": KLAState(*tensors[6:8]), "return_variance": True}
    if len(tensors) > 8:
        options["dt"] = tensors[8]
    if engine == "reference":
        out = kla_scan_ref(*tensors[:6], **options)
    else:
        out = kla_scan(*tensors[:6], engine=engine, **options)
    outputs = _outputs(out)
    used = set(use)
    pairs = zip(outputs.values(), call.cotangents, strict=True)
    terms = [(x * g.to(x)).sum() for i, (x, g) in enumerate(pairs) if i in used]
    grads = torch.autograd.grad(
        torch.stack(terms).sum(), tensors, allow_unused=True, materialize_grads=True
    )
    named = {f"d {name}": grad for name, grad in zip(INPUT_NAMES, grads, strict=False)}
    return {name: x.detach() for name, x in (outputs | named).items()}


def _outputs(out: ScanOutput) -> dict[str, Tensor]:
    assert out.y_var is not None
    return {
        "y": out.y,
        "y_var": out.y_var,
        "state.mean": out.state.mean,
        "state.variance": out.state.variance,
    }


def errors(got: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, float]:
    """max|error| / max|reference| of every result; NaN and infinity count as infinite errors."""
    found = {}
    for name, wanted in reference.items():
        if wanted.numel() == 0:
            continue
        error = (got[name].to(wanted) - wanted).abs().max().item()
        relative = error / max(wanted.abs().max().item(), VANISHING)
        found[name] = relative if math.isfinite(relative) else math.inf
    return found


def tolerance(name: str) -> float:
    """Error that the contract allows for a result in float32 arithmetic."""
    return OUTPUT_TOLERANCE if name in ("y", "y_var") else TOLERANCE


def misses(found: dict[str, float]) -> dict[str, float]:
    """The errors that break the contract."""
    return {name: error for name, error in found.items() if error > tolerance(name)}
