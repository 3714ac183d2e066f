"""What only the native engine has: instruction sets, threads, fork, the library itself."""

import itertools
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kalman_attention.ops import cpu
from kalman_attention.ops.contract import (
    LinearScanGrads,
    LinearScanInputs,
    LinearScanResult,
    ScanGrads,
    ScanInputs,
    ScanResult,
)
from kalman_attention.ops.cpu import library

REASON = cpu.why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
ISAS = cpu.info().isas if REASON is None else ()


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def draw(
    B: int, T: int, N: int, D: int, rows: int | None = None, dtype: torch.dtype = torch.float32
) -> ScanInputs:
    generator = torch.Generator().manual_seed(T + N + D)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=dtype)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    R = rows or B
    return ScanInputs(
        normal(B, T, N),
        normal(B, T, N),
        normal(B, T, D),
        uniform(B, T, D),
        0.5 + 0.5 * uniform(N, D),
        0.1 * uniform(N, D),
        normal(R, N, D),
        0.5 + uniform(R, N, D),
        None,
        None,
    )


def shared(x: ScanInputs, blocks: int) -> ScanInputs:
    """The same call with blocks of slots that share a precision."""
    return x._replace(
        a_bar=x.a_bar[:blocks], p_bar=x.p_bar[:blocks], variance_0=x.variance_0[:, :blocks]
    )


def with_gaps(x: ScanInputs, channels: int) -> ScanInputs:
    """The same call with time between its tokens."""
    generator = torch.Generator().manual_seed(channels)
    gaps = torch.rand(*x.v.shape[:2], channels, generator=generator, dtype=x.v.dtype)
    return x._replace(dt=3.0 * (gaps - 0.1).relu())


def both(x: ScanInputs, **options: str) -> tuple[ScanResult, ScanGrads]:
    out = cpu.forward(x, return_variance=True, save=True, **options)  # type: ignore[arg-type]
    assert out.checkpoints is not None
    dy = torch.ones_like(x.v)
    grads = cpu.backward(
        x,
        out.checkpoints,
        dy,
        dy,
        x.mean_0,
        x.variance_0,
        **options,  # type: ignore[arg-type]
    )
    return out, grads


def flat(x: tuple[ScanResult, ScanGrads]) -> list[Tensor]:
    return [t for part in x for t in part if t is not None]


SHAPES = {
    "model": draw(1, 300, 16, 200),
    "batch": draw(40, 70, 8, 64),
    "narrow": draw(1, 5000, 3, 5),
    "documents": draw(1, 700, 4, 40, rows=5)._replace(
        cu_seqlens=torch.tensor([0, 0, 3, 500, 640, 700])
    ),
    "masked": draw(3, 150, 4, 40)._replace(mask=torch.rand(3, 150) < 0.7),
    "few slots": draw(2, 100, 1, 300),
    "cut in time": draw(2, 5000, 8, 12),
    "documents cut in time": draw(1, 20_000, 4, 12, rows=2)._replace(
        cu_seqlens=torch.tensor([0, 700, 20_000])
    ),
    "shared": shared(draw(2, 300, 16, 200), 1),
    "shared, ragged": shared(draw(1, 130, 42, 37), 14),
    "shared, cut in time": shared(draw(1, 5000, 6, 12), 2),
    "gaps": with_gaps(draw(2, 300, 16, 200), 200),
    "gaps of tokens": with_gaps(draw(3, 150, 5, 40), 1),
    "gaps, cut in time": with_gaps(draw(1, 5000, 3, 5), 5),
    "both, documents": with_gaps(shared(draw(1, 700, 6, 40, rows=5), 2), 40)._replace(
        cu_seqlens=torch.tensor([0, 0, 3, 500, 640, 700])
    ),
    "both, cut in time": with_gaps(shared(draw(1, 5000, 6, 12), 3), 1),
    "both": with_gaps(shared(draw(2, 200, 64, 70), 2), 1)._replace(mask=torch.rand(2, 200) < 0.7),
}
EVERY_SHAPE = pytest.mark.parametrize("x", SHAPES.values(), ids=SHAPES.keys())


@EVERY_SHAPE
def test_bits_do_not_depend_on_threads_or_pool(x: ScanInputs) -> None:
    torch.set_num_threads(1)
    expected = flat(both(x))
    for threads in (2, 3, 4, 7):
        torch.set_num_threads(threads)
        for pool in ("auto", "threads"):
            for got, wanted in zip(flat(both(x, pool=pool)), expected, strict=True):
                assert torch.equal(got, wanted)


