"""Series models: what is not observed is not read, and time is only time."""

import json

import pytest
import torch

from kalman_attention.models.series import SeriesModel
from kalman_attention.models.series_config import SeriesConfig
from kalman_attention.models.series_inputs import _hats, _summaries

CHANNELS, LENGTH = 3, 9


def make(seed: int = 0, **options: object) -> SeriesModel:
    torch.manual_seed(seed)
    given = {"channels": CHANNELS, "outputs": 2, "d_model": 8, "kla": {"d_state": 4}, **options}
    model = SeriesModel(SeriesConfig(**given))  # type: ignore[arg-type]
    for name, parameter in model.named_parameters():
        if "mean_0" in name or "summaries" in name:  # zero at first
            torch.nn.init.normal_(parameter)
    return model.double().eval()


def series(seed: int = 1, rows: int = 2):
    g = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, LENGTH, CHANNELS, generator=g, dtype=torch.float64)
    observed = torch.rand(rows, LENGTH, CHANNELS, generator=g) < 0.5
    observed[:, 0] = True
    gaps = torch.rand(rows, LENGTH, generator=g, dtype=torch.float64) * 3
    return values, observed, gaps.cumsum(1)


def with_empty(given, place: int, share: float = 0.5):
    """The same series with an instant at which nothing is seen, between two others."""
    values, observed, times = given
    time = times[:, place - 1] + share * (times[:, place] - times[:, place - 1])
    parts = ((values, torch.full_like(values[:, 0], 7.0)), (observed, observed[:, 0] & False))
    parts += ((times, time),)
    return tuple(torch.cat([x[:, :place], new.unsqueeze(1), x[:, place:]], 1) for x, new in parts)


VARIANTS = {
    "filter": {},
    "smoother": {"kla": {"d_state": 4, "smooth": True}},
    "decays": {"kla": {"d_state": 4, "frequencies": None, "shared_slots": 1}},
    "told gaps": {"tell_gaps": True, "tell_variance": False},
    "channel filters": {"channel_memories": 2},
    "channel smoothers": {"channel_memories": 2, "kla": {"d_state": 4, "smooth": True}},
    "classes": {"head": "classes", "channel_memories": 1},
    "summaries": {"head": "classes", "channel_memories": 1, "summary_knots": 3},
}
CLASSES = ("classes", "summaries")


@pytest.mark.parametrize("options", [*VARIANTS.values(), {"mixer": "gru"}, {"use_time": False}])
def test_what_was_not_observed_is_not_read(options):
    model, (values, observed, times) = make(**options), series()
    expected = model(values, observed, times).mean
    for other in (values + 5.0, values * torch.nan):
        found = model(values.where(observed, other), observed, times).mean
        assert torch.equal(found, expected)
    assert not torch.equal(model(values + 1.0, observed, times).mean, expected)


@pytest.mark.parametrize("options", [VARIANTS[name] for name in VARIANTS if name not in CLASSES])
def test_an_instant_without_observations_changes_nothing(options):
    model, given = make(**options), series()
    expected, place = model(*given), 4
    found = model(*with_empty(given, place))
    kept = [t for t in range(LENGTH + 1) if t != place]
    torch.testing.assert_close(found.mean[:, kept], expected.mean, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.variance[:, kept], expected.variance, rtol=1e-10, atol=1e-10)
    # It is asked at another time, so it is told something else.
    other = model(*with_empty(given, place, share=0.9)).mean
    assert not torch.allclose(found.mean[:, place], other[:, place])


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_only_differences_of_times_matter(options):
    model, (values, observed, times) = make(**options), series()
    expected = model(values, observed, times).mean
    shifted = model(values, observed, times + 1000.0).mean
    torch.testing.assert_close(shifted, expected, rtol=1e-8, atol=1e-8)
    assert not torch.allclose(model(values, observed, times * 2.0).mean, expected)


def test_the_control_does_not_look_at_the_clock():
    model, (values, observed, times) = make(use_time=False), series()
    expected = model(values, observed, times).mean
    assert torch.equal(model(values, observed, times * 2.0).mean, expected)


@pytest.mark.parametrize("options", [*VARIANTS.values(), {"mixer": "gru"}, {"use_time": False}])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(options, side):
    model, given = make(**options), series()
    expected, extra = model(*given), 3
    pad = (extra, 0) if side == "left" else (0, extra)

    def padded(x, value):
        axes = (0, 0) * (x.dim() - 2)
        return torch.nn.functional.pad(x, (*axes, *pad), value=value)

    mask = padded(torch.ones_like(given[2], dtype=torch.bool), False)
    values, observed, times = (padded(x, v) for x, v in zip(given, (9.0, True, -5.0), strict=True))
    found = model(values, observed, times, mask)
    if expected.variance is None:
        torch.testing.assert_close(found.mean, expected.mean, rtol=1e-10, atol=1e-10)
    else:
        real = found.mean[mask].view_as(expected.mean)
        torch.testing.assert_close(real, expected.mean, rtol=1e-10, atol=1e-10)


def test_a_filter_does_not_know_the_future_and_a_smoother_does():
    values, observed, times = series()
    changed = values.clone()
    changed[:, 6:] += 1.0
    for smooth in (False, True):
        model = make(kla={"d_state": 4, "smooth": smooth})
        first, second = (model(v, observed, times).mean[:, :6] for v in (values, changed))
        assert torch.equal(first, second) is not smooth


