"""Keys and queries in the rotating frame: every engine against products of dense matrices."""

import itertools

import pytest
import torch
from torch import Tensor

from kalman_attention.filtering.moment import KLAState
from kalman_attention.filtering.rotation import frames, into_frame, reflect, rotation
from kalman_attention.ops import cpu
from kalman_attention.ops import frames as op
from kalman_attention.ops.contract import FrameInputs
from kalman_attention.ops.frames import Turned, into_frames, turn_belief
from tests.systems import assert_close

ENGINES = ["torch", pytest.param("cpu", marks=pytest.mark.skipif(bool(cpu.why_not()), reason="x"))]
SHAPES = [(1, 1), (2, 1), (3, 2), (4, 2), (5, 4), (8, 3), (16, 2), (20, 1)]  # m, n_h


def draw(B: int, T: int, G: int, m: int, n_h: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, B, T, G * m, generator=g, dtype=torch.float64)
    return q, k, torch.randn(B, T, n_h, G, m, generator=g, dtype=torch.float64)


def dense(q: Tensor, k: Tensor, u_h: Tensor) -> Turned:
    """The definition, token by token; T must be at least 1."""
    G, m = u_h.shape[3:]
    Q = frames(rotation(u_h.transpose(2, 3)))
    turned = (into_frame(Q, x.unflatten(-1, (G, m))).flatten(2) for x in (q, k))
    return Turned(*turned, Q[:, -1])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("m", "n_h"), SHAPES)
def test_equals_products_of_dense_matrices(engine: str, m: int, n_h: int) -> None:
    inputs = draw(2, 131, 3, m, n_h)
    assert_close(into_frames(*inputs, engine=engine), dense(*inputs), atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("m", "n_h"), [(1, 1), (2, 1), (3, 2), (4, 3), (5, 2), (9, 1), (17, 1)])
def test_gradients(engine: str, m: int, n_h: int) -> None:
    inputs = [x.requires_grad_() for x in draw(2, 3, 2, m, n_h)]
    assert torch.autograd.gradcheck(lambda *x: into_frames(*x, engine=engine), inputs)


@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_with_padding_and_with_packing(engine: str) -> None:
    inputs = [x.requires_grad_() for x in draw(2, 4, 2, 3, 2)]
    mask = torch.tensor([[True, False, True, True], [False, True, True, False]])

    def masked(*x: Tensor) -> Turned:
        return into_frames(*x, mask=mask, engine=engine)

    assert torch.autograd.gradcheck(masked, inputs)
    row = [x[:1].detach().requires_grad_() for x in inputs]
    bounds = torch.tensor([0, 1, 1, 4])

    def packed(*x: Tensor) -> Turned:
        return into_frames(*x, cu_seqlens=bounds, engine=engine)

    assert torch.autograd.gradcheck(packed, row)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("only", ["q", "k", "frame"])
def test_gradients_of_one_output_alone(engine: str, only: str) -> None:
    inputs = [x.requires_grad_() for x in draw(2, 5, 2, 4, 2)]
    found = torch.autograd.grad(getattr(into_frames(*inputs, engine=engine), only)[0].sum(), inputs,
                                allow_unused=True)  # fmt: skip
    wanted = torch.autograd.grad(getattr(dense(*inputs), only)[0].sum(), inputs, allow_unused=True)
    for got, expected in zip(found, wanted, strict=True):
        zero = torch.zeros(())
        assert_close(*(zero if x is None or not x.any() else x for x in (got, expected)))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("n_h", [1, 2])
def test_frames_stay_orthogonal_over_long_sequences(engine: str, n_h: int) -> None:
    T, G, m = 65_536, 2, 4
    q, k, u_h = (x.float() for x in draw(1, T, G, m, n_h))
    found = into_frames(q, k, u_h, engine=engine)
    one = torch.eye(m, dtype=torch.float64).expand(1, G, m, m)
    assert found.q.dtype == torch.float32
    assert (found.frame.mT @ found.frame - one).abs().max() < 1e-10
    # A turned key has the length of the key, to the last digits of float32, at every token.
    length = [x.unflatten(-1, (G, m)).double().norm(dim=-1) for x in (k, found.k)]
    assert (length[1] / length[0] - 1.0).abs().max() < 1e-6


