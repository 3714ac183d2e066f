"""Native passes over rows, softplus links and the RMS norm, against float64 torch operations."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import softplus as torch_softplus

from kalman_attention.nn.links import softplus
from kalman_attention.nn.norms import rms_norm
from kalman_attention.nn.short_conv import ShortConv
from kalman_attention.ops import cpu

pytestmark = pytest.mark.skipif(cpu.why_not() is not None, reason=str(cpu.why_not()))

ISAS = cpu.info().isas if not cpu.why_not() else []
EPS = {torch.float32: 4e-6, torch.bfloat16: 2**-8}
"""Errors relative to the largest entry; a bfloat16 result is rounded to 8 bits."""

dtypes = st.sampled_from(list(EPS))
links = st.fixed_dictionaries(
    {
        "floor": st.sampled_from([1e-4, 0.5]),
        "scale": st.sampled_from([1.0, 3.0]),
        "inverse": st.booleans(),
    }
)


def tokens(rows: int, D: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Part of a wider row, as a projection is split; what is drawn next depends on the seed too."""
    torch.manual_seed(seed)
    wide = (4.0 * torch.randn(rows, D + 3)).to(dtype)
    return wide[:, 1 : D + 1]


def link(x: Tensor, bias: Tensor | None, floor: float, scale: float, inverse: bool) -> Tensor:
    y = torch_softplus(x if bias is None else x + bias) + floor
    return scale / y if inverse else scale * y


def norm(x: Tensor, weight: Tensor | None, eps: float = 1e-5) -> Tensor:
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return y if weight is None else y * weight


def in_double(function, dy, *inputs):
    """Value and gradients in float64, of which there is one for each tensor."""
    wide = [None if z is None else z.detach().double().requires_grad_() for z in inputs]
    y = function(*wide)
    found = iter(torch.autograd.grad(y, [z for z in wide if z is not None], dy.double()))
    return y.detach(), [None if z is None else next(found) for z in wide]


def assert_near(found: Tensor | None, expected: Tensor | None, eps: float) -> None:
    assert (found is None) == (expected is None)
    if found is not None and found.numel():
        error = (found.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-3)
        assert error < eps


def assert_sum_near(found: Tensor | None, terms: Tensor) -> None:
    """Relative to the sum of the magnitudes, because terms of either sign cancel in a sum."""
    if found is not None:
        error = (found.double() - terms.sum(0)).abs()
        assert bool((error <= EPS[torch.float32] * terms.abs().sum(0)).all())


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 130), st.integers(1, 40), dtypes, st.booleans(), links, st.integers(0, 99))
def test_links_against_float64(rows, D, dtype, biased, options, seed):
    x, bias = tokens(rows, D, dtype, seed), torch.randn(D) if biased else None
    y = cpu.softplus_forward(x, bias, **options)
    dy = torch.randn(rows, D)
    expected, grads = in_double(lambda x, b: link(x, b, **options), dy, x, bias)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), expected, rtol=2e-6, atol=0.0)
    dx, dbias = cpu.softplus_backward(dy, x, bias, y, **options)
    assert dx.dtype == dtype
    assert_near(dx, grads[0], EPS[dtype])
    assert (dbias is not None) == biased
    assert_sum_near(dbias, grads[0])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 130), st.integers(1, 40), dtypes, st.booleans(), st.integers(0, 99))
def test_norms_against_float64(rows, D, dtype, weighted, seed):
    x, weight = tokens(rows, D, dtype, seed), torch.randn(D) if weighted else None
    y, dy = cpu.norm_forward(x, weight, 1e-5), torch.randn(rows, D).to(dtype)
    expected, grads = in_double(norm, dy, x, weight)
    assert y.dtype == dtype
    assert_near(y, expected, EPS[dtype])
    dx, dweight = cpu.norm_backward(dy, x, weight, 1e-5)
    # Relative to its two terms, which cancel for a single channel.
    rate = (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    term = (dy.double() * (1.0 if weight is None else weight)).abs().amax(-1, keepdim=True) * rate
    largest = term * (1.0 + x.double().abs() * rate)
    assert bool(((dx.double() - grads[0]).abs() <= EPS[dtype] * largest).all())
    assert (dweight is not None) == weighted
    assert_sum_near(dweight, dy.double() * x.double() * rate)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", list(EPS))
def test_every_instruction_set_and_any_number_of_threads(isa, dtype):
    x, vector = tokens(700, 333, dtype, 0), torch.randn(333)
    dy, options = torch.randn(700, 333), {"floor": 1e-4, "scale": 2.0, "inverse": True}
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            y = cpu.softplus_forward(x, vector, **options, isa=isa)
            grads = cpu.softplus_backward(dy, x, vector, y, **options, isa=isa)
            z = cpu.norm_forward(x, vector, 1e-5, isa=isa)
            more = cpu.norm_backward(dy.to(dtype), x, vector, 1e-5, isa=isa)
            found.append((y, *grads, z, *more))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, found[0], strict=True))
    y, dx, dbias, z, *more = found[0]
    expected, grads = in_double(lambda x, b: link(x, b, **options), dy, x, vector)
    torch.testing.assert_close(y.double(), expected, rtol=2e-6, atol=0.0)
    assert_near(dx, grads[0], EPS[dtype])
    assert_near(dbias, grads[1], 1e-5)
    expected, grads = in_double(norm, dy.to(dtype), x, vector)
    assert_near(z, expected, EPS[dtype])
    assert_near(more[0], grads[0], EPS[dtype])
    assert_near(more[1], grads[1], 1e-5)


