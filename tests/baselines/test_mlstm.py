"""mLSTM: the stabilised chunks are the recurrence without a stabiliser, and the public one."""

import math

import pytest
import torch
from torch import nn

from kalman_attention.baselines.mlstm import MLSTM, MLSTMConfig, mlstm_chunked, mlstm_recurrence
from tests.baselines.rules import assert_same_rule, mlstm_inputs

XLSTM = "needs xlstm, without its CUDA dependencies: pip install --no-deps xlstm==2.0.6"


def plain(q, k, v, log_i, log_f, state, m):
    """The printed equations, with nothing to keep them from overflowing."""
    memory = state * m.exp()[..., None, None]
    S, n, y = memory[..., :-1], memory[..., -1], []
    for t in range(q.shape[1]):
        f, i = log_f[:, t].exp(), log_i[:, t].exp()
        S = f[..., None, None] * S + i[..., None, None] * torch.einsum(
            "bhk,bhv->bhkv", k[:, t], v[:, t]
        )
        n = f[..., None] * n + i[..., None] * k[:, t]
        weight = (n * q[:, t]).sum(-1, keepdim=True).abs().clamp(min=1.0)
        y.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]) / weight)
    return torch.stack(y, 1), S, n


def test_recurrence_is_what_it_says():
    data = mlstm_inputs(9)
    y, S, n = plain(*data)
    found, state, m = mlstm_recurrence(*data)
    # 1e-6 is the published constant in the denominator.
    torch.testing.assert_close(found, y, rtol=1e-5, atol=1e-5)
    memory = state * m.exp()[..., None, None]
    torch.testing.assert_close(memory[..., :-1], S, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(memory[..., -1], n, rtol=1e-12, atol=1e-12)


def test_gradients_are_those_of_the_outputs():
    # Numerically, through outputs alone: the state is kept at a scale that also moves.
    *data, m = mlstm_inputs(5, B=1, H=1, K=2, V=2)
    data = [x.requires_grad_() for x in data]
    for rule in (mlstm_chunked, mlstm_recurrence):
        assert torch.autograd.gradcheck(lambda *x, f=rule: f(*x, m)[0], data)


def test_gates_whose_exponentials_overflow():
    q, k, v, log_i, log_f, state, m = mlstm_inputs(130, strength=200.0, dtype=torch.float32)
    assert bool(log_i.exp().isinf().any())
    data = (q, k, v, log_i, log_f, state, m)
    y, last, _ = mlstm_chunked(*data)
    exact, _, _ = mlstm_recurrence(*(x.double() for x in data))
    # 200 in float32 is known to 1e-5, and so is every weight.
    scale = float(exact.abs().max())
    torch.testing.assert_close(y.double(), exact, rtol=1e-3, atol=1e-4 * scale)
    assert bool(last.isfinite().all())


def test_closed_gates_have_finite_gradients():
    data = [x.float() for x in mlstm_inputs(40)]
    data[3] = data[3].masked_fill(torch.arange(40).unsqueeze(-1) % 3 > 0, -torch.inf)
    data[3][:, 10:35] = -torch.inf
    assert_same_rule(mlstm_chunked, mlstm_recurrence, *data, rtol=1e-4)
    found = [x.requires_grad_() for x in data]
    for gradient in torch.autograd.grad(mlstm_chunked(*found)[0].sum(), found[:6]):
        assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("T", [1, 70])
def test_rule_of_xlstm(T):
    backends = pytest.importorskip("xlstm.blocks.mlstm.backends", reason=XLSTM)
    g = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, T, 2, 8, generator=g)
    log_i, forget = 3 * torch.randn(2, 2, T, 2, generator=g)
    swapped = [x.transpose(1, 2) for x in (q, k, v)]
    gates = [x.transpose(1, 2).unsqueeze(-1) for x in (log_i, forget)]
    expected = backends.parallel_stabilized_simple(*swapped, *gates).transpose(1, 2)
    start = torch.zeros(2, 2, 8, 9), torch.zeros(2, 2)
    log_f = nn.functional.logsigmoid(forget)
    found, _, _ = mlstm_chunked(q, k / math.sqrt(8), v, log_i, log_f, *start)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def xlstm_layer():
    """A layer of xlstm with weights that are not at their start, and ours with the same."""
    public = pytest.importorskip("xlstm.blocks.mlstm.layer", reason=XLSTM)
    torch.manual_seed(0)
    options = public.mLSTMLayerConfig(embedding_dim=32, num_heads=4, context_length=80)
    theirs = public.mLSTMLayer(options)
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    ours, cell = MLSTM(MLSTMConfig(d_model=32)), theirs.mlstm_cell
    weights = {
        "in_proj.weight": theirs.proj_up.weight,
        "conv.weight": theirs.conv1d.conv.weight.squeeze(1).T,
        "conv.bias": theirs.conv1d.conv.bias,
        "q_proj.weight": theirs.q_proj.weight,
        "k_proj.weight": theirs.k_proj.weight,
        "v_proj.weight": theirs.v_proj.weight,
        "gates.weight": torch.cat([cell.igate.weight, cell.fgate.weight]),
        "gates.bias": torch.cat([cell.igate.bias, cell.fgate.bias]),
        "norm.weight": 1 + cell.outnorm.weight,
        "skip.weight": theirs.learnable_skip,
        "out_proj.weight": theirs.proj_down.weight,
    }
    ours.load_state_dict(weights)
    return theirs, ours


