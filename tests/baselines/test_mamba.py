"""Mamba as a mixer: every path is the same recurrence, and it is the published one."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kalman_attention import LanguageModel, LanguageModelConfig, Mamba, MambaConfig
from kalman_attention.baselines import mamba as module
from kalman_attention.ops.linear_scan import linear_scan, linear_scan_ref
from kalman_attention.train.optim import group_names, param_groups

D_MODEL = 12
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def make(seed=0, **options):
    torch.manual_seed(seed)
    return Mamba(MambaConfig(d_model=D_MODEL, **{"d_state": 4, **options}))


def tokens(B, T, seed=1):
    return torch.randn(B, T, D_MODEL, generator=torch.Generator().manual_seed(seed))


def by_hand(layer, x):
    """The published recurrence, written as a loop over tokens and nothing else."""
    c = layer.config
    w = dict(layer.named_parameters())
    stream, gate = (x @ w["in_proj.weight"].T).chunk(2, -1)
    B, T, D = stream.shape
    window = [stream.new_zeros(B, D)] * (c.conv_kernel - 1)
    h = x.new_zeros(B, D, c.d_state)
    A = -w["state_space.log_A"].exp().T  # [D, N]
    out = []
    for t in range(T):
        window = [*window, stream[:, t]]
        taps = window[-c.conv_kernel :]
        u = w["conv.bias"] + sum(tap * one for tap, one in zip(w["conv.weight"], taps, strict=True))
        u = u * torch.sigmoid(u)
        low, b, cc = (u @ w["select_proj.weight"].T).split([c.rank, c.d_state, c.d_state], -1)
        dt = torch.log1p(torch.exp(low @ w["dt_proj.weight"].T + w["state_space.raw_dt"]))
        decay = torch.exp(dt.unsqueeze(-1) * A)
        h = decay * h + (dt * u).unsqueeze(-1) * b.unsqueeze(1)
        y = (h * cc.unsqueeze(1)).sum(-1) + w["skip.weight"] * u
        g = gate[:, t]
        out.append((y * g * torch.sigmoid(g)) @ w["out_proj.weight"].T)
    return torch.stack(out, 1) if out else x


LENGTHS = [0, 1, 2, 3, 63, 64, 65, 130]


@pytest.mark.parametrize("T", LENGTHS)
def test_is_the_published_recurrence_with_gradients(T):
    layer = make().double()
    x = tokens(2, T).double().requires_grad_()
    leaves = [x, *layer.parameters()]
    weight = tokens(2, T, seed=3).double()
    found, expected = layer.mix(x).y, by_hand(layer, x)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    if T == 0:
        return
    pair = (torch.autograd.grad((y * weight).sum(), leaves) for y in (found, expected))
    for one, other in zip(*pair, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_engines_agree_with_state_and_gradients(monkeypatch, T, dtype):
    layer = make().to(dtype)
    x = tokens(2, T).to(dtype).requires_grad_()
    state = module.MambaState(*(0.3 * torch.randn_like(z) for z in layer.init_state(2)))
    leaves = [z.requires_grad_() for z in state] + [x, *layer.parameters()]

    def run(scan):
        monkeypatch.setattr(module, "linear_scan", scan)
        found = layer.mix(x, state)
        loss = (found.y * tokens(2, T, seed=3)).sum() + found.state.hidden.square().sum()
        gradients = torch.autograd.grad(
            loss + 0.0 * found.state.conv.sum(), leaves, materialize_grads=True
        )
        return found, gradients

    found, gradients = run(linear_scan)
    expected, exact = run(linear_scan_ref)
    rtol, atol = (1e-9, 1e-11) if dtype == torch.float64 else (1e-4, 1e-5)
    torch.testing.assert_close(found.y, expected.y, rtol=rtol, atol=atol)
    torch.testing.assert_close(found.state, expected.state, rtol=rtol, atol=atol)
    for one, other in zip(gradients, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol)


@settings(max_examples=20, deadline=None)
@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=5), steps=st.integers(0, 3))
def test_chunks_and_steps_equal_one_pass(sizes, steps):
    layer, n = make(), sum(sizes)
    x = tokens(2, n + steps)
    whole = layer.mix(x)
    state, ys = None, []
    for part in x[:, :n].split(sizes, 1):
        y, _, state = layer.mix(part, state)
        ys.append(y)
    for t in range(n, n + steps):
        y, _, state = layer.step(x[:, t], state)
        ys.append(y.unsqueeze(1))
    torch.testing.assert_close(torch.cat(ys, 1), whole.y, **CLOSE)
    torch.testing.assert_close(state, whole.state, **CLOSE)


def test_init_state_is_the_default():
    layer, x = make(), tokens(2, 5)
    torch.testing.assert_close(layer.mix(x, layer.init_state(2, capacity=9)).y, layer.mix(x).y)


@settings(max_examples=20, deadline=None)
@given(
    left=st.integers(0, 3), right=st.integers(0, 3), length=st.integers(0, 5), cold=st.booleans()
)
def test_padding_on_either_side_changes_nothing(left, right, length, cold):
    layer, x = make(), tokens(2, length)
    state = None if cold else layer.mix(tokens(2, 3, seed=5)).state
    alone = layer.mix(x, state)
    padded = torch.nn.functional.pad(x, (0, 0, left, right), value=torch.nan)
    mask = torch.zeros(2, left + length + right, dtype=torch.bool)
    mask[:, left : left + length] = True
    found = layer.mix(padded, state, mask)
    torch.testing.assert_close(found.y[:, left : left + length], alone.y, **CLOSE)
    torch.testing.assert_close(found.state, alone.state, **CLOSE)
    assert bool((found.y[~mask] == 0).all())


def test_padding_inside_a_row_and_its_gradient():
    layer, x = make(), tokens(2, 6).requires_grad_()
    mask = torch.tensor([[True, False, True, True, False, True], [False] * 5 + [True]])
    found = layer.mix(x, mask=mask)
    for i in range(2):
        alone = layer.mix(x[i : i + 1, mask[i]])
        torch.testing.assert_close(found.y[i, mask[i]], alone.y[0], **CLOSE)
        torch.testing.assert_close(found.state.hidden[i], alone.state.hidden[0], **CLOSE)
    found.y.square().sum().backward()
    assert bool((x.grad[~mask] == 0).all())
    assert bool((x.grad[mask] != 0).any(-1).all())


def test_step_with_mask():
    layer, x = make(), tokens(3, 5)
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [1, 0, 0, 1, 0]]).bool()
    whole, state = layer.mix(x, mask=mask), layer.init_state(3)
    for t in range(5):
        y, _, state = layer.step(x[:, t], state, mask=mask[:, t])
        torch.testing.assert_close(y, whole.y[:, t], **CLOSE)
    torch.testing.assert_close(state, whole.state, **CLOSE)


@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=4), cold=st.booleans())
def test_packed_equals_separate_with_gradients(lengths, cold):
    layer, x = make(), tokens(1, sum(lengths))
    borders, weight = torch.tensor([0, *lengths]).cumsum(0), tokens(1, sum(lengths), seed=3)
    state = None if cold else layer.mix(tokens(len(lengths), 4, seed=6)).state
    rows = range(len(lengths))
    each = [None if cold else module.MambaState(*(z[i : i + 1] for z in state)) for i in rows]
    packed = layer.mix(x, state, cu_seqlens=borders)
    alone = [layer.mix(*pair) for pair in zip(x.split(lengths, 1), each, strict=True)]
    y = torch.cat([found.y for found in alone], 1)
    hidden = torch.cat([found.state.hidden for found in alone])
    torch.testing.assert_close(packed.y, y, **CLOSE)
    torch.testing.assert_close(packed.state.hidden, hidden, **CLOSE)
    if sum(lengths) == 0:
        return

    def gradients(y, hidden):
        loss = (y * weight).sum() + hidden.sum()
        return torch.autograd.grad(loss, list(layer.parameters()), retain_graph=True)

    pair = zip(gradients(packed.y, packed.state.hidden), gradients(y, hidden), strict=True)
    for found, expected in pair:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_short_types_keep_the_dynamics():
    layer, x = make(), tokens(2, 20)
    short = copy.deepcopy(layer).bfloat16()
    assert {p.dtype for p in short.state_space.parameters()} == {torch.float32}
    assert short.in_proj.weight.dtype == torch.bfloat16
    assert torch.equal(short.state_space.raw_dt, layer.state_space.raw_dt)
    found = short.mix(x.bfloat16())
    assert found.y.dtype == torch.bfloat16
    assert found.state.hidden.dtype == torch.float32
    torch.testing.assert_close(found.y.float(), layer.mix(x).y, rtol=0.1, atol=0.02)
    stepped = short.step(x[:, 0].bfloat16(), found.state)
    assert stepped.y.dtype == torch.bfloat16
    assert stepped.state.hidden.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        mixed = layer.mix(x)
    assert mixed.state.hidden.dtype == torch.float32
    torch.testing.assert_close(mixed.y.float(), layer.mix(x).y, rtol=0.1, atol=0.02)
    assert copy.deepcopy(layer).double().state_space.log_A.dtype == torch.float64


def published_start(layer):
    c, w = layer.config, dict(layer.named_parameters())
    rates = torch.arange(1.0, c.d_state + 1)
    torch.testing.assert_close(w["state_space.log_A"].exp(), rates[:, None].expand(-1, c.width))
    assert bool((w["skip.weight"] == 1).all())
    dt = torch.nn.functional.softplus(w["state_space.raw_dt"]).detach()
    assert 1e-3 * 0.99 < float(dt.min()) < 2e-3
    assert 0.05 < float(dt.max()) < 0.1 * 1.01
    # log-uniform: the mean of the logarithm is in the middle, its spread that of a uniform
    assert abs(float(dt.log10().mean()) + 2.0) < 0.1
    assert abs(float(dt.log10().std()) - 2.0 / 12**0.5) < 0.05
    bound = c.rank**-0.5
    assert 0.95 * bound < float(w["dt_proj.weight"].detach().abs().max()) <= bound


def test_the_published_start_survives_the_model():
    torch.manual_seed(0)
    published_start(Mamba(MambaConfig(d_model=256)))
    model = LanguageModel(LanguageModelConfig(vocab_size=9, d_model=256, plan="mamba*2"))
    for block in model.blocks:
        published_start(block.mixer)
    raised = Mamba(MambaConfig(d_model=64, dt_min=1e-5, dt_max=1e-3, dt_floor=1e-4)).state_space
    assert float(torch.nn.functional.softplus(raised.raw_dt.detach()).min()) >= 0.99e-4


def test_options():
    assert MambaConfig(d_model=100).rank == 7
    assert MambaConfig(d_model=100).width == 200
    layer = make(expand=1, conv_kernel=2, dt_rank=3)
    assert layer.mix(tokens(1, 3)).state.hidden.shape == (1, 4, D_MODEL)
    assert layer.dt_proj.weight.shape == (D_MODEL, 3)
    assert make(expand=1.5).config.width == 18
    for bad, message in (
        ({"expand": 0.3}, "whole number"),
        ({"d_state": 0}, "d_state must be at least 1"),
        ({"dt_min": 0.2}, "dt_min <= dt_max"),
    ):
        with pytest.raises(ValueError, match=message):
            make(**bad)


def test_parameter_groups():
    expected = {
        "in_proj.weight": "hidden",
        "conv.weight": "vector",
        "conv.bias": "vector",
        "select_proj.weight": "hidden",
        "dt_proj.weight": "hidden",
        "state_space.log_A": "state_space",
        "state_space.raw_dt": "state_space",
        "skip.weight": "vector",
        "out_proj.weight": "hidden",
    }
    assert group_names(make()) == expected
    decay = {g["name"]: g["weight_decay"] for g in param_groups(make())}
    assert decay == {"hidden": 0.1, "vector": 0.0, "state_space": 0.0}


def test_it_learns_to_remember():
    # Repeat the token of two steps ago: needs the memory, not only the current token.
    torch.manual_seed(0)
    model = LanguageModel(
        LanguageModelConfig(vocab_size=8, d_model=16, plan="mamba", embedding_std=1.0)
    )
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        x = torch.randint(8, (16, 12))
        loss = model.loss(x[:, 2:], x[:, :-2])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[0] > 1.9
    assert losses[-1] < 0.5 * losses[0]
    for name, parameter in model.named_parameters():
        assert not torch.equal(parameter, before[name]), name


def test_the_kernel_of_mamba_ssm_is_asked_only_where_it_can_serve(monkeypatch):
    # Without a GPU only the wiring can be tested, with a stand-in of the documented signature.
    layer, x = make(), tokens(2, 5)
    expected = layer.mix(x)
    asked = []

    def kernel(u, delta, A, B, C, D=None, z=None, return_last_state=False):
        asked.append(tuple(u.shape))
        y, h = linear_scan_ref(*(t.transpose(1, 2) for t in (u, delta)), A.T, *(
            t.transpose(1, 2) for t in (B, C)))  # fmt: skip
        return y.transpose(1, 2), h.transpose(1, 2)

    monkeypatch.setattr(module, "_kernel", lambda: kernel)
    assert not module.kernel_serves(x)
    monkeypatch.setattr(module, "kernel_serves", lambda u: u.shape[1] > 0)
    found = layer.mix(x)
    torch.testing.assert_close(found.y, expected.y, **CLOSE)
    torch.testing.assert_close(found.state, expected.state, **CLOSE)
    assert asked == [(2, 2 * D_MODEL, 5)]
    layer.mix(x, expected.state)
    layer.mix(x, mask=torch.ones(2, 5, dtype=torch.bool))
    layer.mix(x[:1], cu_seqlens=torch.tensor([0, 2, 5]))
    assert len(asked) == 1