def test_links_at_the_extremes():
    x = torch.tensor([[-torch.inf, -1e4, -87.0, -20.0, 0.0, 20.0, 1e4, torch.inf, torch.nan]])
    found, expected = softplus(x, floor=1e-4), torch_softplus(x.double()) + 1e-4
    torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=0.0, equal_nan=True)
    inverse = softplus(x, floor=1e-4, inverse=True)
    torch.testing.assert_close(inverse.double(), 1 / expected, rtol=2e-6, atol=0, equal_nan=True)


def test_a_row_of_zeros_and_one_that_is_not_a_number():
    x = torch.zeros(2, 5)
    x[1, 3] = torch.nan
    y = rms_norm(x)
    assert bool((y[0] == 0).all())
    assert bool(y[1].isnan().all())
    z = rms_norm(torch.zeros(3, 5, requires_grad=True))
    (grad,) = torch.autograd.grad(z.sum(), z.grad_fn.next_functions[0][0].variable)
    assert bool(grad.isfinite().all())


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 4), (2, 0, 4), (2, 3, 1)])
def test_shapes_at_the_edges(shape):
    x = torch.randn(shape)
    torch.testing.assert_close(softplus(x, floor=0.1), torch_softplus(x) + 0.1)
    if shape and shape[-1]:
        torch.testing.assert_close(rms_norm(x), norm(x, None))


def test_second_derivatives():
    x, bias, weight = (
        torch.randn(size, requires_grad=True) for size in ((3, 6), (6,), (6,))
    )  # fmt: skip

    def both(x, bias, weight):
        return rms_norm(softplus(x, bias, floor=0.1, inverse=True), weight).square().sum()

    def twice(function, *inputs):
        grads = torch.autograd.grad(function(*inputs), inputs, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), inputs)

    def plain(x, bias, weight):
        return norm(link(x, bias, 0.1, 1.0, True), weight).square().sum()

    wide = [z.detach().double().requires_grad_() for z in (x, bias, weight)]
    found, expected = twice(both, x, bias, weight), twice(plain, *wide)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-4)


def test_transforms_take_torch_operations():
    x, bias = torch.randn(4, 3, 6), torch.randn(6)
    found = torch.func.vmap(lambda z: rms_norm(softplus(z, bias)))(x)
    torch.testing.assert_close(found, rms_norm(softplus(x, bias)))
    grad = torch.func.grad(lambda z: softplus(z, bias).sum())(x)
    torch.testing.assert_close(grad, torch.sigmoid(x + bias))


@pytest.mark.parametrize("T", [1, 3, 300])
def test_a_convolution_in_bfloat16_is_computed_in_float32(T):
    conv = ShortConv(5, 4)
    x = torch.randn(2, T, 5).bfloat16().requires_grad_()
    y, _ = conv(x)
    (dx, dweight) = torch.autograd.grad(y.float().square().sum(), (x, conv.weight))
    wide = x.detach().double().requires_grad_()
    weight = conv.weight.detach().double().requires_grad_()
    double = ShortConv(5, 4).double()
    double.weight, double.bias = torch.nn.Parameter(weight), torch.nn.Parameter(conv.bias.double())
    expected, _ = double(wide)
    torch.testing.assert_close(y.double(), expected.bfloat16().double(), rtol=2**-7, atol=1e-6)
    dy = 2.0 * y.detach().double()
    grads = torch.autograd.grad(expected, (wide, double.weight), dy.bfloat16().double())
    assert_near(dx, grads[0], EPS[torch.bfloat16])
    assert_near(dweight, grads[1], 1e-5)
