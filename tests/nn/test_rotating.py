"""The layer whose blocks of slots rotate, against the definition of the model it filters."""

import pytest
import torch
from torch import Tensor

from kalman_attention import KLA, KLAConfig, KLAState, LanguageModel, LanguageModelConfig
from kalman_attention.filtering import moment
from kalman_attention.filtering.rotation import rotation


def make(**options: object) -> KLA:
    torch.manual_seed(0)
    fields = {"d_model": 6, "d_state": 8, "initial_precision": 0.5, "dt_max": 0.3, **options}
    return KLA(KLAConfig.tracking(**fields)).double()


def tokens(B: int, T: int) -> Tensor:
    g = torch.Generator().manual_seed(1)
    return torch.randn(B, T, 6, generator=g, dtype=torch.float64)


def by_definition(layer: KLA, x: Tensor) -> tuple[Tensor, Tensor, KLAState]:
    """Turn the mean by the token's own matrix, predict, update: token by token, block by block."""
    found = layer.read(x)
    e, config = found.evidence, layer.config
    a_bar, p_bar, state = layer.prior(len(x))
    G, m = config.blocks, config.shared_slots
    mean, variance = state.mean.unflatten(1, (G, m)), state.variance.unsqueeze(2)
    a_bar, p_bar = a_bar.unsqueeze(1), p_bar.unsqueeze(1)  # [G, 1, D]
    y, y_var = [], []
    for t in range(x.shape[1]):
        U = rotation(e.u_h[:, t].transpose(1, 2))  # [B, G, m, m]
        k, q = (z[:, t].unflatten(-1, (G, m)).unsqueeze(-1) for z in (e.k, e.q))
        lam_v, v = (z[:, t, None, None] for z in (e.lam_v, e.v))
        phi = k.square().sum(2, keepdim=True) * lam_v
        step = moment.step(KLAState(U @ mean, variance), a_bar, p_bar, phi, k * lam_v * v)
        mean, variance = step.mean, step.variance
        y.append((q * mean).sum((1, 2)))
        y_var.append((q.square() * variance).sum((1, 2)))
    state = KLAState(mean.flatten(1, 2), variance.squeeze(2))
    return torch.stack(y, 1), torch.stack(y_var, 1), state


@pytest.mark.parametrize(("slots", "reflections"), [(2, 1), (4, 2), (4, 3), (8, 2)])
def test_is_the_filter_of_a_latent_that_tokens_rotate(slots: int, reflections: int) -> None:
    layer, x = make(shared_slots=slots, num_reflections=reflections), tokens(2, 70)
    found = layer.read(x, return_variance=True)
    y, y_var, state = by_definition(layer, x)
    torch.testing.assert_close(found.mean, y, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.variance, y_var, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.state.belief, state, rtol=1e-10, atol=1e-12)
    plain = make(shared_slots=slots, num_reflections=0).read(x)
    assert plain.evidence.u_h is None
    assert not torch.allclose(plain.mean, found.mean, rtol=0.1)