def test_the_variance_grows_while_nothing_is_seen():
    seen = torch.arange(LENGTH).unsqueeze(0) < 4
    layer = make(kla={"d_state": 4, "prior": "stationary"}).blocks[0].mixer
    x = torch.randn(1, LENGTH, 8, dtype=torch.float64).where(seen.unsqueeze(-1), 0.5)
    dt = torch.full((1, LENGTH), 2.0, dtype=torch.float64)
    variance = layer.mix(x, dt=dt, seen=seen, return_variance=True).variance
    # Queries are those of equal tokens, so only the belief differs between these instants.
    assert (variance[:, 5:] > variance[:, 4:-1]).all()


def test_summaries_by_hand():
    values = torch.tensor([[[2.0, torch.nan], [4.0, 0.0], [9.0, 0.0]]])
    observed = torch.tensor([[[True, False], [True, False], [False, False]]])
    count, found = _summaries(values, observed)
    assert count.tolist() == [[2.0, 0.0]]
    assert found[0, :, 0].tolist() == [3.0, 4.0, 2.0, 3.0 * 1.0 - 2.0]  # mean, high, low, spread


def test_hats_interpolate_between_knots():
    x = torch.linspace(-3.0, 3.0, 61, dtype=torch.float64)
    weights = _hats(x, 5)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(x))
    knots = torch.linspace(-2.0, 2.0, 5, dtype=torch.float64)
    torch.testing.assert_close(weights @ knots, x.clamp(-2.0, 2.0))
    assert ((weights > 0).sum(-1) <= 2).all()


def test_summaries_are_a_second_path():
    model, given = make(**VARIANTS["summaries"]), series()
    found = model(*given)
    torch.testing.assert_close(found.mean, found.paths.mean(0))
    with torch.no_grad():
        model.head.weight.zero_()
    other = model(*given)
    assert not torch.allclose(other.paths[0], found.paths[0])
    assert torch.equal(other.paths[1], found.paths[1])
    assert make(head="classes")(*given).paths is None


def test_a_channel_that_was_never_observed_only_says_so():
    model, (values, observed, times) = make(**VARIANTS["summaries"]), series()
    weight = model.summaries.head.weight.view(2, -1, CHANNELS, 3)
    none = observed.clone()
    none[..., 1] = False
    expected = model(values, none, times).paths[1]
    with torch.no_grad():
        weight[:, :4, 1] += 1.0  # mean, extremes and spread
    assert torch.equal(model(values, none, times).paths[1], expected)
    assert not torch.equal(model(values, observed, times).paths[1], expected)
    with torch.no_grad():
        weight[:, 4, 1] += 1.0  # number
    assert not torch.equal(model(values, none, times).paths[1], expected)


def test_images_are_observed_as_a_whole():
    model = make(channels=16, images=True).float()
    images = torch.randint(0, 256, (2, 4, 16, 16), dtype=torch.uint8)
    observed = torch.tensor([[True, False, True, True]] * 2)
    times = torch.arange(4.0).expand(2, 4)
    expected = model(images, observed, times).mean
    other = images.clone()
    other[:, 1] = 0
    assert torch.equal(model(other, observed, times).mean, expected)
    bright = model(images.float() / 255.0, observed, times).mean
    torch.testing.assert_close(bright, expected)
    assert not torch.equal(model(images, None, times).mean, expected)


@pytest.mark.parametrize("options", [*VARIANTS.values(), {"mixer": "gru"}])
def test_every_parameter_learns(options):
    model, given = make(**options).train(), series()
    found = model(*given)
    # Different weights per output: a sum over normed channels alone has no gradient.
    weights = torch.arange(1.0, found.mean.numel() + 1).view_as(found.mean)
    loss = (found.mean * weights).sum()
    if found.variance is not None:
        loss = loss + (found.variance * weights.flip(0)).sum()
    loss.backward()
    still = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert not still


def test_options_survive_json_and_weights_a_disk(tmp_path):
    from kalman_attention.models.storage import load_series_model, save_model

    model = make(kla={"d_state": 4, "frequencies": (0.1, 1.0)}).float()
    config = json.loads(json.dumps(model.config.to_dict()))
    assert SeriesConfig.from_dict(config).layer == model.config.layer
    save_model(model, tmp_path)
    assert {p.name for p in tmp_path.iterdir()} >= {"config.json", "model.safetensors"}
    values, observed, times = series()
    given = (values.float(), observed, times.float())
    assert torch.equal(load_series_model(tmp_path)(*given).mean, model(*given).mean)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"channels": 0}, "channels must be at least 1"),
        ({"head": "mean"}, "head must be"),
        ({"dropout": 1.0}, "dropout in"),
        ({"images": True, "channels": 12}, "multiple of 8"),
        ({"summary_knots": 3}, "summary_knots must be 0, or at least 2 for classes"),
        ({"summary_knots": 1, "head": "classes"}, "summary_knots must be 0, or at least 2"),
        ({"kla": {"d_state": 5}}, "shared_slots must divide"),
        ({"kla": {"slots": 5}}, "slots"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_bad_input_is_refused():
    model, (values, observed, times) = make(), series()
    with pytest.raises(ValueError, match=r"values \[B, T, 3\]"):
        model(values[..., :2], observed, times)
    with pytest.raises(ValueError, match="observed is"):
        model(values, observed.double(), times)
