"""Summaries of rows: the filter and its adjoint from any start, without the tokens."""

import pytest
import torch
from torch import Tensor

from kalman_attention import KLAState
from kalman_attention.ops import cpu
from kalman_attention.ops.contract import MapEngineModule, ScanInputs
from kalman_attention.ops.engines import ENGINES
from kalman_attention.ops.reference import kla_scan_ref

REASON = cpu.why_not()
NAMES = [
    pytest.param(
        name, marks=pytest.mark.skipif(name == "cpu" and REASON is not None, reason=str(REASON))
    )
    for name in ("cpu", "associative")
]
LENGTHS = (0, 1, 2, 5, 63, 64, 65, 129, 200)


def draw(B: int, T: int, N: int, D: int, dtype: torch.dtype = torch.float64) -> ScanInputs:
    generator = torch.Generator().manual_seed(T)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    tokens = normal(B, T, N), normal(B, T, N), normal(B, T, D), normal(B, T, D).square()
    a_bar = torch.tanh(2.0 * normal(N, D))
    belief = normal(B, N, D), normal(B, N, D).square()
    return ScanInputs(*tokens, a_bar, 0.1 * normal(N, D).square(), *belief, None, None)


def masked(inputs: ScanInputs) -> ScanInputs:
    generator = torch.Generator().manual_seed(3)
    return inputs._replace(mask=torch.rand(inputs.v.shape[:2], generator=generator) > 0.4)


def maps_of(engine: str) -> MapEngineModule:
    return ENGINES[engine].load_maps()


def reference(inputs: ScanInputs):
    state = KLAState(inputs.mean_0, inputs.variance_0)
    return kla_scan_ref(*inputs[:6], state=state, mask=inputs.mask, return_variance=True)


def assert_close(got, wanted, tolerance=1e-12):
    for x, y in zip(got, wanted, strict=True):
        assert x.shape == y.shape
        assert (x - y).abs().max() <= tolerance * y.abs().max().clamp(min=1.0)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("engine", NAMES)
def test_the_map_of_a_row_filters_it(engine, T, padded):
    inputs = draw(2, T, 3, 5)
    inputs = masked(inputs) if padded else inputs
    found = maps_of(engine).filter_map(inputs).apply(KLAState(inputs.mean_0, inputs.variance_0))
    assert_close(found, reference(inputs).state)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("engine", NAMES)
def test_the_map_of_the_adjoint_pulls_any_gradient_back(engine, T, padded):
    inputs = draw(2, T, 3, 5)
    inputs = masked(inputs) if padded else inputs
    first = [x.clone().requires_grad_() for x in inputs[6:8]]
    out = reference(inputs._replace(mean_0=first[0], variance_0=first[1]))
    ends = [torch.cos(x.detach()) for x in out.state]
    weights = [torch.sin(3.0 * inputs.v + i) for i in range(2)]
    outputs = sum((w * x).sum() for w, x in zip(weights, (out.y, out.y_var), strict=True))
    total = outputs + sum((w * x).sum() for w, x in zip(ends, out.state, strict=True))
    wanted = torch.autograd.grad(total, first)
    saved = ENGINES[engine].load().forward(inputs, return_variance=True, save=True).checkpoints
    found = maps_of(engine).adjoint_map(inputs, saved, *weights).apply(*ends)
    assert_close(found, wanted, 1e-11)
    no_outputs = maps_of(engine).adjoint_map(inputs, saved, None, None)
    assert not no_outputs.dmu_0.any()
    assert not no_outputs.ds_0.any()


@pytest.mark.parametrize("engine", NAMES)
def test_pieces_compose_to_the_whole(engine):
    inputs = draw(2, 100, 3, 5)
    parts = [(0, 1), (1, 1), (1, 70), (70, 100)]
    pieces = [inputs._replace(**{f: getattr(inputs, f)[:, i:j] for f in ("q", "k", "v", "lam_v")})
              for i, j in parts]  # fmt: skip
    whole = maps_of(engine).filter_map(pieces[0])
    for piece in pieces[1:]:
        whole = maps_of(engine).filter_map(piece).compose(whole)
    assert_close(whole, maps_of(engine).filter_map(inputs))


@pytest.mark.parametrize("engine", NAMES)
def test_no_noise_and_float32(engine):
    inputs = draw(2, 300, 3, 5)
    inputs = inputs._replace(p_bar=torch.zeros_like(inputs.p_bar))
    short = ScanInputs(*(x if x is None else x.float() for x in inputs))
    found = maps_of(engine).filter_map(short)
    assert found.s.dtype == torch.float32
    assert_close(found, maps_of(engine).filter_map(inputs), 2e-5)
