"""The Triton engine in small: both schedules, several blocks and waves, with chunks of 8 tokens.

Kernels run in the interpreter, which must be chosen before triton is imported: `make test` runs
this file once more with TRITON_INTERPRET=1. `make test-triton` runs all of tests/ops that way.
"""

import re

import pytest
import torch

from kalman_attention import KLAState, kla_scan, kla_scan_ref, kla_step
from kalman_attention.ops import engines
from kalman_attention.ops.triton import schedule as schedule_rule
from kalman_attention.ops.triton.schedule import (
    BACKWARD_LANES,
    FILL,
    FORWARD_LANES,
    cut,
    lanes_for,
)
from kalman_attention.tools.selfcheck import Case, errors, make_call, misses, run_call
from tests.interpreter import INTERPRETING, shrink

pytest.importorskip("triton")
interpreted = pytest.mark.skipif(not INTERPRETING, reason="needs TRITON_INTERPRET=1")
compiled = pytest.mark.skipif(INTERPRETING, reason="nothing is compiled while Triton interprets")

SCHEDULES = {"serial": 1, "split": 512}
"""What to set ``schedule.FILL`` to."""

CASES = {
    "one of everything": Case(B=1, T=1, N=1, D=1),
    "no tokens": Case(B=2, T=0, N=3, D=4),
    "four chunks": Case(B=1, T=32, N=2, D=3),
    "odd sizes": Case(B=2, T=37, N=3, D=3),
    "holes": Case(B=1, T=35, N=3, D=5, padding="random"),
    "left padding": Case(B=2, T=35, N=2, D=3, padding="left"),
    "packed": Case(B=1, T=40, N=3, D=5, documents=4),
    "blocks of three": Case(B=1, T=35, N=6, D=3, share=3, padding="random"),
    "one block": Case(B=1, T=36, N=4, D=3, share=4, documents=3),
    "gaps": Case(B=1, T=35, N=2, D=3, gaps="channel", padding="random", a_min=1e-3),
    "gaps, no decay, blocks": Case(B=1, T=34, N=4, D=3, gaps="token", share=2, a_min=1.0),
    "no process noise": Case(B=1, T=40, N=2, D=3, p_max=0.0, a_min=1e-3, lam_max=1e6),
}


