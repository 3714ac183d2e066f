"""The matrix memory of the baselines: native code against the loop, values and all gradients."""

import itertools

import pytest
import torch
from torch import Tensor

from kalman_attention.baselines import common
from kalman_attention.baselines.gated_deltanet import (
    GatedDeltaNet,
    delta_chunked,
    delta_native,
    delta_recurrence,
)
from kalman_attention.baselines.gla import GLA, gla_chunked, gla_native, gla_recurrence
from kalman_attention.baselines.mlstm import MLSTM, mlstm_chunked, mlstm_native, mlstm_recurrence
from kalman_attention.ops import cpu
from kalman_attention.ops.cpu import MemoryInputs, library, memory_backward, memory_forward
from kalman_attention.ops.matrix_scan import (
    _scan,
    _scan_backward,
    can_scan,
    matrix_scan,
    matrix_scan_ref,
)
from tests.baselines.rules import assert_same_rule, delta_inputs, gla_inputs, mlstm_inputs

pytestmark = pytest.mark.skipif(library.why_not() is not None, reason=str(library.why_not()))

ISAS = cpu.info().isas if not library.why_not() else []
# Decays per channel or per head, with rates, with the delta rule.
KINDS = {
    "gla": (False, False, False),
    "mlstm": (True, True, False),
    "deltanet": (True, True, True),
    "delta by channel": (False, True, True),
    "delta without rates": (True, False, True),
}
every_kind = pytest.mark.parametrize("kind", KINDS)
RULES = {
    "gla": (gla_native, gla_chunked, gla_recurrence, gla_inputs),
    "delta": (delta_native, delta_chunked, delta_recurrence, delta_inputs),
    "mlstm": (mlstm_native, mlstm_chunked, mlstm_recurrence, mlstm_inputs),
}
Tensors = list[Tensor | None]


def draw(kind: str, B: int, T: int, H: int, K: int, V: int, seed: int = 0) -> Tensors:
    """Random inputs: keys of length about 1, and rates up to 2, for which the delta rule reflects.

    Some decays are exactly 0 and some exactly 1.
    """
    shared, rates, _ = KINDS[kind]
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=g, dtype=torch.float64)

    k = torch.nn.functional.normalize(normal(B, T, H, K), dim=-1)
    alpha = (1.2 * uniform(B, T, H, 1 if shared else K) - 0.02).clamp(0.0, 1.0)
    beta = 2.0 * uniform(B, T, H) if rates else None
    return [normal(B, T, H, K), k, normal(B, T, H, V), alpha, normal(B, H, K, V), beta]


def run(function, tensors: Tensors, dtype: torch.dtype, **options) -> list[Tensor]:
    """Outputs, final state and the gradient of every input, for fixed random cotangents."""
    leaves = [None if x is None else x.to(dtype).requires_grad_() for x in tensors]
    out = function(*leaves, **options)
    g = torch.Generator().manual_seed(1)
    loss = sum(
        (x * torch.randn(x.shape, generator=g, dtype=torch.float64).to(dtype)).sum() for x in out
    )
    given = [x for x in leaves if x is not None]
    return [*out, *torch.autograd.grad(loss, given, allow_unused=True, materialize_grads=True)]


def assert_near(found: list[Tensor], truth: list[Tensor], dtype: torch.dtype) -> None:
    """The contract of the ops: 1e-5 of the largest output, 1e-4 of states and gradients."""
    allowed = [1e-12] * len(truth)
    if dtype == torch.float32:
        allowed = [1e-5, *[1e-4] * (len(truth) - 1)]
    for one, wanted, limit in zip(found, truth, allowed, strict=True):
        assert one.shape == wanted.shape
        if wanted.numel():
            scale = max(wanted.detach().abs().max().item(), 1e-30)
            assert (one.double() - wanted).detach().abs().max().item() <= limit * scale


def check(kind: str, *sizes: int, seed: int = 0) -> None:
    tensors, delta = draw(kind, *sizes, seed=seed), KINDS[kind][2]
    truth = run(matrix_scan_ref, tensors, torch.float64, delta=delta)
    for dtype in (torch.float32, torch.float64):
        assert_near(run(matrix_scan, tensors, dtype, delta=delta), truth, dtype)


@every_kind
@pytest.mark.parametrize("T", [0, 1, 2, 7, 8, 9, 63, 64, 65, 130])
def test_every_length(kind, T):
    check(kind, 2, T, 2, 3, 5, seed=T)


@every_kind
@pytest.mark.parametrize("K", [1, 3, 16, 17, 33])
def test_awkward_heads(kind, K):
    for V in (1, 3, 16, 17, 33, 70):
        check(kind, 1, 11, 2, K, V)


@every_kind
def test_large_heads(kind):
    check(kind, 1, 66, 1, 64, 128)


