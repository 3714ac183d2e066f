"""Calls that the native engine cuts in time: one or two tiles of channels and many tokens."""

import pytest
import torch
from torch import Tensor

from kalman_attention import KLAState, kla_scan_ref
from kalman_attention.ops import cpu
from kalman_attention.ops.arithmetic import needed_dtype
from kalman_attention.ops.contract import LinearScanInputs, ScanInputs

REASON = cpu.why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
OUTPUTS = ("y", "y_var", "mean", "variance")
GRADS = ("q", "k", "v", "lam_v", "a_bar", "p_bar", "mean_0", "variance_0", "dt")
PER_CHANNEL = {
    "dt",
    "y",
    "y_var",
    "mean",
    "variance",
    "v",
    "lam_v",
    "a_bar",
    "p_bar",
    "mean_0",
    "variance_0",
}
WIDE = 200
"""Channels that are more than two tiles on every instruction set: such a call is not cut."""


def draw(
    B: int, T: int, N: int, D: int, rows: int | None = None, dtype: torch.dtype = torch.float32
) -> ScanInputs:
    generator = torch.Generator().manual_seed(T + N + D)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=dtype)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    R = rows or B
    tokens = normal(B, T, N), normal(B, T, N), normal(B, T, D), uniform(B, T, D)
    a_bar = (1 - 0.3 * uniform(N, D) ** 3) * torch.sign(normal(N, D))
    belief = normal(R, N, D), 0.5 + uniform(R, N, D)
    return ScanInputs(*tokens, a_bar, 0.1 * uniform(N, D) ** 2, *belief, None, None)


def run(x: ScanInputs, dy: Tensor, dy_var: Tensor) -> dict[str, Tensor]:
    x = x._replace(acc_dtype=needed_dtype(x, gradients=True))
    out = cpu.forward(x, return_variance=True, save=True)
    assert out.checkpoints is not None
    grads = cpu.backward(x, out.checkpoints, dy, dy_var, x.mean_0, x.variance_0)
    found = {name: getattr(out, name) for name in OUTPUTS}
    return found | {f"d{n}": getattr(grads, n) for n in GRADS if getattr(grads, n) is not None}


def cut(x: ScanInputs) -> dict[str, Tensor]:
    return run(x, torch.cos(x.v), torch.sin(x.v))


def uncut(x: ScanInputs) -> dict[str, Tensor]:
    """The same call in float64 with idle channels beside it, so many that time is not cut."""
    D = x.v.shape[2]
    given = {name: getattr(x, name) for name in GRADS if name not in ("k", "q")}
    wide = {
        # An idle channel decays like any other: a gap needs a decay above 0.
        name: torch.nn.functional.pad(t.double(), (0, WIDE - D), value=float(name == "a_bar"))
        for name, t in given.items()
        if t is not None
    }
    dy, dy_var = (
        torch.nn.functional.pad(f(x.v).double(), (0, WIDE - D)) for f in (torch.cos, torch.sin)
    )
    found = run(x._replace(k=x.k.double(), q=x.q.double(), **wide), dy, dy_var)
    return {
        name: value[..., :D] if name.removeprefix("d") in PER_CHANNEL else value
        for name, value in found.items()
    }


def assert_close(got: dict[str, Tensor], wanted: dict[str, Tensor], scale: float = 1.0) -> None:
    for name, value in wanted.items():
        tolerance = scale * (1e-5 if name in ("y", "y_var") else 1e-4)
        error = (got[name] - value).abs().max()
        assert error <= tolerance * value.abs().max(), f"{name}: {error} of {value.abs().max()}"


BORDERS = [4095, 4096, 4097, 4159, 4160, 4161, 4608, 4609, 8191, 8192, 8193, 8255, 9215, 9217]


@pytest.mark.parametrize("T", BORDERS)
def test_every_length_around_the_borders_of_segments(T: int) -> None:
    x = draw(1, T, 3, 5)
    assert_close(cut(x), uncut(x))


@pytest.mark.parametrize("T", [4096, 4160, 8193])
def test_float64_loses_nothing(T: int) -> None:
    x = draw(2, T, 2, 3, dtype=torch.float64)
    assert_close(cut(x), uncut(x), scale=1e-8)


@pytest.mark.parametrize("T", [4097, 8192])
@pytest.mark.parametrize("blocks", [1, 2, 6])
def test_gaps_and_shared_precision(T: int, blocks: int) -> None:
    x = draw(1, T, 6, 5)
    generator = torch.Generator().manual_seed(T)
    x = x._replace(
        a_bar=x.a_bar[:blocks].abs(),
        p_bar=x.p_bar[:blocks],
        variance_0=x.variance_0[:, :blocks],
        dt=2.0 * torch.rand(1, T, 5, generator=generator),
    )
    assert_close(cut(x), uncut(x))
    assert_close(cut(x._replace(dt=None)), uncut(x._replace(dt=None)))


def test_time_is_really_cut() -> None:
    # Slow dynamics, so that the last bits of what enters a segment show. Without this the tests of
    # this file would pass if nothing were ever cut.
    x = draw(1, 4096, 2, 3, dtype=torch.float64)
    x = x._replace(a_bar=torch.full((2, 3), 0.9999, dtype=torch.float64), lam_v=1e-3 * x.lam_v)
    got, wanted = cut(x), uncut(x)
    assert not torch.equal(got["y"], wanted["y"])
    assert not torch.equal(got["dmean_0"], wanted["dmean_0"])
    assert_close(got, wanted, scale=1e-8)


