"""The KLA layer: every path is the same filter."""

import copy
import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kalman_attention import KLA, KLAConfig, KLAState, LayerOutput, discretise, kla_scan_ref

D_MODEL = 12

VARIANTS = {
    "default": {},
    "project": {"value": "project"},
    "low-rank": {"precision_rank": 3},
    "project, low-rank": {"value": "project", "precision_rank": 3},
    "zero noise": {"process_noise": "zero"},
    "fixed noise": {"process_noise": "fixed"},
    "zoh": {"discretisation": "zoh"},
    "no step size": {"discretisation": "none"},
    "stationary": {"prior": "stationary", "diffusion": 1.0},
    "learned prior": {"prior": "learned"},
    "wide, no skip": {"d_inner": 20, "skip": None, "qk_norm": False, "conv_kernel": 2},
    "softplus": {"precision_link": "softplus", "decay_rate": (0.5, 4.0)},
    "shared precision": {"shared_slots": 2, "decay_rate": (1.0, 3.0)},
    "one precision": {"shared_slots": 4, "prior": "learned"},
    "token steps": {"step_rank": 2, "dt_max": 0.1},
    "token steps, shared": {"step_rank": 2, "shared_slots": 2, "prior": "stationary"},
    "biases": {"evidence_bias": True, "gate_bias": 1.0, "precision_rank": 3},
    "normed": {"readout_norm": True},
    "no convolution": {"conv_kernel": None},
    "rotating": {"shared_slots": 2, "num_reflections": 2, "prior": "learned"},
    "rotating, token steps": {"shared_slots": 4, "num_reflections": 1, "step_rank": 2},
    "oscillating": {"shared_slots": 2, "frequencies": (0.1, 2.0), "prior": "learned"},
    "oscillating, rotated by tokens": {
        "shared_slots": 2,
        "frequencies": (0.5, 0.5),
        "num_reflections": 1,
        "step_rank": 2,
    },
    "tracking": dataclasses.asdict(KLAConfig.tracking(d_model=D_MODEL, d_state=4)),
}


def make(seed=0, **options):
    torch.manual_seed(seed)
    layer = KLA(KLAConfig(**{"d_model": D_MODEL, "d_state": 4, **options}))
    if layer.prior.mean_0 is not None:
        torch.nn.init.normal_(layer.prior.mean_0)
        torch.nn.init.normal_(layer.prior.log_variance_0)
    return layer


def tokens(B, T, seed=1):
    return torch.randn(B, T, D_MODEL, generator=torch.Generator().manual_seed(seed))


