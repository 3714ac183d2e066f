"""What holds for every mixer with a recurrent state: it is a ``Mixer`` like any other."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from kalman_attention.baselines.gated_deltanet import (
    GatedDeltaNet,
    GatedDeltaNetConfig,
    delta_chunked,
    delta_recurrence,
)
from kalman_attention.baselines.gla import GLA, GLAConfig
from kalman_attention.baselines.lstm import LSTM, LSTMConfig
from kalman_attention.baselines.mlstm import MLSTM, MLSTMConfig
from kalman_attention.nn.norms import RMSNorm
from kalman_attention.train.optim import group_names

D_MODEL = 16
MIXERS = {
    "gla": lambda: GLA(GLAConfig(d_model=D_MODEL, num_heads=2)),
    "gated_deltanet": lambda: GatedDeltaNet(GatedDeltaNetConfig(d_model=D_MODEL, num_heads=2)),
    "negative_eigenvalues": lambda: GatedDeltaNet(
        GatedDeltaNetConfig(d_model=D_MODEL, num_heads=2, negative_eigenvalues=True)
    ),
    "mlstm": lambda: MLSTM(MLSTMConfig(d_model=D_MODEL, num_heads=2)),
    "lstm": lambda: LSTM(LSTMConfig(d_model=D_MODEL, d_inner=10)),
}
FLOAT32 = {
    "gla": ["decay_up.weight", "decay_up.bias"],
    "gated_deltanet": ["decay.A_log", "decay.dt_bias"],
    "negative_eigenvalues": ["decay.A_log", "decay.dt_bias"],
    "mlstm": ["gates.weight", "gates.bias"],
    "lstm": [
        f"recurrence.{kind}_{part}_l0" for kind in ("weight", "bias") for part in ("ih", "hh")
    ],
}
STATE_SPACE = {name: [p for p in own if p.startswith("decay.")] for name, own in FLOAT32.items()}
every_mixer = pytest.mark.parametrize("name", MIXERS)
every_matrix = pytest.mark.parametrize("name", [name for name in MIXERS if name != "lstm"])


def make(name, dtype=torch.float64):
    torch.manual_seed(0)
    return MIXERS[name]().to(dtype)


def tokens(B, T, seed=1, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, T, D_MODEL, generator=generator, dtype=dtype)


def close(found, expected, tolerance=1e-10):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def close_states(found, expected):
    for one, other in zip(found, expected, strict=True):
        close(one, other)


@every_mixer
@settings(max_examples=15, deadline=None)
@given(sizes=st.lists(st.integers(0, 70), min_size=1, max_size=4))
def test_any_split_equals_the_whole(name, sizes):
    layer, x = make(name), tokens(2, sum(sizes))
    with torch.no_grad():
        whole = layer.mix(x)
        state, parts = layer.init_state(2), []
        for part in x.split(sizes, 1):
            found = layer.mix(part, state)
            state = found.state
            parts.append(found.y)
    close(torch.cat(parts, 1), whole.y)
    close_states(state, whole.state)


@every_mixer
def test_steps_equal_the_whole(name):
    layer, x = make(name), tokens(2, 40)
    whole, state = layer.mix(x), layer.init_state(2)
    for t in range(40):
        found = layer.step(x[:, t], state)
        state = found.state
        close(found.y, whole.y[:, t])
    close_states(state, whole.state)


@every_mixer
def test_gradients_flow_through_the_state(name):
    layer, x = make(name), tokens(1, 90)
    weight = tokens(1, 90, seed=2)
    whole = torch.autograd.grad((layer.mix(x).y * weight).sum(), list(layer.parameters()))
    first = layer.mix(x[:, :37])
    second = layer.mix(x[:, 37:], first.state)
    y = torch.cat([first.y, second.y], 1)
    parts = torch.autograd.grad((y * weight).sum(), list(layer.parameters()))
    for one, other in zip(parts, whole, strict=True):
        close(one, other, 1e-9)


@every_mixer
@settings(max_examples=20, deadline=None)
@given(real=st.lists(st.booleans(), min_size=1, max_size=70), warm=st.integers(0, 3))
def test_padding_anywhere_is_not_seen(name, real, warm):
    layer, mask = make(name), torch.tensor([real])
    state = layer.mix(tokens(1, warm, seed=4)).state
    x = tokens(1, len(real)).masked_fill(~mask.unsqueeze(-1), torch.nan)
    found, alone = layer.mix(x, state, mask), layer.mix(x[:, mask[0]], state)
    close(found.y[:, mask[0]], alone.y)
    assert bool((found.y[:, ~mask[0]] == 0).all())
    close_states(found.state, alone.state)


@every_mixer
@pytest.mark.parametrize("left", [0, 67], ids=["right", "left"])
def test_padding_changes_no_gradient(name, left):
    layer, x = make(name), tokens(1, 40)
    padded = nn.functional.pad(x, (0, 0, left, 67 - left), value=torch.nan)
    mask = padded.isfinite().all(-1)
    weight = tokens(1, 40, seed=2)
    losses = [
        (layer.mix(x).y * weight).sum(),
        (layer.mix(padded, None, mask).y[mask] * weight[0]).sum(),
    ]
    alone, found = (torch.autograd.grad(loss, list(layer.parameters())) for loss in losses)
    for one, other in zip(found, alone, strict=True):
        close(one, other, 1e-9)


@every_mixer
@pytest.mark.parametrize("T", [1, 66])
def test_nothing_but_padding_is_exactly_nothing(name, T):
    layer = make(name)
    state = layer.mix(tokens(3, 5)).state
    blank = torch.zeros(3, T, dtype=torch.bool)
    found = layer.mix(tokens(3, T), state, blank)
    stepped = layer.step(tokens(3, 1)[:, 0], state, mask=blank[:, 0])
    for new in (found.state, stepped.state):
        assert all(torch.equal(one, other) for one, other in zip(new, state, strict=True))
    assert not found.y.any()
    assert not stepped.y.any()


@every_mixer
@settings(max_examples=10, deadline=None)
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4))
def test_packed_documents_are_isolated(name, lengths):
    layer = make(name)
    borders = torch.tensor([0, *lengths]).cumsum(0)
    state = layer.mix(tokens(len(lengths), 3, seed=6)).state
    x = tokens(1, sum(lengths)).requires_grad_()
    packed = layer.mix(x, state, cu_seqlens=borders)
    alone = [
        layer.mix(document, type(state)(*(z[i : i + 1] for z in state)))
        for i, document in enumerate(x.split(lengths, 1))
    ]
    y = torch.cat([found.y for found in alone], 1)
    close(packed.y, y)
    close_states(packed.state, [torch.cat(z) for z in zip(*(a.state for a in alone), strict=True)])
    weight = tokens(1, sum(lengths), seed=3)
    found, expected = (
        torch.autograd.grad((z * weight).sum() + x.sum(), x)[0] for z in (packed.y, y)
    )
    close(found, expected, 1e-9)


@every_mixer
def test_state_is_the_callers(name):
    layer, x = make(name), tokens(1, 4)
    state = layer.mix(x).state
    copy = [z.clone() for z in state]
    with torch.no_grad():
        layer.mix(x, state)
        layer.step(x[:, 0], state)
    assert all(torch.equal(one, other) for one, other in zip(state, copy, strict=True))


@every_mixer
def test_short_types(name):
    layer, x = make(name, torch.float32), tokens(2, 70, dtype=torch.float32)
    expected = layer.mix(x).y.detach()
    short = layer.to(torch.bfloat16)
    found = short.mix(x.bfloat16())
    assert found.y.dtype == torch.bfloat16
    error = (found.y.detach().float() - expected).square().mean() / expected.square().mean()
    assert float(error.sqrt()) < 0.03
    found.y.float().square().sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in layer.parameters())
    assert short.step(x[:, 0].bfloat16(), found.state).y.dtype == torch.bfloat16


@every_mixer
def test_states_and_gates_stay_float32(name):
    layer = make(name, torch.bfloat16)
    kept = [key for key, p in layer.named_parameters() if p.dtype == torch.float32]
    assert kept == FLOAT32[name]
    state = layer.mix(tokens(1, 3, dtype=torch.bfloat16)).state
    recurrent = [z for key, z in state._asdict().items() if key != "conv"]
    assert {z.dtype for z in recurrent} == {torch.float32}


@every_mixer
def test_autocast_leaves_the_recurrence_alone(name):
    layer, x = make(name, torch.float32), tokens(1, 40, dtype=torch.float32)
    expected = layer.mix(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = layer.mix(x)
    assert {z.dtype for key, z in found.state._asdict().items() if key != "conv"} == {torch.float32}
    error = (found.y.float() - expected.y).detach().square().mean().sqrt()
    assert float(error) < 0.03 * float(expected.y.detach().square().mean().sqrt())


@every_matrix
def test_parameter_groups(name):
    groups = group_names(make(name))
    assert [key for key, group in groups.items() if group == "state_space"] == STATE_SPACE[name]
    vectors = {key for key, group in groups.items() if group == "vector"}
    assert vectors >= {key for key in groups if key.endswith(("bias", "norm.weight"))} - {
        *STATE_SPACE[name]
    }
    assert groups["in_proj.weight"] == groups["out_proj.weight"] == "hidden"


@every_mixer
def test_refuses_packing_of_batches(name):
    with pytest.raises(ValueError, match="into one row, but the batch has 2 rows"):
        make(name)(tokens(2, 4), cu_seqlens=torch.tensor([0, 4]))


class Recaller(nn.Module):
    """Embedding, one block, head: the smallest model that can look something up."""

    def __init__(self, name):
        super().__init__()
        self.keys, self.values = nn.Embedding(4, D_MODEL), nn.Embedding(5, D_MODEL)
        self.norms = nn.ModuleList([RMSNorm(D_MODEL), RMSNorm(D_MODEL)])
        self.mixer = make(name, torch.float32)
        self.head = nn.Linear(D_MODEL, 4)

    def forward(self, keys, values):
        h = self.keys(keys) + self.values(values)
        h = h + self.mixer(self.norms[0](h))
        return self.head(self.norms[1](h))


@every_matrix
def test_learns_to_recall(name):
    # Four tokens with a key and a value each, then a key alone, whose value is the answer.
    torch.manual_seed(1)
    model, losses = Recaller(name), []
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(150):
        keys, values = torch.rand(64, 4).argsort(1), torch.randint(4, (64, 4))
        asked = torch.randint(4, (64, 1))
        keys = torch.cat([keys, keys.gather(1, asked)], 1)
        shown = nn.functional.pad(values, (0, 1), value=4)
        answer = values.gather(1, asked).squeeze(1)
        loss = nn.functional.cross_entropy(model(keys, shown)[:, -1], answer)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[0] > 1.2  # log 4 = 1.39 is chance
    assert sum(losses[-10:]) / 10 < 0.4


def test_the_lstm_is_that_of_torch_and_starts_with_an_open_memory():
    layer, x = make("lstm"), tokens(2, 9)
    h, (_, cell) = layer.recurrence(x)
    close(layer(x), h @ layer.out_proj.weight.T)
    close(layer.mix(x).state.cell, cell[0])
    assert layer.recurrence.bias_ih_l0.view(4, 10).mean(1).tolist() == [0.0, 1.0, 0.0, 0.0]


def test_beta_beyond_one_turns_what_it_finds_over():
    config = {"d_model": 4, "num_heads": 1, "expand_k": 0.5, "expand_v": 0.5}
    k = torch.tensor([[[[1.0, 0.0]]]], dtype=torch.float64)
    zero = torch.zeros(1, 1, 1, dtype=torch.float64)
    memory = torch.tensor([[[[3.0, 4.0], [5.0, 6.0]]]], dtype=torch.float64)
    for rule in (delta_recurrence, delta_chunked):
        _, after = rule(k, k, torch.zeros_like(k), zero, zero + 2.0, memory)
        close(after, memory * torch.tensor([-1.0, 1.0], dtype=torch.float64).unsqueeze(-1))
    layers = [GatedDeltaNet(negative_eigenvalues=x, **config) for x in (False, True)]
    layers[1].load_state_dict(layers[0].state_dict())
    x = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(0))
    assert not torch.allclose(layers[0](x), layers[1](x))