def test_long_gradients_of_float32_equal_those_of_float64() -> None:
    inputs = [x.float() for x in draw(1, 65_536, 1, 4, 2)]
    weight = torch.randn(2, 1, 65_536, 4, generator=torch.Generator().manual_seed(3))

    def gradients(dtype: torch.dtype, engine: str) -> list[Tensor]:
        given = [x.to(dtype).requires_grad_() for x in inputs]
        found = into_frames(*given, engine=engine)
        loss = (found.q * weight[0]).sum() + (found.k * weight[1]).sum() + found.frame.sum()
        return list(torch.autograd.grad(loss, given))

    expected = gradients(torch.float64, "torch")
    for got, wanted in zip(gradients(torch.float32, "auto"), expected, strict=True):
        assert (got - wanted).abs().max() < 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("engine", ENGINES)
def test_padding_turns_nothing_whatever_stands_there(engine: str) -> None:
    q, k, u_h = draw(1, 7, 2, 3, 2)
    mask = torch.tensor([[False, True, True, False, False, True, False]])
    kept = into_frames(q[mask][None], k[mask][None], u_h[mask][None], engine=engine)
    for x in (q, k, u_h):
        x[~mask] = torch.nan
    inputs = [x.requires_grad_() for x in (q, k, u_h)]
    found = into_frames(*inputs, mask=mask, engine=engine)
    assert_close(found.q[mask][None], kept.q)
    assert_close(found.frame, kept.frame)
    assert not found.k[~mask].any()
    (found.q.sum() + found.k.sum() + found.frame.sum()).backward()
    assert all(x.grad is not None and not x.grad[~mask].any() for x in inputs)


@pytest.mark.parametrize("engine", ENGINES)
def test_packed_documents_equal_separate_ones(engine: str) -> None:
    q, k, u_h = draw(1, 150, 2, 4, 2)
    bounds = [0, 70, 70, 71, 150]
    packed = into_frames(q, k, u_h, cu_seqlens=torch.tensor(bounds), engine=engine)
    for i, (start, end) in enumerate(itertools.pairwise(bounds)):
        alone = into_frames(*(x[:, start:end] for x in (q, k, u_h)), engine=engine)
        assert_close(packed.q[:, start:end], alone.q, atol=1e-12)
        assert_close(packed.frame[i], alone.frame[0], atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_row_in_two_calls_and_no_token_at_all(engine: str) -> None:
    q, k, u_h = draw(2, 9, 2, 4, 2)
    whole = into_frames(q, k, u_h, engine=engine)
    first = into_frames(q[:, :4], k[:, :4], u_h[:, :4], engine=engine)
    second = into_frames(q[:, 4:], k[:, 4:], u_h[:, 4:], engine=engine)
    assert_close(second.frame @ first.frame, whole.frame)
    none = into_frames(q[:, :0], k[:, :0], u_h[:, :0], engine=engine)
    assert none.q.shape == (2, 0, 8)
    assert_close(none.frame, torch.eye(4, dtype=torch.float64).expand(2, 2, 4, 4))


@pytest.mark.parametrize("engine", ENGINES)
def test_length_of_directions_does_not_matter_and_zero_reflects_nothing(engine: str) -> None:
    q, k, u_h = draw(2, 6, 2, 4, 3)
    u_h[:, :, 1] = 0.0
    scaled = u_h * torch.tensor([1e-20, 1.0, 1e20], dtype=torch.float64).view(3, 1, 1)
    expected = into_frames(q, k, u_h[:, :, [0, 2]], engine=engine)
    assert_close(into_frames(q, k, scaled, engine=engine), expected)
    leaf = u_h.clone().requires_grad_()
    into_frames(q, k, leaf, engine=engine).q.sum().backward()
    assert not leaf.grad[:, :, 1].any()
    assert leaf.grad[:, :, 0].any()


def test_a_token_turns_a_mean_as_its_frame_does() -> None:
    q, k, u_h = draw(3, 1, 2, 4, 3)
    mean = torch.randn(3, 2, 4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert_close(reflect(u_h[:, 0], mean), into_frames(q, k, u_h).frame @ mean)


@pytest.mark.skipif(bool(cpu.why_not()), reason="native library")
@pytest.mark.parametrize("isa", cpu.info().isas if not cpu.why_not() else [])
def test_every_instruction_set_and_any_number_of_threads(isa: str) -> None:
    inputs = draw(3, 400, 5, 4, 2)
    call = FrameInputs(*(x.float() for x in inputs), None, None)
    threads = torch.get_num_threads()
    found = []
    for number in (1, 2, 3, 16):
        torch.set_num_threads(number)
        turned = cpu.frames_forward(call, isa=isa)
        grads = cpu.frames_backward(call, turned[2], *turned, isa=isa)
        found.append((*turned, *grads))
    torch.set_num_threads(threads)
    assert all(torch.equal(*pair) for other in found for pair in zip(found[0], other, strict=True))
    expected = dense(*inputs)
    assert (found[0][1] - expected.k).abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["plain", "mask", "packed"])
def test_registered_as_a_citizen_of_torch(kind: str) -> None:
    inputs = [x.float().requires_grad_() for x in draw(1, 20, 2, 4, 2)]
    mask = torch.arange(20)[None] < 12 if kind == "mask" else None
    bounds = torch.tensor([0, 7, 20]) if kind == "packed" else None
    torch.library.opcheck(op._turn, (*inputs, mask, bounds))
    frozen = [x.detach() for x in inputs]
    turned = op._turn(*frozen, mask, bounds)
    torch.library.opcheck(op._turn_backward, (*frozen, mask, bounds, turned[2], *turned))

    def run(*x: Tensor) -> Tensor:
        found = into_frames(*x, mask=mask, cu_seqlens=bounds)
        return found.q.sum() + found.k.square().sum() + found.frame.sum()

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), run(*inputs))


