"""The engines where digits are easily lost, and a short run of ``make fuzz``."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kalman_attention import KLAState, kla_scan, kla_scan_ref, kla_step
from tests.engines import EVERY_ENGINE, affordable
from tests.fuzz import Draw, check, check_threads, draw_case, excess, held_against

NATIVE = [p for p in EVERY_ENGINE if p.values[0] in ("cpu", "triton", "cuda")]
GRADIENTS = ("v", "lam_v", "k", "q", "a_bar", "p_bar", "mean", "variance")


def one_lane(**numbers: float | list[float]) -> dict[str, Tensor]:
    """Arguments of a call of one row, slot and channel."""
    found = {name: torch.tensor(x, dtype=torch.float32) for name, x in numbers.items()}
    return {
        n: x.reshape(1, -1, 1) if n in GRADIENTS[:4] else x.reshape(1, 1) for n, x in found.items()
    }


def scan(engine: str, tokens: dict[str, Tensor], mean: float, variance: float) -> dict[str, float]:
    """Output of the last token and its gradients, largest entry each."""
    exact = engine == "reference"
    state = {"mean": torch.full((1, 1, 1), mean), "variance": torch.full((1, 1, 1), variance)}
    leaves = {**tokens, **state}
    leaves = {n: (x.double() if exact else x.clone()).requires_grad_() for n, x in leaves.items()}
    arguments: dict[str, Any] = {name: leaves[name] for name in tokens}
    arguments["state"] = KLAState(leaves["mean"], leaves["variance"])
    out = kla_scan_ref(**arguments) if exact else kla_scan(**arguments, engine=engine)
    grads = torch.autograd.grad(out.y[:, -1].sum(), list(leaves.values()))
    named = dict(zip(leaves, grads, strict=True))
    return {"y": out.y[0, -1, 0].item()} | {
        f"d {n}": named[n].abs().max().item() for n in GRADIENTS
    }


@pytest.mark.parametrize("engine", EVERY_ENGINE)
@pytest.mark.parametrize("mean", [110.0, 11_000.0])
def test_strong_evidence_meets_a_large_mean(engine: str, mean: float) -> None:
    token = one_lane(v=0.01, lam_v=1e6, k=1.0, q=1.0, a_bar=1.0, p_bar=0.0)
    got, truth = scan(engine, token, mean, 0.3), scan("reference", token, mean, 0.3)
    assert got["y"] == pytest.approx(truth["y"], rel=1e-6)
    for name in truth:
        assert got[name] == pytest.approx(truth[name], rel=1e-5), name


@pytest.mark.parametrize("engine", EVERY_ENGINE)
@pytest.mark.parametrize("lam_v", [1e3, 1e5, 1e6])
def test_gradient_of_an_overwhelming_precision(engine: str, lam_v: float) -> None:
    token = one_lane(v=0.7, lam_v=lam_v, k=0.9, q=1.1, a_bar=0.9, p_bar=0.1)
    got, truth = scan(engine, token, 0.5, 0.8), scan("reference", token, 0.5, 0.8)
    assert got["d lam_v"] == pytest.approx(truth["d lam_v"], rel=1e-5)


# The silent token is compared with a mean of 20,000, and in the end with one of the values' size.
@pytest.mark.parametrize("engine", EVERY_ENGINE)
def test_gradient_of_a_precision_before_the_first_evidence(engine: str) -> None:
    tokens = one_lane(
        v=[0.5, 0.01], lam_v=[0.0, 1e6], k=[1.1, 0.9], q=[1.0, 1.0], a_bar=1.0, p_bar=0.0
    )
    got, truth = scan(engine, tokens, 2e4, 0.3), scan("reference", tokens, 2e4, 0.3)
    assert got["d lam_v"] == pytest.approx(truth["d lam_v"], rel=1e-4)


@pytest.mark.parametrize("engine", EVERY_ENGINE)
def test_a_decay_of_zero(engine: str) -> None:
    # Without noise the first token makes the belief certain: only da_bar and dp_bar are left.
    tokens = one_lane(
        v=[3.0, 2.0], lam_v=[1e5, 1e6], k=[30.0, 10.0], q=[1.0, 1.0], a_bar=0.0, p_bar=0.0
    )
    got, truth = scan(engine, tokens, 1.0, 0.9), scan("reference", tokens, 1.0, 0.9)
    for name, wanted in truth.items():
        assert got[name] == pytest.approx(wanted, rel=1e-5, abs=0.0), name


@pytest.mark.parametrize("engine", ["reference", *EVERY_ENGINE])
@pytest.mark.parametrize("hole", [math.nan, math.inf, -math.inf])
def test_no_evidence_brings_nothing(engine: str, hole: float) -> None:
    x = Draw(0)
    T, N, D = affordable(9, 70), 3, 40
    tensors = {
        "v": x.normal(2, T, D),
        "lam_v": x.sometimes(0.3, 0.0, x.uniform(2, T, D)),
        "k": x.normal(2, T, N),
        "q": x.normal(2, T, N),
        "a_bar": x.uniform(N, D),
        "p_bar": x.uniform(N, D),
    }
    tensors = {name: t.float() for name, t in tensors.items()}
    state = KLAState(x.normal(2, N, D).float(), x.uniform(2, N, D).float())
    gap = tensors["lam_v"] == 0
    results = []
    for filled in (tensors["v"].masked_fill(gap, hole), tensors["v"].masked_fill(gap, 0.0)):
        given = {**tensors, "v": filled}
        leaves: dict[str, Any] = {n: t.clone().requires_grad_() for n, t in given.items()}
        out = kla_scan(**leaves, state=state, return_variance=True, engine=engine)
        assert out.y_var is not None
        loss = (out.y * out.y).sum() + out.y_var.sum() + out.state.mean.sum()
        grads = torch.autograd.grad(loss, list(leaves.values()))
        assert (grads[0][gap] == 0).all()
        token: dict[str, Any] = {n: t[:, 3] if t.dim() == 3 else t for n, t in given.items()}
        step = kla_step(**token, state=state, engine=engine)
        results.append([*out[:2], *out.state, step.y, *step.state, *grads])
    for got, wanted in zip(*results, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("engine", NATIVE)
def test_random_calls(engine: str) -> None:
    cases = 300 if engine == "cpu" else affordable(4, 60)
    broken = {seed: found for seed in range(cases) if (found := check(seed, engine)[0])}
    assert not broken


def test_random_calls_do_not_depend_on_threads() -> None:
    assert not [name for seed in range(4) for name in check_threads(seed, "cpu")]


def test_what_one_rounding_moves_is_not_held_against_an_engine() -> None:
    case = draw_case(1)
    assert held_against(case, 1, {"y": 1e6, "d k": math.inf}).keys() == {"y", "d k"}
    assert not held_against(case, 1, {"y": 0.0})


def test_what_is_wrong_is_found() -> None:
    truth = {"y": torch.tensor([1.0, 100.0], dtype=torch.float64)}
    assert not excess({"y": torch.tensor([1.0009, 100.0])}, truth)
    assert excess({"y": torch.tensor([1.0011, 100.0])}, truth)
    assert excess({"y": torch.tensor([math.nan, 100.0])}, truth) == {"y": math.inf}