def test_nothing_to_do():
    for sizes in ((0, 5, 2, 3, 4), (2, 5, 0, 3, 4), (1, 0, 1, 1, 1)):
        check("deltanet", *sizes)


@pytest.mark.parametrize("rule", RULES)
def test_the_baselines_are_their_recurrences(rule):
    native, chunked, recurrence, inputs = RULES[rule]
    for T, strength in ((0, 1.0), (1, 1.0), (37, 1.0), (70, 40.0), (70, 1e3), (130, 1e-3)):
        options = {"positive": True} if rule == "mlstm" and strength > 1.0 else {}
        data = inputs(T, strength=strength, **options)
        assert_same_rule(native, recurrence, *data)
        assert_same_rule(native, chunked, *data)


def test_an_mlstm_with_padding_on_either_side():
    q, k, v, log_i, log_f, state, m = mlstm_inputs(90)
    log_i[:, :20], log_f[:, :20] = -torch.inf, 0.0
    log_i[:, 70:], log_f[:, 70:] = -torch.inf, 0.0
    assert_same_rule(mlstm_native, mlstm_recurrence, q, k, v, log_i, log_f, state, m)
    log_i[:], log_f[:] = -torch.inf, 0.0
    _, last, m_last = mlstm_native(q, k, v, log_i, log_f, state, m)
    assert torch.equal(last, state)
    assert torch.equal(m_last, m)


@pytest.mark.parametrize("rule", RULES)
def test_short_types_are_computed_in_float32(rule):
    native, chunked, _, inputs = RULES[rule]
    data = [x.bfloat16() if i < 3 else x for i, x in enumerate(inputs(40, dtype=torch.float32))]
    for one, other in zip(native(*data), chunked(*data), strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=0.0, atol=2e-5 * float(other.abs().max()))


@pytest.mark.parametrize("mixer", [GLA, GatedDeltaNet, MLSTM])
def test_mixers_take_the_native_form_and_it_equals_the_chunks(mixer, monkeypatch):
    layer = mixer(d_model=16, num_heads=2).double()
    x = torch.randn(2, 70, 16, dtype=torch.float64)
    mask = torch.rand(2, 70, generator=torch.Generator().manual_seed(0)) < 0.8

    def everything() -> list[Tensor]:
        found = layer.mix(x, None, mask)
        loss = found.y.square().sum() + sum(z.sum() for z in found.state if z.requires_grad)
        grads = torch.autograd.grad(loss, list(layer.parameters()))
        return [z.detach() for z in (found.y, *found.state, *grads)]

    calls = []

    def counted(*args, **options):
        calls.append(args)
        return memory_forward(*args, **options)

    monkeypatch.setattr("kalman_attention.ops.matrix_scan.memory_forward", counted)
    native = everything()
    assert len(calls) == 1
    monkeypatch.setattr(common, "can_scan", lambda v: False)
    chunked = everything()
    assert len(calls) == 1
    for one, other in zip(native, chunked, strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=1e-9 * float(other.abs().max() + 1.0))


def test_large_heads_take_the_chunks_where_these_are_faster():
    def chosen(name: str, K: int, V: int, device: str = "cpu") -> str:
        k, v = (torch.empty(1, 1, 1, size, device=device) for size in (K, V))
        return common.form_for(name, k, v, native=lambda: "native", chunked=lambda: "chunked")()

    assert [chosen(name, 16, 32) for name in ("gla", "delta", "mlstm")] == ["native"] * 3
    assert [chosen(name, 512, 512) for name in ("gla", "delta", "mlstm")] == [
        "chunked",
        "native",
        "chunked",
    ]
    assert chosen("delta", 16, 32, "meta") == "chunked"


@pytest.mark.parametrize("isa", ISAS)
@every_kind
def test_every_instruction_set_and_any_number_of_threads(isa, kind):
    tensors, delta = draw(kind, 3, 70, 4, 17, 33), KINDS[kind][2]
    truth = run(matrix_scan_ref, tensors, torch.float64, delta=delta)
    before, found = torch.get_num_threads(), []
    call = MemoryInputs(*(None if x is None else x.float() for x in tensors))
    g = torch.Generator().manual_seed(1)
    dy, dstate = (torch.randn(x.shape, generator=g, dtype=torch.float64) for x in truth[:2])
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            y, state, saved = memory_forward(call, delta=delta, save=True, isa=isa)
            grads = memory_backward(call, saved, dy, dstate, delta=delta, isa=isa)
            found.append([y, state, *(x for x in grads if x is not None)])
    finally:
        torch.set_num_threads(before)
    for one, other in itertools.pairwise(found):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert_near(found[0], truth, torch.float32)