def test_against_the_reference() -> None:
    x = draw(1, 4100, 2, 3)
    leaves = [t.double().requires_grad_() for t in x[:8]]
    out = kla_scan_ref(*leaves[:6], state=KLAState(*leaves[6:]), return_variance=True)
    assert out.y_var is not None
    heads = [out.y, out.y_var, out.state.mean, out.state.variance]
    weights = [torch.cos(x.v).double(), torch.sin(x.v).double(), leaves[6], leaves[7]]
    grads = torch.autograd.grad(heads, leaves, [w.detach() for w in weights])
    wanted = dict(zip(OUTPUTS, (h.detach() for h in heads), strict=True))
    assert_close(cut(x), wanted | {f"d{n}": g for n, g in zip(GRADS[:8], grads, strict=True)})


# The arithmetic is float32 up to a decay of 1 - 1/4096, and float64 beyond; or beyond 1 - 1/1024
# where next to nothing is seen of what moves, or if nothing is seen at all.
@pytest.mark.parametrize(("slowest", "p"), [(0.9997, 0.0), (0.9997, 0.1), (1.0, 0.0), (1.0, 1e-6)])
@pytest.mark.parametrize("precision", [0.0, 1e-6, 1.0, 1e6])
def test_extremes_over_a_long_time(slowest: float, p: float, precision: float) -> None:
    x = draw(1, 65_536, 2, 5)
    rates = torch.tensor([1e-3, -0.5, 0.9, -0.999, slowest])
    x = x._replace(
        lam_v=precision * torch.relu(x.lam_v - 0.2),
        a_bar=torch.stack([rates, -rates]),
        p_bar=torch.full((2, 5), p),
    )
    long = slowest == 1 or precision == 0.0 or (precision == 1e-6 and p > 0)
    assert needed_dtype(x, gradients=True) == (torch.float64 if long else torch.float32)
    assert_close(cut(x), uncut(x))


def test_padding_and_two_rows() -> None:
    x = draw(2, 5000, 3, 7)
    mask = torch.rand(2, 5000, generator=torch.Generator().manual_seed(0)) < 0.7
    mask[0, :900] = False
    mask[1, 3000:] = False
    x = x._replace(mask=mask)
    got = cut(x)
    assert_close(got, uncut(x))
    assert (got["y"][~mask] == 0).all()
    assert (got["dv"][~mask] == 0).all()


def test_a_row_of_padding_leaves_the_belief_exactly_alone() -> None:
    x = draw(1, 4200, 3, 7)._replace(mask=torch.zeros(1, 4200, dtype=torch.bool))
    got = cut(x)
    assert torch.equal(got["mean"], x.mean_0)
    assert torch.equal(got["variance"], x.variance_0)
    assert torch.equal(got["dmean_0"], x.mean_0)
    assert torch.equal(got["dvariance_0"], x.variance_0)


@pytest.mark.parametrize("bounds", [[0, 17, 5000], [0, 5000, 5000], [0, 2500, 5000]])
def test_documents(bounds: list[int]) -> None:
    x = draw(1, 5000, 3, 5, rows=2)._replace(cu_seqlens=torch.tensor(bounds))
    assert_close(cut(x), uncut(x))


def test_without_checkpoints_and_with_few_gradients() -> None:
    x = draw(1, 4300, 2, 9)
    out = cpu.forward(x, return_variance=True, save=True)
    plain = cpu.forward(x, return_variance=False, save=False)
    assert out.checkpoints is not None
    assert torch.equal(plain.y, out.y)
    assert torch.equal(plain.mean, out.mean)
    zero = torch.zeros_like(x.v)
    belief = torch.zeros_like(x.mean_0)
    sparse = cpu.backward(x, out.checkpoints, None, zero + 1, None, None)
    full = cpu.backward(x, out.checkpoints, zero, zero + 1, belief, belief)
    assert all(torch.equal(a, b) for a, b in zip(sparse[:8], full[:8], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_linear_scan(dtype: torch.dtype) -> None:
    x = draw(2, 4700, 3, 5, dtype=torch.float64)
    # Decays from one token to thousands.
    A = -torch.logspace(-3.5, 0.5, 15, dtype=torch.float64).view(3, 5)
    whole = LinearScanInputs(x.v, x.lam_v, A, x.k, x.q, x.mean_0, None, None)
    low = LinearScanInputs(*(t.to(dtype) for t in whole[:6]), None, None)
    wide = LinearScanInputs(
        *(torch.nn.functional.pad(t, (0, WIDE - 5)) for t in whole[:3]),
        *whole[3:5],
        torch.nn.functional.pad(x.mean_0, (0, WIDE - 5)),
        None,
        None,
    )

    def both(inputs: LinearScanInputs) -> list[Tensor]:
        out = cpu.linear_forward(inputs, save=True)
        assert out.checkpoints is not None
        dy = torch.cos(whole.x).to(inputs.x.dtype)
        dy = torch.nn.functional.pad(dy, (0, inputs.x.shape[2] - 5))
        grads = cpu.linear_backward(inputs, out.checkpoints, dy, inputs.h_0)
        return [out.y, out.h, *grads]

    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for got, wanted in zip(both(low), both(wide), strict=True):
        wanted = wanted[..., : got.shape[-1]]
        assert (got - wanted).abs().max() <= tolerance * wanted.abs().max()