def assert_same_state(found, expected, **tolerance):
    torch.testing.assert_close(found.conv, expected.conv, **tolerance)
    torch.testing.assert_close(found.belief, expected.belief, **tolerance)


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_chunks_and_steps_equal_one_pass(options):
    layer, x = make(**options), tokens(2, 11)
    whole = layer.mix(x, return_variance=True)
    assert isinstance(whole, LayerOutput)
    state, ys, variances = None, [], []
    for part in x[:, :8].split([3, 0, 1, 4], 1):
        y, variance, state = layer.mix(part, state, return_variance=True)
        ys.append(y)
        variances.append(variance)
    for t in range(8, 11):
        y, variance, state = layer.step(x[:, t], state, return_variance=True)
        ys.append(y.unsqueeze(1))
        variances.append(variance.unsqueeze(1))
    torch.testing.assert_close(torch.cat(ys, 1), whole.y, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.cat(variances, 1), whole.variance, rtol=1e-5, atol=1e-6)
    assert_same_state(state, whole.state, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_init_state_is_the_default(options):
    layer, x = make(**options), tokens(2, 5)
    torch.testing.assert_close(layer.mix(x, layer.init_state(2)).y, layer.mix(x).y)


def test_is_the_filter_between_two_projections():
    layer, x = make(), tokens(2, 7)
    found = layer.read(x, return_variance=True)
    a, p, dt = layer.prior._continuous()
    y, y_var, _ = kla_scan_ref(*found.evidence[:4], *discretise(a, p, dt), return_variance=True)
    torch.testing.assert_close(found.mean, y)
    torch.testing.assert_close(found.variance, y_var)
    stream, gate = found.context
    y = (y + layer.skip.weight * stream) * torch.nn.functional.silu(gate)
    out = y @ layer.out_proj.weight.T
    torch.testing.assert_close(layer.mix(x).y, out)
    torch.testing.assert_close(found.evidence.k.norm(dim=-1), torch.ones(2, 7))


@settings(max_examples=20, deadline=None)
@given(
    left=st.integers(0, 3), right=st.integers(0, 3), length=st.integers(0, 5), cold=st.booleans()
)
def test_padding_on_either_side_changes_nothing(left, right, length, cold):
    layer = make(prior="learned")
    x = tokens(2, length)
    state = None if cold else layer.mix(tokens(2, 3, seed=5)).state
    alone = layer.mix(x, state, return_variance=True)
    padded = torch.nn.functional.pad(x, (0, 0, left, right), value=torch.nan)
    mask = torch.zeros(2, left + length + right, dtype=torch.bool)
    mask[:, left : left + length] = True
    found = layer.mix(padded, state, mask, return_variance=True)
    real = slice(left, left + length)
    torch.testing.assert_close(found.y[:, real], alone.y, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.variance[:, real], alone.variance, rtol=1e-5, atol=1e-6)
    assert_same_state(found.state, alone.state, rtol=1e-5, atol=1e-6)
    assert bool((found.y[~mask] == 0).all())


def test_padding_gets_no_gradient():
    layer = make()
    x = tokens(2, 6).requires_grad_()
    mask = torch.tensor([[False, False, True, True, True, True], [True] * 4 + [False] * 2])
    found = layer.mix(x, mask=mask, return_variance=True)
    (found.y.square().sum() + found.variance.sum()).backward()
    assert bool((x.grad[~mask] == 0).all())
    assert bool((x.grad[mask] != 0).any())


def test_step_with_mask():
    layer, x = make(), tokens(3, 5)
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [1, 0, 0, 1, 0]]).bool()
    whole = layer.mix(x, mask=mask)
    state = layer.init_state(3)
    for t in range(5):
        y, _, state = layer.step(x[:, t], state, mask=mask[:, t])
        torch.testing.assert_close(y, whole.y[:, t], rtol=1e-5, atol=1e-6)
    assert_same_state(state, whole.state, rtol=1e-5, atol=1e-6)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_packed_equals_separate_with_gradients(lengths):
    layer = make(prior="learned")
    x = tokens(1, sum(lengths))
    borders = torch.tensor([0, *lengths]).cumsum(0)
    weight = tokens(1, sum(lengths), seed=3)

    def gradients(loss):
        layer.zero_grad()
        loss.backward()
        return [p.grad.clone() for p in layer.parameters()]

    packed = layer.mix(x, cu_seqlens=borders)
    alone = [layer.mix(document) for document in x.split(lengths, 1)]
    y = torch.cat([found.y for found in alone], 1)
    torch.testing.assert_close(packed.y, y, rtol=1e-5, atol=1e-6)
    means = torch.cat([found.state.belief.mean for found in alone])
    torch.testing.assert_close(packed.state.belief.mean, means, rtol=1e-5, atol=1e-6)
    extra = (packed.state.belief.mean.sum(), means.sum())
    pair = zip(
        gradients((packed.y * weight).sum() + extra[0]),
        gradients((y * weight).sum() + extra[1]),
        strict=True,
    )
    for found, expected in pair:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_batch_equals_singles():
    layer, x = make(), tokens(3, 6)
    for i, row in enumerate(x.split(1)):
        torch.testing.assert_close(
            layer.mix(x).y[i : i + 1], layer.mix(row).y, rtol=1e-5, atol=1e-6
        )


def test_every_parameter_learns():
    for options in VARIANTS.values():
        layer = make(**options)
        found = layer.mix(tokens(2, 9), return_variance=True)
        (found.y.square().sum() + found.variance.sum()).backward()
        for name, parameter in layer.named_parameters():
            if parameter.requires_grad:
                assert parameter.grad is not None, name
                assert bool((parameter.grad != 0).any()), name
    assert make(process_noise="fixed").prior.raw_p.requires_grad is False


def test_the_variance_shrinks_with_evidence():
    layer = make(diffusion=0.01)
    x = tokens(1, 40)
    belief = layer.mix(x).state.belief
    assert bool((belief.variance < 1.0).all())
    assert layer.mix(x).variance is None