def test_parts_of_a_wider_tensor_and_other_layouts():
    tensors = [x.float() for x in draw("delta by channel", 2, 20, 3, 4, 5)]
    expected = run(matrix_scan, tensors, torch.float32, delta=True)
    wide = [torch.cat([x, x], 1)[:, : x.shape[1]] for x in tensors]
    turned = [x.movedim(0, -1).contiguous().movedim(-1, 0) for x in tensors]
    for views in (wide, turned):
        assert not any(x.is_contiguous() for x in views)
        found = run(matrix_scan, views, torch.float32, delta=True)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_splitting_anywhere_equals_one_pass():
    q, k, v, alpha, state, beta = draw("deltanet", 2, 100, 2, 4, 6)
    whole = matrix_scan(q, k, v, alpha, state, beta, delta=True)
    early, late = ([x[:, s] for x in (q, k, v, alpha)] for s in (slice(37), slice(37, None)))
    first = matrix_scan(*early, state, beta[:, :37], delta=True)
    last = matrix_scan(*late, first.state, beta[:, 37:], delta=True)
    torch.testing.assert_close(torch.cat([first.y, last.y], 1), whole.y)
    torch.testing.assert_close(last.state, whole.state)


@every_kind
def test_gradients_by_finite_differences(kind):
    delta = KINDS[kind][2]
    leaves = [None if x is None else x.requires_grad_() for x in draw(kind, 1, 5, 1, 2, 3)]
    for function in (matrix_scan, matrix_scan_ref):
        assert torch.autograd.gradcheck(lambda *t, f=function: f(*t, delta=delta), leaves)


@every_kind
def test_second_derivatives(kind):
    delta, found = KINDS[kind][2], []
    for function in (matrix_scan, matrix_scan_ref):
        leaves = [None if x is None else x.requires_grad_() for x in draw(kind, 1, 4, 1, 2, 3)]
        given = [x for x in leaves if x is not None]
        y, state = function(*leaves, delta=delta)
        first = torch.autograd.grad((y**2).sum() + state.sum(), given, create_graph=True)
        found.append(torch.autograd.grad(sum((x**2).sum() for x in first), given))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_registration():
    for kind in ("gla", "deltanet"):
        delta = KINDS[kind][2]
        frozen = [None if x is None else x.float() for x in draw(kind, 2, 70, 2, 3, 5)]
        leaves = [None if x is None else x.clone().requires_grad_() for x in frozen]
        torch.library.opcheck(_scan, (*leaves, delta, True))
        y, state, *saved = _scan(*frozen, delta, True)
        torch.library.opcheck(_scan_backward, (*frozen, delta, *saved, y, state))
        compiled = torch.compile(matrix_scan, fullgraph=True, backend="aot_eager")
        found, expected = (
            run(f, frozen, torch.float32, delta=delta) for f in (compiled, matrix_scan)
        )
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_compiled_mixer_keeps_the_op():
    layer, x = MLSTM(d_model=16, num_heads=2), torch.randn(2, 40, 16)
    graphs = []

    def backend(graph, inputs):
        graphs.append(str(graph.graph))
        return graph.forward

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    found, expected = compiled(x), layer(x)
    assert "kalman_attention.matrix_scan" in graphs[0]
    torch.testing.assert_close(found, expected)
    found, expected = (
        torch.autograd.grad(y.square().sum(), list(layer.parameters())) for y in (found, expected)
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_transforms_take_the_chunks():
    inputs = [x.unsqueeze(0).repeat(3, *[1] * x.dim()) for x in gla_inputs(20)]

    def rule(*one: Tensor) -> Tensor:
        assert not can_scan(one[2])
        return gla_chunked(*one)[0]

    assert torch.func.vmap(rule)(*inputs).shape == (3, 2, 20, 2, 5)


def test_mistakes_are_explained():
    q, k, v, alpha, state, beta = draw("deltanet", 2, 6, 3, 4, 5)
    with pytest.raises(ValueError, match=r"k has shape \[2, 5, 3, 4\] but must be \[B, T, H, K\]"):
        matrix_scan(q, k[:, 1:], v, alpha, state)
    with pytest.raises(ValueError, match=r"alpha has shape \[2, 6, 3, 2\]"):
        matrix_scan(q, k, v, alpha.expand(-1, -1, -1, 2), state)
    with pytest.raises(ValueError, match=r"state has shape \[1, 3, 4, 5\] but must be"):
        matrix_scan(q, k, v, alpha, state[:1])
    with pytest.raises(ValueError, match=r"beta has shape \[2, 6, 3, 1\]"):
        matrix_scan(q, k, v, alpha, state, beta.unsqueeze(-1))
    with pytest.raises(ValueError, match=r"v is torch.float32 and q is torch.float64"):
        matrix_scan(q, k, v.float(), alpha, state)
    with pytest.raises(ValueError, match="at least one key and one value channel"):
        matrix_scan(q, k, v[..., :0], alpha, state[..., :0])
    with pytest.raises(ValueError, match=r"cannot serve this call.*matrix_scan_ref can"):
        matrix_scan(*(x.to("meta") for x in (q, k, v, alpha, state)))
