"""One token per row in native code: equal to the modules, and only where it is to take over."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from kalman_attention import KLA, KLAConfig, use_engine, value_checks
from kalman_attention.nn import decoding
from kalman_attention.nn.decoding import project
from kalman_attention.nn.mixer import map_state
from kalman_attention.nn.norms import RMSNorm
from kalman_attention.ops import cpu

REASON = cpu.why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
ISAS = cpu.info().isas if REASON is None else ()

LAYERS = {
    "default": {},
    "projected value": {"value": "project", "evidence_bias": True},
    "no convolution": {"conv_kernel": None, "precision_link": "softplus"},
    "one tap": {"conv_kernel": 1, "precision_link": "exp"},
    "two taps": {"conv_kernel": 2, "qk_norm": False},
    "norm and gate": {"readout_norm": True, "gate_bias": 1.0, "skip": None},
    "shared": {"shared_slots": 4, "d_inner": 21, "prior": "learned", "initial_mean": 1.0},
    "low rank": {"precision_rank": 3},
    "low rank and value": {"precision_rank": 1, "value": "project", "evidence_bias": True},
    "steps": {"step_rank": 2, "dt_max": 0.1},
    "for text": {
        "d_inner": 69,
        "shared_slots": 8,
        "precision_rank": 3,
        "step_rank": 5,
        "dt_max": 0.1,
        "readout_norm": True,
        "evidence_bias": True,
        "gate_bias": 0.0,
        "prior": "learned",
    },
}
FALLBACKS = {
    "reflections": {"shared_slots": 2, "num_reflections": 1},
    "another engine": {"engine": "associative"},
}
layers = pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def make(rows=2, d_model=37, dtype=torch.float32, **options):
    """A layer, the norm before it, a state in the middle of a text, and the next token."""
    torch.manual_seed(0)
    layer = KLA(KLAConfig(**{"d_model": d_model, "d_state": 8, **options}))
    norm = RMSNorm(d_model)
    for parameter in (*norm.parameters(), *layer.parameters()):
        parameter.copy_(parameter + 0.1 * torch.randn_like(parameter))  # no value like another
    layer, norm = layer.to(dtype), norm.to(dtype)
    state = layer.mix(torch.randn(rows, 5, d_model, dtype=dtype)).state
    return layer, norm, state, torch.randn(rows, d_model, dtype=dtype)


def exact(layer, norm, state, x, mask=None):
    """x + layer(norm(x)) in float64, through the path of sequences."""
    layer, norm = copy.deepcopy(layer).double(), copy.deepcopy(norm).double()
    x, state = x.double(), map_state(torch.Tensor.double, state)
    mask = None if mask is None else mask.unsqueeze(1)
    found = layer.mix(norm(x).unsqueeze(1), state, mask)
    return x + found.y.squeeze(1), found.state


def assert_close(found, wanted, tolerance):
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape
        if b.numel():
            assert (a - b).abs().max() <= tolerance * b.abs().max()


def tensors(y, state):
    return y, state.conv, *state.belief


@layers
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_a_layer_equals_its_modules(options, rows):
    layer, norm, state, x = make(rows, **options)
    found = layer.decode(x, state, norm=norm)
    assert_close(tensors(found.y, found.state), tensors(*exact(layer, norm, state, x)), 2e-6)


@layers
def test_short_weights_equal_the_same_weights_in_long(options):
    layer, norm, state, x = make(dtype=torch.bfloat16, **options)
    found = layer.decode(x, state, norm=norm)
    assert found.y.dtype == found.state.conv.dtype == torch.bfloat16
    assert found.state.belief.mean.dtype == torch.float32
    y, wanted = exact(layer, norm, state, x)
    assert_close(found.state.belief, wanted.belief, 2e-6)  # not rounded on the way
    assert_close((found.y, found.state.conv), (y, wanted.conv), 2**-8)  # rounded once


@dtypes
@layers
def test_rows_without_a_token_stay_as_they_are(options, dtype):
    layer, norm, state, x = make(3, dtype=dtype, **options)
    x[1] = torch.nan
    mask = torch.tensor([True, False, True])
    found, every = (layer.decode(x, state, m, norm) for m in (mask, None))
    for a, b, old in zip(
        tensors(found.y, found.state), tensors(every.y, every.state), tensors(x, state), strict=True
    ):
        assert torch.equal(a[mask], b[mask])
        assert torch.equal(a[1].nan_to_num(), old[1].nan_to_num())
    assert torch.equal(layer.step(x, state, mask=mask).y[1], torch.zeros_like(x[1]))


def test_without_a_norm_it_is_the_step_of_the_layer():
    layer, _, state, x = make(1)
    found, wanted = layer.step(x, state), layer.mix(x.unsqueeze(1), state)
    assert layer.decode(x, state) is not None
    assert_close(tensors(found.y, found.state), tensors(wanted.y.squeeze(1), wanted.state), 2e-6)


def test_a_state_is_never_written_into():
    layer, norm, state, x = make()
    before = map_state(torch.Tensor.clone, state)
    layer.decode(x, state, norm=norm)
    assert all(map(torch.equal, tensors(x, state), tensors(x, before)))


@pytest.mark.parametrize("isa", ISAS)
@dtypes
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (16, 16), (37, 131), (700, 496)], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_products(isa, dtype, shape, bias):
    out, width = shape
    generator = torch.Generator().manual_seed(out)
    draw = lambda *size: torch.randn(size, generator=generator).to(dtype)  # noqa: E731
    weight, offset = draw(out, width), draw(out) if bias else None
    for rows in range(1, 5):
        x = draw(rows, width)
        found = cpu.few_rows_product(x, weight, offset, isa=isa)
        wanted = x.double() @ weight.double().T + (offset.double() if bias else 0.0)
        terms = x.double().abs() @ weight.double().abs().T + (offset.double().abs() if bias else 0)
        rounding = 1e-6 if dtype == torch.float32 else 2**-8
        assert found.dtype == dtype
        assert ((found - wanted).abs() <= rounding * terms).all()


@pytest.mark.parametrize("isa", ISAS)
def test_instruction_sets_agree(isa):
    layer, norm, state, x = make(d_model=100, d_state=32)
    found = cpu.layer_step(*_arguments(layer, norm, state, x), isa=isa)
    y, wanted = exact(layer, norm, state, x)
    assert_close(found, (y, wanted.conv, *wanted.belief), 2e-6)


def _arguments(layer, norm, state, x):
    tokens = cpu.LayerTokens(x, state.conv, *state.belief)
    options = cpu.LayerOptions(True, "inverse_softplus", 1e-4, norm.eps, 0.0)
    return tokens, decoding._weights(layer, norm, x.dtype), options, *layer.prior()[:2]


@dtypes
def test_bits_do_not_depend_on_the_number_of_threads(dtype):
    layer, norm, state, x = make(1, d_model=500, d_state=32, dtype=dtype)
    threads = torch.get_num_threads()
    try:
        found = []
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            out = layer.decode(x, state, norm=norm)
            found.append((*tensors(out.y, out.state), project(layer.in_proj, x)))
    finally:
        torch.set_num_threads(threads)
    for a, b in itertools.pairwise(found):
        assert all(map(torch.equal, a, b))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 20.0, 80.0])
@pytest.mark.parametrize("link", ["inverse_softplus", "softplus", "exp"])
def test_links_and_gates_at_all_sizes(link, scale):
    width, high = 64, min(scale, 13.0) if link == "exp" else scale  # precisions up to some 1e6
    options = {"precision_link": link, "evidence_bias": True, "gate_bias": 0.0}
    layer, norm, state, x = make(d_model=width, **options)
    # Biases alone make evidence and gates, so that no rounding of a product comes before them.
    layer.evidence_proj.weight.zero_()
    layer.evidence_proj.bias[:width] = torch.linspace(-high, high, width)
    layer.in_proj.weight[width:] = 0.0
    layer.gate_bias.weight.copy_(torch.linspace(scale, -scale, width))
    found = layer.decode(x, state, norm=norm)
    y, wanted = exact(layer, norm, state, x)
    assert_close(tensors(found.y, found.state), tensors(y, wanted), 2e-6)
    relative = (found.state.belief.variance / wanted.belief.variance - 1.0).abs()
    assert relative.max() <= 2e-6  # also of the smallest


@pytest.mark.parametrize("options", FALLBACKS.values(), ids=FALLBACKS)
def test_what_it_does_not_serve_goes_the_way_of_torch(options):
    layer, norm, state, x = make(d_model=36, **options)
    assert layer.decode(x, state, norm=norm) is None
    y, wanted = exact(layer, norm, state, x)
    found = layer.step(norm(x), state)
    assert_close(tensors(x + found.y, found.state), tensors(y, wanted), 2e-6)


def hooked(layer, norm):
    layer.conv.register_forward_hook(lambda *_: None)


def hooked_before(layer, norm):
    norm.register_forward_pre_hook(lambda *_: None)


def patched(layer, norm):
    layer.out_proj.forward = layer.out_proj.forward


def replaced(layer, norm):
    layer.in_proj = nn.Sequential(layer.in_proj)


def parametrised(layer, norm):
    nn.utils.parametrizations.weight_norm(layer.in_proj)


def wider(layer, norm):
    layer.in_proj.double()


def turned(layer, norm):
    layer.in_proj.weight.data = layer.in_proj.weight.data.t().contiguous().t()


@pytest.mark.parametrize(
    "change", [hooked, hooked_before, patched, replaced, parametrised, wider, turned]
)
def test_changed_modules_are_called(change):
    layer, norm, state, x = make()
    assert layer.decode(x, state, norm=norm) is not None
    change(layer, norm)
    assert layer.decode(x, state, norm=norm) is None


def test_a_bias_that_someone_added_is_added():
    layer, norm, state, x = make()
    for name in ("in_proj", "out_proj"):
        old = getattr(layer, name)
        new = nn.Linear(old.in_features, old.out_features)
        new.weight = old.weight
        setattr(layer, name, new)
    found = layer.decode(x, state, norm=norm)
    assert_close(tensors(found.y, found.state), tensors(*exact(layer, norm, state, x)), 2e-6)


def test_where_torch_watches_torch_computes():
    layer, norm, state, x = make()
    with value_checks():
        assert layer.decode(x, state, norm=norm) is None
    with use_engine("associative"):
        assert layer.decode(x, state, norm=norm) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.decode(x, state, norm=norm) is None
        assert project(layer.in_proj, x).dtype == torch.bfloat16
    with torch.enable_grad():
        assert layer.decode(x, state, norm=norm) is None
        assert project(layer.in_proj, x).requires_grad
    assert layer.decode(torch.cat([x] * 3), state, norm=norm) is None  # six rows
    assert layer.decode(x.double(), state, norm=norm) is None
    assert layer.decode(x.half(), state, norm=norm) is None


def test_products_inside_vmap():
    layer, *_ = make()
    x = torch.randn(5, 1, 37)
    found = torch.func.vmap(lambda z: project(layer.in_proj, z))(x)
    torch.testing.assert_close(found, layer.in_proj(x))


def test_a_compiled_product_has_one_graph_for_every_batch():
    layer, *_ = make()
    torch._dynamo.reset()
    counters.clear()
    run = torch.compile(lambda z: project(layer.in_proj, z), backend="eager", dynamic=True)
    for rows in (3, 4, 5, 9):
        run(torch.randn(rows, 37))
    assert counters["stats"]["unique_graphs"] == 1


def test_wrong_states_are_reported_as_ever():
    layer, _, state, x = make()
    with pytest.raises(ValueError, match="convolution window"):
        layer.step(x, state._replace(conv=state.conv[:1]))
    with pytest.raises(ValueError, match="needs a state"):
        layer.step(x, None)


def test_a_weight_that_changes_is_seen():
    layer, norm, state, x = make()
    before = layer.decode(x, state, norm=norm).y
    layer.prior.log_a.add_(1.0)
    layer.out_proj.weight.mul_(2.0)
    after = layer.decode(x, state, norm=norm)
    assert not torch.equal(after.y, before)
    assert_close(tensors(after.y, after.state), tensors(*exact(layer, norm, state, x)), 2e-6)
