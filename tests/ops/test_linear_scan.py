"""The selective scan: the native engine against the loop, values and all gradients."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kalman_attention import linear_scan, linear_scan_ref
from kalman_attention.ops.cpu import library
from kalman_attention.ops.linear_scan import _scan, _scan_backward

pytestmark = pytest.mark.skipif(library.why_not() is not None, reason=str(library.why_not()))


def draw(
    batch: int, T: int, N: int, D: int, rows: int | None = None, seed: int = 0
) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    dt = torch.nn.functional.softplus(2.0 * normal(batch, T, D) - 3.0)
    A = -torch.exp(2.0 * normal(N, D))
    return [
        normal(batch, T, D),
        dt,
        A,
        normal(batch, T, N),
        normal(batch, T, N),
        normal(rows or batch, N, D),
    ]


def run(function, tensors: list[Tensor], dtype: torch.dtype, **options) -> list[Tensor]:
    leaves = [x.to(dtype).requires_grad_() for x in tensors]
    out = function(*leaves[:5], state=leaves[5], **options)
    g = torch.Generator().manual_seed(1)
    loss = sum(
        (x * torch.randn(x.shape, generator=g, dtype=torch.float64).to(dtype)).sum() for x in out
    )
    grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return [*out, *grads]


def check(tensors: list[Tensor], **options) -> None:
    truth = run(linear_scan_ref, tensors, torch.float64, **options)
    for dtype, allowed in ((torch.float32, 1e-4), (torch.float64, 1e-11)):
        got = run(linear_scan, tensors, dtype, engine="cpu", **options)
        for found, wanted in zip(got, truth, strict=True):
            if wanted.numel():
                scale = max(wanted.abs().max().item(), 1e-30)
                assert (found.double() - wanted).abs().max().item() <= allowed * scale


def test_every_length_up_to_two_chunks() -> None:
    for T in range(131):
        check(draw(2, T, 3, 5, seed=T))


@pytest.mark.parametrize("shape", [(1, 70, 1, 1), (3, 65, 5, 13), (1, 66, 16, 131), (1, 64, 67, 9)])
def test_awkward_shapes(shape: tuple[int, int, int, int]) -> None:
    check(draw(*shape))


def test_padding_and_packing() -> None:
    mask = torch.rand(3, 150, generator=torch.Generator().manual_seed(0)) < 0.7
    check(draw(3, 150, 4, 8), mask=mask)
    check(draw(1, 150, 4, 8, rows=4), cu_seqlens=torch.tensor([0, 3, 3, 70, 150]))


@settings(deadline=None, max_examples=20)
@given(
    T=st.integers(0, 140),
    N=st.integers(1, 9),
    D=st.integers(1, 20),
    speed=st.sampled_from([1e-6, 1.0, 1e3]),
    seed=st.integers(0, 999),
)
def test_any_shape_and_decay(T: int, N: int, D: int, speed: float, seed: int) -> None:
    x, dt, A, B, C, h = draw(2, T, N, D, seed=seed)
    check([x, dt, speed * A, B, C, h])


@pytest.mark.slow
def test_a_long_sequence() -> None:
    check(draw(1, 8192, 2, 4))


def test_splitting_anywhere_equals_one_pass() -> None:
    tensors = [x.float() for x in draw(2, 100, 3, 5)]
    x, dt, A, B, C, h = tensors
    whole = linear_scan(x, dt, A, B, C, state=h)
    first = linear_scan(x[:, :37], dt[:, :37], A, B[:, :37], C[:, :37], state=h)
    last = linear_scan(x[:, 37:], dt[:, 37:], A, B[:, 37:], C[:, 37:], state=first.state)
    torch.testing.assert_close(torch.cat([first.y, last.y], 1), whole.y)
    torch.testing.assert_close(last.state, whole.state)


def test_same_bits_for_every_number_of_threads() -> None:
    tensors, threads, results = draw(3, 300, 4, 70), torch.get_num_threads(), []
    try:
        for count in (1, 2, 7):
            torch.set_num_threads(count)
            results.append(run(linear_scan, tensors, torch.float32))
    finally:
        torch.set_num_threads(threads)
    for one, other in itertools.pairwise(results):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_registration() -> None:
    frozen = [x.float() for x in draw(2, 70, 3, 5)]
    leaves = [x.clone().requires_grad_() for x in frozen]
    torch.library.opcheck(_scan, (*leaves, None, None, True))
    y, h, saved = _scan(*frozen, None, None, True)
    torch.library.opcheck(_scan_backward, (*frozen, None, None, saved, y, h))
    compiled = torch.compile(linear_scan, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*frozen[:5]).y, linear_scan(*frozen[:5]).y)
    (first,) = torch.autograd.grad(linear_scan(*leaves[:5]).y.sum(), leaves[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="linear_scan_ref"):
        first.sum().backward()


def test_gradients_of_the_loop_in_float64() -> None:
    leaves = [x.requires_grad_() for x in draw(2, 5, 2, 3)]
    assert torch.autograd.gradcheck(lambda *t: linear_scan_ref(*t[:5], state=t[5]), leaves)


def test_mistakes_are_explained() -> None:
    x, dt, A, B, C, _ = (t.float() for t in draw(2, 6, 3, 5))
    with pytest.raises(ValueError, match=r"C has shape \[2, 5, 3\] but must be \[B, T, N\]"):
        linear_scan(x, dt, A, B, C[:, 1:])
    with pytest.raises(ValueError, match=r"A is bfloat16 but must be float32"):
        linear_scan(x, dt, A.bfloat16(), B, C)
    with pytest.raises(ValueError, match=r"state is \[1, 3, 5\] but must be \[2, 3, 5\]"):
        linear_scan(x, dt, A, B, C, state=torch.zeros(1, 3, 5))
    with pytest.raises(ValueError, match=r"unknown engine 'gpu'.*auto, cpu, reference"):
        linear_scan(x, dt, A, B, C, engine="gpu")