def test_dynamics_stay_float32():
    layer = make(prior="learned")
    before = {name: p.clone() for name, p in layer.prior.named_parameters()}
    for convert in (
        lambda m: m.bfloat16(),
        lambda m: m.half(),
        lambda m: m.to(torch.bfloat16),
        lambda m: m.to("cpu", torch.float16),
    ):
        short = convert(copy.deepcopy(layer))
        for name, parameter in short.prior.named_parameters():
            assert parameter.dtype == torch.float32
            torch.testing.assert_close(parameter.data, before[name], rtol=0.0, atol=0.0)
        assert short.in_proj.weight.dtype.itemsize == 2
    double = copy.deepcopy(layer).double()
    assert double.prior.log_a.dtype == torch.float64
    assert double.float().prior.log_a.dtype == torch.float32


def assert_rounded(found, exact):
    """Six roundings to bfloat16 lie on the way from x to y: the products, u, the read-out, y."""
    roundings = 6 * torch.finfo(torch.bfloat16).eps / 2
    assert (found.float() - exact).abs().max() <= roundings * exact.abs().max()


def test_short_weights_give_nearly_the_same():
    layer, x = make(), tokens(2, 20)
    short = copy.deepcopy(layer).bfloat16()
    found = short.mix(x.bfloat16(), return_variance=True)
    assert found.y.dtype == torch.bfloat16
    assert found.state.belief.mean.dtype == torch.float32
    assert_rounded(found.y, layer(x))
    y, _, state = short.step(x[:, 0].bfloat16(), found.state)
    assert y.dtype == torch.bfloat16
    assert state.belief.variance.dtype == torch.float32


def test_autocast():
    layer, x = make(), tokens(2, 20).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        found = layer.mix(x)
    assert found.state.belief.mean.dtype == torch.float32
    assert_rounded(found.y, layer(x))
    found.y.float().sum().backward()
    assert bool(x.grad.isfinite().all())


def test_float64():
    layer, x = make().double(), tokens(2, 6).double()
    assert layer.mix(x).state.belief.mean.dtype == torch.float64
    torch.testing.assert_close(layer.mix(x).y, layer.mix(x, layer.init_state(2)).y)


def test_state_dict_round_trip():
    layer = make().bfloat16()
    other = make(seed=9).bfloat16()
    other.load_state_dict(layer.state_dict())
    assert other.prior.log_a.dtype == torch.float32
    x = tokens(1, 5).bfloat16()
    torch.testing.assert_close(other(x), layer(x), rtol=0.0, atol=0.0)


def test_cached_dynamics_follow_the_parameters():
    layer = make()
    x, state = tokens(2, 1)[:, 0], make().init_state(2)
    with torch.no_grad():
        first = layer.step(x, state).state.belief.variance
        assert layer.prior.cached() is layer.prior.cached()
        layer.prior.raw_dt.add_(1.0)
        moved = layer.step(x, state).state.belief.variance
        assert not torch.equal(first, moved)
        layer.load_state_dict(make().state_dict())
        torch.testing.assert_close(layer.step(x, state).state.belief.variance, first)
    state = KLAState(*state.belief)
    assert layer.prior.cached().a_bar.requires_grad, "with gradients nothing may be remembered"


def test_a_global_init_does_not_reach_the_dynamics():
    layer = make()
    kept = {
        name: p.clone()
        for name, p in layer.named_parameters()
        if name.startswith(("prior.", "conv.")) or name == "skip.weight"
    }

    def wipe(module):
        if isinstance(
            module, (torch.nn.Linear, torch.nn.Embedding, torch.nn.Conv1d, torch.nn.LayerNorm)
        ):
            for parameter in module.parameters():
                torch.nn.init.normal_(parameter, std=5.0)

    layer.apply(wipe)
    assert layer.in_proj.weight.std() > 1.0
    assert len(kept) == 6
    for name, value in kept.items():
        assert torch.equal(layer.get_parameter(name), value), name


def test_start_of_the_dynamics():
    prior = make(d_state=16, d_inner=256, decay_rate=(1.0, 16.0)).prior
    a, p, dt = prior._continuous()
    torch.testing.assert_close(a[:, 0], torch.arange(1.0, 17.0))
    torch.testing.assert_close(p, torch.full_like(p, 2.0**0.5))
    assert 0.99e-3 < dt.min() < 1.2e-3
    assert 0.008 < dt.max() < 0.01001
    # Without a step size the decays and the noise begin where the others do.
    plain = make(d_state=16, d_inner=256, discretisation="none").prior()
    exact = make(d_state=16, d_inner=256, discretisation="zoh").prior()
    torch.testing.assert_close(plain.a_bar, exact.a_bar)
    torch.testing.assert_close(plain.p_bar, exact.p_bar)


