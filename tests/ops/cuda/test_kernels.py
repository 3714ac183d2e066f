"""What only the CUDA engine has, run in the emulation: schedules, waves, rounds, thread order."""

import pytest
import torch
from torch import Tensor

from kalman_attention.ops import cuda
from kalman_attention.ops.contract import ScanInputs
from kalman_attention.ops.cuda import device, grid, scan
from kalman_attention.tools.selfcheck import Case, make_call, run_call
from tests.ops.test_engines import check

pytestmark = pytest.mark.skipif(
    not device.EMULATION, reason="`make test-cuda` builds the emulation and sets its path"
)

CASES = {
    "one of everything": Case(B=1, T=1, N=1, D=1),
    "no tokens": Case(B=2, T=0, N=3, D=4),
    "odd sizes": Case(B=3, T=300, N=5, D=13),
    "slots of a model": Case(B=1, T=200, N=16, D=40),
    "several rounds of slots": Case(B=1, T=70, N=150, D=3),
    "no process noise": Case(B=2, T=400, N=3, D=8, p_max=0.0, a_min=1e-3),
    "strong evidence": Case(B=2, T=330, N=4, D=8, lam_max=1e6),
    "left padding": Case(B=4, T=190, N=4, D=8, padding="left"),
    "holes": Case(B=4, T=200, N=4, D=8, padding="random"),
    "packed": Case(B=1, T=400, N=4, D=8, documents=6),
    "more documents than tokens": Case(B=1, T=5, N=2, D=8, documents=9),
    "blocks with empty places": Case(B=2, T=140, N=18, D=5, share=9, padding="random"),
    "blocks in several rounds": Case(B=1, T=70, N=150, D=3, share=2),
    "the largest block": Case(B=1, T=70, N=128, D=3, share=grid.LARGEST_BLOCK, documents=2),
    "gaps": Case(B=2, T=140, N=5, D=13, gaps="channel", padding="left"),
    "gaps in several rounds": Case(B=1, T=70, N=150, D=3, gaps="token"),
    "gaps and blocks": Case(B=1, T=200, N=16, D=9, share=8, gaps="channel", documents=4),
}
SCHEDULES = ["serial", "split"]