@pytest.fixture(params=SCHEDULES)
def schedule(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    shrink(monkeypatch, fill=SCHEDULES[request.param], lanes=8)
    return str(request.param)


@interpreted
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_values_and_gradients(schedule: str, case: Case) -> None:
    call = make_call(case)
    truth = run_call(call, "reference", torch.float64)
    assert not misses(errors(run_call(call, "triton", torch.float32), truth))


@interpreted
@pytest.mark.parametrize("gaps", ["none", "token"])
def test_float64(schedule: str, gaps: str) -> None:
    call = make_call(Case(B=1, T=35, N=3, D=5, padding="random", gaps=gaps))
    truth = run_call(call, "reference", torch.float64)
    assert max(errors(run_call(call, "triton", torch.float64), truth).values()) < 1e-12


@interpreted
def test_rows_in_waves_give_the_same_bits(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = make_call(Case(B=3, T=33 if schedule == "split" else 9, N=2, D=3))
    whole = run_call(call, "triton", torch.float32)
    monkeypatch.setattr(schedule_rule, "WAVE", 1)
    waves = run_call(call, "triton", torch.float32)
    assert all(torch.equal(waves[name], whole[name]) for name in whole)


@interpreted
@pytest.mark.parametrize("use", [(0,), (3,)], ids=["y", "variance"])
def test_gradients_from_one_output_alone(schedule: str, use: tuple[int, ...]) -> None:
    call = make_call(Case(B=1, T=35, N=2, D=3))
    truth = run_call(call, "reference", torch.float64, use=use)
    assert not misses(errors(run_call(call, "triton", torch.float32, use=use), truth))


@interpreted
def test_short_dtypes_and_strides(schedule: str) -> None:
    tensors = make_call(Case(B=2, T=33, N=2, D=3, lam_max=3.0)).tensors[:6]
    tokens = [x.bfloat16().transpose(1, 2).contiguous().transpose(1, 2) for x in tensors[:4]]
    dynamics = [x.float() for x in tensors[4:]]
    out = kla_scan(*tokens, *dynamics, engine="triton")
    exact = kla_scan_ref(*(x.float() for x in tokens), *dynamics)
    assert out.y.dtype == torch.bfloat16
    unit = torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(out.y.float(), exact.y, rtol=unit, atol=unit)
    torch.testing.assert_close(out.state, exact.state, rtol=1e-5, atol=1e-6)


@interpreted
@pytest.mark.parametrize(
    ("share", "gaps"), [(1, "none"), (2, "none"), (2, "token"), (1, "channel")]
)
def test_a_step_is_a_scan_over_one_token(share: int, gaps: str) -> None:
    case = Case(B=3, T=1, N=4, D=5, share=share, gaps=gaps)
    *tensors, dt = [x.float() for x in make_call(case).tensors] + [None] * (gaps == "none")
    state, mask = KLAState(*tensors[6:]), torch.tensor([True, False, True])
    tokens, gap = [x[:, 0] for x in tensors[:4]], None if dt is None else dt[:, 0]
    options = {"return_variance": True}
    got = kla_step(*tokens, *tensors[4:6], state, mask=mask, dt=gap, engine="triton", **options)
    wanted = kla_scan_ref(*tensors[:6], state=state, mask=mask.unsqueeze(1), dt=dt, **options)
    torch.testing.assert_close(got.y, wanted.y[:, 0])
    torch.testing.assert_close(got.y_var, wanted.y_var[:, 0])
    torch.testing.assert_close(got.state, wanted.state)


def test_auto_takes_it_on_gpus_and_never_on_cpus() -> None:
    assert engines.resolve("auto", torch.device("cuda"), torch.float32) == "triton"
    assert engines.resolve("auto", torch.device("cpu"), torch.float32) != "triton"


def test_the_schedule_follows_from_the_shape() -> None:
    one_row = cut(1, 65_536, 16, 960, FORWARD_LANES)
    assert (*one_row.tile, one_row.blocks) == (1, 16, 32, 30)
    assert one_row.segments == FILL // 30
    assert one_row.segments * one_row.per_segment >= 1024
    assert cut(18, 65_536, 16, 960, FORWARD_LANES).segments == 1
    assert cut(1, 192, 16, 960, FORWARD_LANES).segments == 1
    assert cut(1, 0, 16, 960, FORWARD_LANES).segments == 1
    assert cut(2, 100, 67, 9, FORWARD_LANES).block_g == 128
    assert cut(1, 64, 12, 9, FORWARD_LANES, share=3).tile == (4, 4, 16)
    assert lanes_for(torch.float32, BACKWARD_LANES, plain=False) == BACKWARD_LANES // 2
    assert lanes_for(torch.float32, FORWARD_LANES, plain=False) == FORWARD_LANES


@compiled
def test_a_kernel_compiles_without_a_device() -> None:
    from kalman_attention.ops.triton.fwd import filter_kernel
    from kalman_attention.tools.triton_resources import Variant, compile_variant, measure

    variant = Variant(filter_kernel, FORWARD_LANES)
    found = measure(variant, "sm_80")
    assert found.kernel == "filter_kernel"
    assert found.architecture == "sm_80"
    assert 32 < found.registers <= 255
    assert found.spill_bytes == 0
    # No offset is computed in 32 bits.
    assert not re.search(r"arith.muli .* : i32", compile_variant(variant, "sm_80").asm["ttir"])
    # One division per lane, rounded to nearest; sixteen lanes per thread.
    assert compile_variant(variant, "sm_80").asm["ptx"].count("div.rn.f32") == 16


@compiled
def test_the_series_of_a_gap_is_compiled_in_float64() -> None:
    # The interpreter keeps Python's floats, so it could not tell.
    from kalman_attention.ops.triton.bwd import adjoint_kernel
    from kalman_attention.tools.triton_resources import Variant, compile_variant

    variant = Variant(adjoint_kernel, BACKWARD_LANES, tokens=torch.float64, gaps=True)
    text = compile_variant(variant, "sm_80").asm["ttir"]
    numbers = {float(x) for x in re.findall(r"dense<([-+.0-9eE]+)> : tensor<[0-9x]+xf64>", text)}
    # 1 / (j + 1) of the mean of an exponential and (j + 1) / (j (j + 2)) of its slope.
    assert {1 / (j + 1) for j in range(1, 16)} <= numbers
    assert {(j + 1) / (j * (j + 2)) for j in range(1, 20)} <= numbers