def test_frequencies_are_those_of_an_oscillator_seen_at_any_times() -> None:
    """Against a dense filter of z' = [[-a, -w], [w, -a]] z + noise, by the matrix exponential."""
    layer = KLA(
        d_model=6, d_state=4, shared_slots=2, frequencies=(0.4, 3.0), conv_kernel=None, dt_max=0.3
    ).double()
    x, dt = tokens(1, 12), 3.0 * torch.rand(1, 12, dtype=torch.float64)
    found = layer.read(x, dt=dt, return_variance=True)
    e, (a_bar, p_bar, _) = found.evidence, layer.prior(1)
    frequencies = layer.turns.log_frequency.exp()
    torch.testing.assert_close(frequencies, torch.tensor([0.4, 3.0], dtype=torch.float64))
    eye, channel = torch.eye(2, dtype=torch.float64), 3
    y = torch.zeros(12, dtype=torch.float64)
    y_var = torch.zeros_like(y)
    for block, frequency in enumerate(frequencies):
        rate = -a_bar[block, channel].log()
        settled = p_bar[block, channel] / (1.0 - a_bar[block, channel] ** 2)
        drift = -rate * eye + frequency * torch.tensor([[0.0, -1.0], [1.0, 0.0]]).double()
        mean, covariance = torch.zeros(2, dtype=torch.float64), eye.clone()
        for t in range(12):
            move = torch.linalg.matrix_exp(dt[0, t] * drift)
            noise = settled * (eye - move @ move.T)
            mean, covariance = move @ mean, move @ covariance @ move.T + noise
            k, q = (z[0, t, 2 * block : 2 * block + 2] for z in (e.k, e.q))
            precision = k.square().sum() * e.lam_v[0, t, channel]
            gain = covariance @ torch.linalg.inv(covariance + eye / precision)
            mean = mean + gain @ (k * e.v[0, t, channel] / k.square().sum() - mean)
            covariance = covariance - gain @ covariance
            y[t] += q @ mean
            y_var[t] += q @ covariance @ q
    torch.testing.assert_close(found.mean[0, :, channel], y, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(found.variance[0, :, channel], y_var, rtol=1e-9, atol=1e-11)


def test_gradients_are_those_of_the_definition() -> None:
    layer, x = make(), tokens(2, 12).requires_grad_()
    parameters = [x, *layer.parameters()]

    def gradients(y: Tensor, y_var: Tensor, state: KLAState) -> tuple[Tensor, ...]:
        loss = y.square().sum() + y_var.sum() + state.mean.square().sum() + state.variance.sum()
        return torch.autograd.grad(loss, parameters, allow_unused=True)

    found = layer.read(x, return_variance=True)
    got = gradients(found.mean, found.variance, found.state.belief)
    expected = gradients(*by_definition(layer, x))
    for one, other in zip(got, expected, strict=True):
        assert (one is None) == (other is None)  # gate, skip and output come after the read-out
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


def test_gradients_pass_through_a_state() -> None:
    layer, x = make(), tokens(2, 9).requires_grad_()
    (whole,) = torch.autograd.grad(layer.mix(x).y[:, 5:].square().sum(), x)
    state = layer.mix(x[:, :5]).state
    (pieces,) = torch.autograd.grad(layer.mix(x[:, 5:], state).y.square().sum(), x)
    torch.testing.assert_close(pieces, whole, rtol=1e-9, atol=1e-12)


def test_one_reflection_per_token_can_count_parity() -> None:
    """A token that reflects along the initial mean changes the sign of what is read; forever."""
    sizes = {"d_model": 2, "d_state": 2, "shared_slots": 2, "num_reflections": 1}
    layer = KLA(KLAConfig.tracking(precision_floor=0.0, **sizes)).double()
    one = torch.nn.functional.silu(torch.tensor(8.0, dtype=torch.float64))
    with torch.no_grad():
        weight, bias = layer.evidence_proj.weight.zero_(), layer.evidence_proj.bias
        bias[:2] = -60.0  # no evidence at all
        bias[2:] = torch.tensor([1.0, 0, 1, 0, 0, 1])  # key, query; reflect along the second slot
        weight[-2:] = torch.tensor([[1.0, 0], [-1.0, 0]]) / one  # or along the first, for ones
        layer.in_proj.weight.copy_(torch.eye(2).repeat(2, 1))
        layer.prior.mean_0.copy_(torch.tensor([[1.0, 1], [0, 0]]))
        layer.prior.log_a.fill_(-60.0)
        layer.prior.raw_p.fill_(-60.0)
    bits = torch.randint(2, (3, 4_000), generator=torch.Generator().manual_seed(0))
    x = torch.stack([bits * 8.0, torch.zeros_like(bits)], -1).double()
    y = layer.read(x).mean[..., 0]
    torch.testing.assert_close(y.sign(), 1.0 - 2.0 * (bits.cumsum(1) % 2), check_dtype=False)
    assert y.abs().min() > 0.9


def test_compiles_and_exports() -> None:
    layer, x = make(), tokens(2, 8)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))
    exported = torch.export.export(layer, (x,))
    torch.testing.assert_close(exported.module()(x), layer(x))


def test_a_model_of_them_decodes_and_has_a_marginal_likelihood() -> None:
    torch.manual_seed(0)
    options = KLAConfig.tracking(d_model=16, d_state=8)
    model = LanguageModel(LanguageModelConfig(vocab_size=9, d_model=16, plan="kla*2", kla=options))
    ids = torch.randint(9, (2, 12))
    whole = model(ids)
    part = model(ids[:, :7])
    states, rows = part.states, [part.logits]
    for t in range(7, 12):
        one = model.step(ids[:, t], states)
        states = one.states
        rows.append(one.logits.unsqueeze(1))
    torch.testing.assert_close(torch.cat(rows, 1), whole.logits, rtol=1e-4, atol=1e-5)
    loss = model.loss(ids, ids, kind="marginal", num_samples=3)
    loss.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shared_slots": 1}, "change its sign at every token"),
        ({"num_reflections": -1}, "at least 0"),
        ({"frequencies": (0.1, 1.0)}, "blocks of two slots"),
        ({"shared_slots": 2, "frequencies": (1.0, 0.1)}, "lowest <= highest"),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)