@pytest.mark.parametrize("T", [1, 3, 70])
def test_layer_of_xlstm(T):
    theirs, ours = xlstm_layer()
    x = torch.randn(2, T, 32)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-4)


def test_layer_of_xlstm_by_steps():
    theirs, ours = xlstm_layer()
    x, state, memory = torch.randn(2, 12, 32), ours.init_state(2), {}
    with torch.no_grad():
        for t in range(12):
            expected, memory = theirs.step(x[:, t : t + 1], **memory)
            found = ours.step(x[:, t], state)
            state = found.state
            torch.testing.assert_close(found.y, expected[:, 0], rtol=1e-4, atol=1e-4)


def test_starts_as_published():
    torch.manual_seed(0)
    layer = MLSTM(MLSTMConfig(d_model=128, num_heads=16))
    log_i, forget = layer.gates.bias.detach().chunk(2)
    assert not layer.gates.weight.any()
    torch.testing.assert_close(forget, torch.linspace(3.0, 6.0, 16))
    assert float(log_i.abs().max()) < 0.5
    small = math.sqrt(2 / (5 * 128))
    for weight in (layer.in_proj.weight, layer.q_proj.weight, layer.v_proj.weight):
        assert abs(float(weight.detach().std()) / small - 1.0) < 0.1


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({"d_model": 128, "num_heads": 16}, 4096),
        ({"d_model": 128, "num_heads": 16, "qk_factor": 0.5}, 2048),
        ({"d_model": 64, "qkv_block": None}, 4 * 32 * 32),
    ],
)
def test_state_sizes_of_the_paper(options, size):
    config = MLSTMConfig(**options)
    assert config.state_size == size
    assert MLSTM(config).init_state(1).matrix[..., :-1].numel() == size


def test_full_projections_are_one_block():
    torch.manual_seed(0)
    layer = MLSTM(MLSTMConfig(d_model=8, qkv_block=None, qk_factor=0.5))
    u = torch.randn(2, 3, 16)
    torch.testing.assert_close(layer.q_proj(u), u @ layer.q_proj.weight[0].T)
    assert layer(torch.randn(2, 3, 8)).shape == (2, 3, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 3}, "Choose another num_heads or proj_factor"),
        ({"qk_factor": 0.3}, "Choose another qk_factor"),
        ({"qkv_block": 5}, "Choose another, or None"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        MLSTMConfig(**{"d_model": 16, **options})