@pytest.fixture(params=SCHEDULES)
def schedule(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(grid, "SCHEDULE", request.param)
    return request.param


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_both_schedules_keep_the_contract(schedule: str, case: Case, dtype: torch.dtype) -> None:
    check("cuda", case, dtype)


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("N", "share", "gaps"),
    [(1, 1, "none"), (3, 1, "none"), (16, 1, "none"), (67, 1, "none"), (24, 12, "channel")],
)
def test_the_order_of_threads_changes_no_bit(
    schedule: str, N: int, share: int, gaps: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = make_call(Case(B=2, T=150, N=N, D=9, share=share, gaps=gaps, padding="random"))
    expected = run_call(call, "cuda", torch.float32)
    for seed in (1, 2, 3):
        monkeypatch.setattr(device, "SEED", seed)
        assert same_bits(run_call(call, "cuda", torch.float32), expected)


@pytest.mark.parametrize("share", [1, 5])
def test_waves_of_channels_change_no_bit(share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    call = make_call(Case(B=2, T=70, N=70, D=50, share=share))
    expected = run_call(call, "cuda", torch.float32)
    launches = []
    launch = scan.launch
    monkeypatch.setattr(scan, "launch", lambda *args: (launches.append(args[1]), launch(*args)))
    monkeypatch.setattr(scan, "PART_BYTES", 150_000)
    assert same_bits(run_call(call, "cuda", torch.float32), expected)
    assert launches.count("kla_sum_slots") > 2 * 2


def draw(B: int, T: int, N: int, D: int, dtype: torch.dtype) -> ScanInputs:
    tensors = make_call(Case(B=B, T=T, N=N, D=D)).tensors
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    tokens, lanes = (x.to(dtype) for x in tensors[:4]), (x.to(wide) for x in tensors[4:])
    return ScanInputs(*tokens, *lanes, None, None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_step_is_one_token_of_the_scan(dtype: torch.dtype) -> None:
    x = draw(3, 1, 5, 37, dtype)
    mask = torch.tensor([True, False, True])
    whole = cuda.forward(x._replace(mask=mask[:, None]), return_variance=True, save=False)
    token = x._replace(mask=mask, **{n: getattr(x, n)[:, 0] for n in ("q", "k", "v", "lam_v")})
    one = cuda.step(token, return_variance=True)
    assert whole.y_var is not None
    assert cuda.step(token, return_variance=False).y_var is None
    torch.testing.assert_close(one.y, whole.y[:, 0])
    torch.testing.assert_close(one.y_var, whole.y_var[:, 0])
    torch.testing.assert_close(one.mean, whole.mean)
    assert torch.equal(one.variance[1], x.variance_0[1])


def test_nan_comes_out_as_nan(schedule: str) -> None:
    x = draw(1, 300, 4, 16, torch.float32)
    x.v[0, 150, 3] = float("nan")
    x.lam_v[0, 150, 3] = 1.0
    y = cuda.forward(x, return_variance=False, save=False).y
    assert y[0, 150, 3].isnan()
    assert y[0, :150].isfinite().all()
    assert y[0, :, :3].isfinite().all()


def test_every_dtype_may_meet_every_other() -> None:
    x = draw(2, 40, 4, 6, torch.float32)
    mixed = x._replace(v=x.v.half(), lam_v=x.lam_v.bfloat16(), k=x.k.half(), q=x.q.bfloat16())
    exact = mixed._replace(**{n: getattr(mixed, n).float() for n in ("q", "k", "v", "lam_v")})
    got = cuda.forward(mixed, return_variance=True, save=True)
    wanted = cuda.forward(exact, return_variance=True, save=True)
    assert got.checkpoints is not None
    assert wanted.checkpoints is not None
    assert torch.equal(got.y, wanted.y.half())
    assert torch.equal(got.mean, wanted.mean)
    dy = torch.ones_like(x.v)
    low = cuda.backward(mixed, got.checkpoints, dy.half(), None, None, None)
    high = cuda.backward(exact, wanted.checkpoints, dy, None, None, None)
    for g, w, t in zip(low[:8], high[:8], mixed[:8], strict=True):
        assert g.dtype == t.dtype
        assert torch.equal(g, w.to(t.dtype))


def test_rows_may_lie_more_than_two_to_the_31_elements_apart() -> None:
    torch.use_deterministic_algorithms(False)  # filling this much memory would really take it
    x = draw(2, 30, 3, 4, torch.bfloat16)
    apart = torch.empty(2**31 + 30 * 4, dtype=torch.bfloat16).as_strided(x.v.shape, (2**31, 4, 1))
    apart.copy_(x.v)
    got = cuda.forward(x._replace(v=apart), return_variance=False, save=False)
    assert torch.equal(got.y, cuda.forward(x, return_variance=False, save=False).y)


def test_a_block_that_is_too_large_is_refused() -> None:
    from kalman_attention import kla_scan

    tensors = make_call(
        Case(B=1, T=2, N=2 * grid.LARGEST_BLOCK, D=1, share=2 * grid.LARGEST_BLOCK)
    ).tensors
    with pytest.raises(ValueError, match=r"up to 64 slots that share.*engine='triton'"):
        kla_scan(*tensors[:6], engine="cuda")


def test_an_unknown_kernel_is_an_error() -> None:
    unit = scan.program("fwd", torch.float32, 4)
    with pytest.raises(RuntimeError, match="no such kernel"):
        device.emulate(unit, "kla_nothing", 1, 128, b"", torch.device("cpu"))
    with pytest.raises(RuntimeError, match="another version"):
        device.emulate(unit, "kla_forward", 1, 128, b"", torch.device("cpu"))