def test_start_of_precision_and_gate():
    options = {"evidence_bias": True, "initial_precision": 0.02, "gate_bias": 2.0}
    for link in ("inverse_softplus", "softplus", "exp"):
        for rank in (None, 3):
            layer = make(precision_link=link, precision_rank=rank, **options)
            none = layer.evidence(torch.zeros(1, 1, D_MODEL)).lam_v
            if rank is None:
                torch.testing.assert_close(none, torch.full_like(none, 0.02))
            else:  # the bias of the narrow projection moves it a little
                assert 0.005 < none.mean() < 0.08
    assert bool((layer.gate_bias.weight == 2.0).all())


def test_a_learned_prior_starts_where_it_is_told():
    prior = KLA(d_model=64, d_state=8, shared_slots=4, prior="learned", initial_mean=1.0).prior
    mean, variance = prior(3).belief
    assert mean.shape == (3, 8, 64)
    assert variance.shape == (3, 2, 64)
    assert 0.8 < mean[0].std() < 1.2
    assert bool((variance == 1.0).all())
    assert bool((KLA(d_model=8, prior="learned").prior(1).belief.mean == 0.0).all())


def test_steps_that_tokens_choose_start_log_uniform():
    layer = KLA(d_model=256, d_state=4, step_rank=4, dt_max=0.1, decay_rate=(1.0, 4.0))
    dt = layer.evidence(torch.zeros(1, 1, 256)).dt * layer.prior.unit
    assert 0.99e-3 < dt.min() < 1.5e-3
    assert 0.07 < dt.max() < 0.1001
    # A step of one unit at rate a decays by exp(-a unit), the fastest slot by e.
    a_bar = layer.prior().a_bar[:, 0]
    torch.testing.assert_close(a_bar, torch.exp(-torch.arange(1.0, 5.0) / 4.0))


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_time_stamps(options):
    layer, x = make(**options), tokens(2, 7)
    plain = layer.mix(x, return_variance=True)
    ones = layer.mix(x, dt=torch.ones(2, 7), return_variance=True)
    torch.testing.assert_close(ones.y, plain.y, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ones.variance, plain.variance, rtol=1e-5, atol=1e-6)
    dt = torch.rand(2, 7, generator=torch.Generator().manual_seed(2)) * 100.0
    whole = layer.mix(x, dt=dt, return_variance=True)
    torch.testing.assert_close(layer(x, dt=dt), whole.y)
    assert not torch.allclose(whole.variance, plain.variance, rtol=1e-3)
    _, _, state = layer.mix(x[:, :4], dt=dt[:, :4])
    for t in range(4, 7):
        y, variance, state = layer.step(x[:, t], state, dt=dt[:, t], return_variance=True)
        torch.testing.assert_close(y, whole.y[:, t], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(variance, whole.variance[:, t], rtol=1e-5, atol=1e-6)
    assert_same_state(state, whole.state, rtol=1e-5, atol=1e-6)


def test_the_norm_comes_before_skip_and_gate():
    layer, x = make(readout_norm=True), tokens(2, 7)
    found = layer.read(x)
    stream, gate = found.context
    y = found.mean / (found.mean.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    y = (y + layer.skip.weight * stream) * torch.nn.functional.silu(gate)
    torch.testing.assert_close(layer(x), y @ layer.out_proj.weight.T)


def test_the_stationary_prior_is_left_unchanged_by_predict():
    for discretisation in ("ou", "zoh", "none"):
        prior = make(prior="stationary", discretisation=discretisation).prior
        a_bar, p_bar, belief = prior(1)
        variance = belief.variance[0]
        torch.testing.assert_close(a_bar**2 * variance + p_bar, variance)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"value": "other"}, "must be one of 'stream', 'project'"),
        ({"d_state": 0}, "at least 1"),
        ({"dt_min": 0.0}, "dt_min"),
        ({"diffusion": 0.0}, "process_noise='zero'"),
        (
            {"prior": "stationary", "process_noise": "zero"},
            "no evidence can move|evidence can move",
        ),
        ({"shared_slots": 3}, "must divide d_state"),
        ({"conv_kernel": 0}, "at least 1"),
        ({"initial_precision": 0.1}, "evidence_bias=True"),
        ({"initial_precision": 1e6, "evidence_bias": True}, "between 0 and 10000"),
        ({"initial_mean": 1.0}, "prior='learned'"),
        ({"step_rank": 4, "discretisation": "none"}, "step size"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        KLAConfig(d_model=8, **options)


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        KLAConfig(d_model=8).d_state = 3


def test_samples():
    layer, x = make(), tokens(1, 4)
    found = layer.read(x, return_variance=True)
    generator = torch.Generator().manual_seed(0)
    draws = found.sample(2000, generator)
    torch.testing.assert_close(draws.mean(0), found.mean, rtol=0.0, atol=0.1)
    torch.testing.assert_close(draws.var(0), found.variance, rtol=0.2, atol=1e-3)
    certain = found._replace(variance=torch.zeros_like(found.variance))
    assert torch.equal(certain.sample(), found.mean.unsqueeze(0))
    with pytest.raises(ValueError, match="return_variance=True"):
        layer.read(x).sample()


def test_variance_of_the_output_is_that_of_a_linear_map():
    torch.manual_seed(0)
    layer, x = (
        KLA(d_model=6, d_state=3, d_inner=12, skip=0.5).double(),
        torch.randn(2, 5, 6).double(),
    )
    found = layer.read(x, return_variance=True)
    # The output as a function of the read-out, differentiated: a matrix per token.
    matrix = torch.func.vmap(torch.func.vmap(torch.func.jacrev(layer.write)))(
        found.mean, *found.context
    )
    expected = torch.einsum("btid,btd->bti", matrix.square(), found.variance)
    y, variance, _ = layer.mix(x, return_variance="output")
    torch.testing.assert_close(variance, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(y, layer(x))
    state = layer.mix(x[:, :4]).state
    last = layer.step(x[:, 4], state, return_variance="output").variance
    torch.testing.assert_close(last, expected[:, 4], rtol=1e-8, atol=1e-10)
    with pytest.raises(ValueError, match="readout_norm"):
        KLA(d_model=6, readout_norm=True).mix(x.float(), return_variance="output")


def test_tokens_that_only_ask_bring_no_evidence():
    layer, x = make(conv_kernel=None).double(), tokens(2, 6).double()
    dt, seen = torch.rand(2, 6, dtype=torch.float64), torch.tensor([[1, 1, 0, 1, 0, 1]] * 2).bool()
    found = layer.mix(x, dt=dt, seen=seen, return_variance=True)
    # The same as leaving them out, with the time that passes before the next one added to its own.
    kept = [0, 1, 3, 5]
    gaps = torch.stack([dt[:, 0], dt[:, 1], dt[:, 2:4].sum(1), dt[:, 4:].sum(1)], 1)
    expected = layer.mix(x[:, kept], dt=gaps, return_variance=True)
    torch.testing.assert_close(found.y[:, kept], expected.y)
    torch.testing.assert_close(found.variance[:, kept], expected.variance)
    assert_same_state(found.state, expected.state)
    state = layer.init_state(2)
    for t in range(6):
        one = layer.step(x[:, t], state, dt=dt[:, t], seen=seen[:, t])
        torch.testing.assert_close(one.y, found.y[:, t])
        state = one.state
    with pytest.raises(ValueError, match="must be bool"):
        layer(x, seen=seen.long())


@pytest.mark.parametrize("options", [{}, {"shared_slots": 2, "frequencies": (0.3, 2.0)}])
def test_smoothing_reads_the_belief_given_all_tokens(options):
    layer = make(conv_kernel=None, prior="learned", **options).double()
    hindsight = make(conv_kernel=None, prior="learned", smooth=True, **options).double()
    hindsight.load_state_dict(layer.state_dict())
    x, dt = tokens(2, 5).double(), torch.rand(2, 5, dtype=torch.float64)
    found = hindsight.mix(x, dt=dt, return_variance=True)
    filtered = layer.mix(x, dt=dt, return_variance=True)
    torch.testing.assert_close(found.y[:, -1], filtered.y[:, -1])
    assert (found.variance < filtered.variance + 1e-12).all()
    assert not torch.allclose(found.y[:, 0], filtered.y[:, 0])
    with pytest.raises(ValueError, match="whole sequences"):
        hindsight.mix(x, hindsight.init_state(2))
    with pytest.raises(ValueError, match="whole sequences"):
        hindsight.step(x[:, 0], hindsight.init_state(2))


def test_no_language_model_smooths():
    from kalman_attention import LanguageModelConfig

    smooth = KLAConfig(d_model=8, smooth=True)
    with pytest.raises(ValueError, match="would let it read"):
        LanguageModelConfig(vocab_size=9, d_model=8, plan="kla", kla=smooth)