@EVERY_SHAPE
def test_bits_of_smoothing_do_not_depend_on_threads_or_pool(x: ScanInputs) -> None:
    torch.set_num_threads(1)
    expected = cpu.smooth(x)
    for threads in (2, 3, 4):
        torch.set_num_threads(threads)
        for pool in ("auto", "threads"):
            found = cpu.smooth(x, pool=pool)
            for got, wanted in zip(found[:4], expected[:4], strict=True):
                assert got is not None
                assert wanted is not None
                assert torch.equal(got, wanted)


def smooth_grads(x: ScanInputs, isa: str = "auto", pool: str = "auto") -> list[torch.Tensor]:
    dy, dy_var = torch.ones_like(x.v), torch.cos(x.v)
    grads = cpu.smooth_backward(x, dy, dy_var, x.mean_0, None, isa=isa, pool=pool)
    return [g for g in grads if g is not None]


@EVERY_SHAPE
def test_gradients_of_smoothing_are_the_same_everywhere(x: ScanInputs) -> None:
    """The same bits for every number of threads; rounding only between instruction sets."""
    torch.set_num_threads(1)
    expected = smooth_grads(x)
    for threads, pool in ((2, "auto"), (3, "threads")):
        torch.set_num_threads(threads)
        for got, wanted in zip(smooth_grads(x, pool=pool), expected, strict=True):
            assert torch.equal(got, wanted)
    for isa in ISAS:
        for got, wanted in zip(smooth_grads(x, isa=isa), expected, strict=True):
            assert (got - wanted).abs().max() <= 1e-4 * wanted.abs().max()