def test_strided_and_short_inputs() -> None:
    q, k, u_h = draw(2, 30, 2, 4, 2)
    wide = torch.cat([q, k, u_h.flatten(2)], -1)
    parts = wide.split([8, 8, 16], -1)
    assert_close(into_frames(*parts[:2], parts[2].unflatten(-1, (2, 2, 4))), dense(q, k, u_h))
    turned = into_frames(*(x.bfloat16() for x in (q, k, u_h)))
    exact = into_frames(*(x.bfloat16().double() for x in (q, k, u_h)))
    assert turned.k.dtype == torch.float32
    assert (turned.k - exact.k).abs().max() < 1e-5


def test_errors_say_what_instead() -> None:
    q, k, u_h = draw(2, 5, 2, 4, 2)
    with pytest.raises(ValueError, match=r"u_h is \[2, 5, 2, 8\] but must be \[B, T, n_h, G, m\]"):
        into_frames(q, k, u_h.flatten(3))
    with pytest.raises(ValueError, match="Float64 cannot be mixed"):
        into_frames(q, k, u_h.float())
    with pytest.raises(ValueError, match="cuda"):
        into_frames(q, k, u_h, engine="cuda")
    with pytest.raises(ValueError, match="at most 32 slots"):
        into_frames(*draw(1, 2, 1, 40, 1), engine="cpu")
    leaf = u_h.requires_grad_()
    (grad,) = torch.autograd.grad(into_frames(q, k, leaf, engine="cpu").q.sum(), leaf,
                                  create_graph=True)  # fmt: skip
    with pytest.raises(NotImplementedError, match="engine='torch'"):
        grad.sum().backward()


@pytest.mark.parametrize("engine", ENGINES)
def test_autocast_leaves_turns_in_float32(engine: str) -> None:
    q, k, u_h = (x.float() for x in draw(2, 6, 2, 4, 2))
    mean = torch.randn(2, 8, 5, generator=torch.Generator().manual_seed(1))
    state = KLAState(mean, torch.ones(2, 2, 5))

    def run() -> tuple[Tensor, ...]:
        turned = into_frames(q, k, u_h, engine=engine)
        return turned.k, turned.out_of_frame(state).mean, turn_belief(state, u_h[:, 0]).mean

    expected = run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = run()
    for got, wanted in zip(found, expected, strict=True):
        assert torch.equal(got, wanted)