@EVERY_SHAPE
@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set(isa: str, x: ScanInputs) -> None:
    exact = ScanInputs(
        *(t.double() if t is not None and t.dtype.is_floating_point else t for t in x)
    )
    for got, wanted in zip(flat(both(x, isa=isa)), flat(both(exact)), strict=True):
        assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_strided_inputs_are_read_in_place() -> None:
    x = draw(2, 90, 4, 24)
    wide = torch.randn(90, 2, 3 * 24)
    v, k = wide[..., 24:48].transpose(0, 1), torch.randn(2, 90, 9)[..., 2:6]
    lam_v = x.lam_v[:, :1].expand(-1, 90, -1)
    strided = x._replace(v=v, lam_v=lam_v, k=k)
    dense = x._replace(v=v.contiguous(), lam_v=lam_v.contiguous(), k=k.contiguous())
    for got, wanted in zip(flat(both(strided)), flat(both(dense)), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("D", [32, 64, 192])
def test_whole_tiles_are_used_where_they_are(D: int, dtype: torch.dtype) -> None:
    # Odd offsets and row lengths, so that no row is aligned to a vector. Padding at both ends puts
    # a masked token into every chunk: those go through copies.
    x = draw(2, 90, 4, D, dtype=dtype)
    wide = torch.randn(2, 90, 2 * D + 5, dtype=dtype)
    lam_v = torch.rand(2, 90, D + 1, dtype=dtype)[..., 1:]
    strided = x._replace(v=wide[..., 3 : 3 + D], lam_v=lam_v)
    mask = torch.ones(2, 92, dtype=torch.bool)
    mask[:, [0, 91]] = False
    longer = [torch.nn.functional.pad(t, (0, 0, 1, 1)) for t in strided[:4]]
    copied = ScanInputs(*longer, *strided[4:8], mask, None)
    direct = cpu.forward(strided, return_variance=True, save=True)
    through = cpu.forward(copied, return_variance=True, save=True)
    assert direct.y_var is not None
    assert through.y_var is not None
    assert torch.equal(direct.y, through.y[:, 1:91])
    assert torch.equal(direct.y_var, through.y_var[:, 1:91])
    assert torch.equal(direct.mean, through.mean)
    assert torch.equal(direct.variance, through.variance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("blocks", [6, 2])
@pytest.mark.parametrize("gaps", [0, 1, 37])
def test_step_is_one_token_of_the_scan(dtype: torch.dtype, blocks: int, gaps: int) -> None:
    x = draw(3, 1, 6, 37, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    x = shared(ScanInputs(*(t.to(dtype) for t in x[:4]), *x[4:]), blocks)
    x = with_gaps(x, gaps) if gaps else x
    mask = torch.tensor([True, False, True])
    whole = cpu.forward(x._replace(mask=mask[:, None]), return_variance=True, save=True)
    token = x._replace(
        mask=mask,
        dt=None if x.dt is None else x.dt[:, 0],
        **{n: getattr(x, n)[:, 0] for n in ("q", "k", "v", "lam_v")},
    )
    one = cpu.step(token, return_variance=True)
    assert whole.y_var is not None
    torch.testing.assert_close(one.y, whole.y[:, 0])
    torch.testing.assert_close(one.y_var, whole.y_var[:, 0])
    torch.testing.assert_close(one.mean, whole.mean)
    assert torch.equal(one.variance[1], x.variance_0[1])


def test_nan_comes_out_as_nan() -> None:
    x = draw(1, 100, 4, 16)
    x.v[0, 50, 3] = float("nan")
    y = cpu.forward(x, return_variance=False, save=False).y
    assert y[0, 50:, 3].isnan().all()
    assert y[0, :50].isfinite().all()
    assert y[0, :, :3].isfinite().all()


def test_denormals_of_the_caller_are_left_alone() -> None:
    both(draw(2, 70, 4, 8))
    tiny = torch.tensor(1e-40)
    assert (tiny * 0.5).item() > 0


def test_calls_from_many_threads() -> None:
    inputs = [draw(2, 100 + i, 4, 40) for i in range(8)]
    expected = [flat(both(x)) for x in inputs]
    with ThreadPoolExecutor(8) as workers:
        for got, wanted in zip(workers.map(both, inputs), expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(flat(got), wanted, strict=True))


def _in_child(shape: str, queue: "multiprocessing.Queue[tuple[str, bytes]]") -> None:
    # Nothing but the kernel: torch's own parallel operations hang in a forked child, and filling
    # empty tensors with NaN is one of them.
    torch.use_deterministic_algorithms(False)
    y = cpu.forward(SHAPES[shape], return_variance=False, save=False).y
    queue.put((cpu.info().pool, y.numpy().tobytes()))


@pytest.mark.parametrize("shape", ["model", "cut in time"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_works_after_fork(shape: str) -> None:
    torch.set_num_threads(2)
    expected = cpu.forward(SHAPES[shape], return_variance=False, save=False).y
    context = multiprocessing.get_context("fork")
    queue: multiprocessing.Queue[tuple[str, bytes]] = context.Queue()
    child = context.Process(target=_in_child, args=(shape, queue), daemon=True)
    child.start()
    pool, found = queue.get(timeout=60)
    child.join(timeout=60)
    assert child.exitcode == 0
    assert pool == "threads"
    assert found == expected.numpy().tobytes()


def test_failures_become_exceptions(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MemoryError, match="not enough memory"):
        library.check(4)
    with pytest.raises(RuntimeError, match="instruction set"):
        library.check(2)
    monkeypatch.setattr(cpu.abi, "ABI_VERSION", 99)
    with pytest.raises(RuntimeError, match="different versions"):
        cpu.forward(draw(1, 3, 2, 4), return_variance=False, save=False)


OUT_OF_MEMORY = """
import resource, torch
from kalman_attention.ops import cpu
from kalman_attention.ops.contract import ScanInputs
from kalman_attention.ops.cpu import abi
torch.set_num_threads(1)
R, N, D = 64, 1024, 64
one, belief = torch.ones(R, 1, D), torch.ones(R, N, D)
keys, dynamics = torch.ones(R, 1, N), torch.full((N, D), 0.5)
scan = ScanInputs(keys, keys, one, one, dynamics, dynamics, belief, belief, None, None)
saved = scan.new_checkpoints(torch.float32)
outputs = abi.Outputs(torch.empty(R, 1, D), None, *torch.empty(2, R, N, D), saved)
grads = (*(torch.empty(t.shape) for t in scan[:8]), None)
def forward():
    abi.run_forward(abi.KALMAN, scan, outputs, "auto", "auto")
def backward():
    abi.run_backward(abi.KALMAN, scan, saved, (one, None, None, None), grads, "auto", "auto")
forward(), backward()
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(),) * 2)
for run in (forward, backward):
    try:
        run()
    except MemoryError as error:
        print(run.__name__, error)
"""


@pytest.mark.skipif("KLA_CPU_LIBRARY" in os.environ, reason="sanitizers reserve address space")
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_a_real_failure_to_allocate_is_a_memory_error() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", OUT_OF_MEMORY],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["forward", "backward"]
    assert all("not enough memory" in line for line in lines)


def test_a_missing_library_is_explained(tmp_path: Path) -> None:
    code = (
        "import kalman_attention.ops.cpu as cpu; print(cpu.why_not()); "
        "import kalman_attention.ops.engines as e, torch; "
        "print(e.resolve('auto', torch.device('cpu'), torch.float32))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={"KLA_CPU_LIBRARY": str(tmp_path / "none.so"), "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "was not built" in done.stdout
    assert "compiler" in done.stdout
    assert "cpu" not in done.stdout.splitlines()[-1]


def linear_loop(x: LinearScanInputs) -> tuple[Tensor, Tensor]:
    h, y = x.h_0, []
    for t in range(x.x.shape[1]):
        dt = x.dt[:, t, None]
        token = torch.exp(dt * x.A) * h + dt * x.x[:, t, None] * x.B[:, t, :, None]
        real = True if x.mask is None else x.mask[:, t, None, None]
        h = torch.where(torch.as_tensor(real), token, h)
        read = (x.C[:, t, :, None] * h).sum(1)
        y.append(read)
    out = torch.stack(y, 1)
    return (out if x.mask is None else out * x.mask[..., None]), h


def draw_linear(B: int, T: int, N: int, D: int) -> LinearScanInputs:
    x = draw(B, T, N, D, dtype=torch.float64)
    return LinearScanInputs(x.v, x.lam_v, -5 * x.variance_0[0], x.k, x.q, x.mean_0, None, None)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("masked", [False, True], ids=["all tokens", "masked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_linear_scan(isa: str, masked: bool, dtype: torch.dtype) -> None:
    x = draw_linear(2, 131, 5, 41)
    if masked:
        x = x._replace(mask=torch.rand(2, 131) < 0.7)
    leaves = [t.detach().clone().requires_grad_() for t in x[:6]]
    y, h = linear_loop(LinearScanInputs(*leaves, *x[6:]))
    dy, dh = torch.randn_like(y), torch.randn_like(h)
    wanted = torch.autograd.grad([y, h], leaves, [dy, dh])
    low = LinearScanInputs(*(t.to(dtype) for t in x[:6]), *x[6:])
    out = cpu.linear_forward(low, save=True, isa=isa)
    assert isinstance(out, LinearScanResult)
    assert out.checkpoints is not None
    grads = cpu.linear_backward(low, out.checkpoints, dy.to(dtype), dh.to(dtype), isa=isa)
    assert isinstance(grads, LinearScanGrads)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for a, b in zip((out.y, out.h, *grads), (y, h, *wanted), strict=True):
        assert (a - b).abs().max() <= tolerance * b.abs().max()


def test_linear_scan_of_documents() -> None:
    x = draw_linear(1, 200, 3, 20)
    ends = [0, 0, 70, 71, 200]
    h_0 = torch.randn(4, 3, 20, dtype=torch.float64)
    packed = x._replace(h_0=h_0, cu_seqlens=torch.tensor(ends))
    out = cpu.linear_forward(packed, save=True)
    for i, (t0, t1) in enumerate(itertools.pairwise(ends)):
        alone = LinearScanInputs(
            *(t[:, t0:t1] for t in (x.x, x.dt)),
            x.A,
            *(t[:, t0:t1] for t in (x.B, x.C)),
            h_0[i : i + 1],
            None,
            None,
        )
        part = cpu.linear_forward(alone, save=False)
        torch.testing.assert_close(out.y[:, t0:t1], part.y)
        torch.testing.assert_close(out.h[i], part.h[0])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_exp_is_exact_to_two_units(isa: str, dtype: torch.dtype) -> None:
    low, high = (-86.0, 88.0) if dtype == torch.float32 else (-707.0, 709.0)
    x = torch.cat([torch.linspace(low, high, 50_000), -torch.logspace(-8, 1.9, 50_000)]).to(dtype)
    special = torch.tensor([0.0, -torch.inf, -1e9, 1e9, torch.inf, torch.nan], dtype=dtype)
    x = torch.cat([special, x])
    one, zero = torch.ones(1, 1, len(x), dtype=dtype), torch.zeros(1, 1, 1, dtype=dtype)
    # With B = 0 and h = 1 the new state is exp(dt A).
    inputs = LinearScanInputs(one, one, x[None], zero, zero, one, None, None)
    h = cpu.linear_forward(inputs, save=False, isa=isa).h.flatten()
    assert h[:5].tolist() == [1.0, 0.0, 0.0, torch.inf, torch.inf]
    assert h[5].isnan()
    exact = torch.exp(x[6:].double())
    assert ((h[6:] - exact) / exact).abs().max() <= 2 * torch.finfo(dtype).eps
