"""Likelihood, filter and smoother against dense conditioning of the joint Gaussian."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kalman_attention.series import AR1, OU, Cycle, Level, StateSpace, Trend
from tests.series.oracle import Oracle

PARAMS = {
    "sigma2.irregular": 0.3,
    "sigma2.level": 0.7,
    "sigma2.slope": 0.05,
    "sigma2.trend": 0.4,
    "rate.ou": 0.35,
    "sigma2.ou": 1.1,
    "period.cycle": 5.3,
    "rate.cycle": 0.12,
    "sigma2.cycle": 0.6,
    "ar.L1": -0.6,
    "sigma2.ar": 0.9,
    "intercept": 4.2,
}
KINDS = {"level": Level(), "trend": Trend(), "ou": OU(), "cycle": Cycle(), "ar": AR1()}
MODELS = [
    ["level"], ["ou"], ["ar"], ["trend"], ["cycle"], ["level", "ou"], ["trend", "cycle"],
    ["level", "cycle"], ["ou", "cycle"], ["level", "ou", "cycle"], ["level", "ar"],
]  # fmt: skip


def make(names):
    model = StateSpace([KINDS[name] for name in names])
    return model, {name: PARAMS[name] for name in model.param_names}


def series(names, gaps, missing, seed=0):
    """Times from gaps, and values that are partly missing; an AR process has whole steps."""
    t = np.cumsum(gaps)
    if "ar" in names:
        t = np.round(t)
    y = 4.0 + np.random.default_rng(seed).normal(size=len(t)).cumsum()
    return t, np.where(missing, np.nan, y)


def close(ours, truth):
    return pytest.approx(truth, rel=1e-8, abs=1e-8) == ours


def identified(names, t, y):
    times = np.unique(t[~np.isnan(y)])
    return len(times) >= (2 if "trend" in names else 1)


@st.composite
def patterns(draw):
    T = draw(st.integers(1, 9))
    lengths = st.sampled_from([0.0, 0.0, 0.01, 0.5, 1.0, 2.3, 40.0])
    gaps = draw(st.lists(lengths, min_size=T, max_size=T))
    missing = draw(st.lists(st.booleans(), min_size=T, max_size=T))
    return np.array(gaps), np.array(missing)


@pytest.mark.parametrize("names", MODELS, ids="+".join)
@settings(max_examples=10, deadline=None)
@given(pattern=patterns())
def test_any_gaps_and_any_missing_values(names, pattern):
    t, y = series(names, *pattern)
    if not identified(names, t, y):
        return
    model, params = make(names)
    found = model.apply(y, params, t)
    truth = Oracle(names, params, t - t[0], y)
    assert close(found.llf, truth.log_likelihood())
    smoothed, expected = found.smooth(), truth.condition(t - t[0])
    assert close(smoothed.mean, expected.mean)
    assert close(smoothed.variance, expected.variance)
    filtered = found.filter()
    for i in range(len(t)):
        if identified(names, t[: i + 1], y[: i + 1]):
            past = Oracle(names, params, (t - t[0])[: i + 1], y[: i + 1])
            expected = past.condition(t[i : i + 1] - t[0])
            assert close(filtered.mean[i], expected.mean[0])
            assert close(filtered.variance[i], expected.variance[0])
        elif not any(name in ("level", "trend") for name in names):
            assert np.isfinite(filtered.variance[i])
        else:
            assert math.isnan(filtered.mean[i])
            assert math.isinf(filtered.variance[i])


@pytest.mark.parametrize("names", MODELS, ids="+".join)
def test_other_times(names):
    t, y = series(names, [0, 1, 1, 2, 1, 0, 3, 1], [0, 0, 1, 0, 0, 0, 1, 0])
    model, params = make(names)
    found, truth = model.apply(y, params, t), Oracle(names, params, t - t[0], y)
    at = np.array([-3.0, 0.0, 1.0, 4.0, 4.0, 30.0])
    if "ar" not in names:
        at[1:3] += 0.4
    ours = found.predict(at + t[0])
    shifted = Oracle(names, params, t - t[0] + 3.0, y)  # diffuse starts do not care when they are
    expected = shifted.condition(at + 3.0)
    assert close(ours.mean, expected.mean)
    assert close(ours.variance, expected.variance + params["sigma2.irregular"])
    late = found.forecast(at[-1:] + t[0])
    expected = truth.condition(at[-1:])
    assert close(late.mean, expected.mean)
    assert close(late.variance, expected.variance + params["sigma2.irregular"])


@pytest.mark.parametrize("names", MODELS, ids="+".join)
def test_one_step_predictions(names):
    t, y = series(names, [0, 1, 1, 2, 1, 0, 3, 1], [0, 0, 1, 0, 0, 0, 1, 0])
    model, params = make(names)
    ours = model.apply(y, params, t).fittedvalues
    start = sum({"level": 1, "trend": 2}.get(name, 0) for name in names)
    assert np.isnan(ours[:start]).all()
    for i in range(max(start, 1), len(t)):
        past = Oracle(names, params, (t - t[0])[:i], y[:i])
        assert close(ours[i], past.condition(t[i : i + 1] - t[0]).mean[0])


@pytest.mark.parametrize("part", ["level", "ou", "cycle"])
def test_one_component_of_a_sum(part):
    names = ["level", "ou", "cycle"]
    t, y = series(names, [0, 1, 0.3, 2, 1, 0, 3, 1], [0, 0, 1, 0, 0, 0, 1, 0])
    model, params = make(names)
    ours = model.apply(y, params, t).smooth(part)
    expected = Oracle(names, params, t - t[0], y).condition(t - t[0], [part])
    assert close(ours.mean, expected.mean)
    assert close(ours.variance, expected.variance)


@pytest.mark.parametrize(("names", "offset"), [(["level"], 1e6), (["trend", "ou"], 1e6)])
def test_values_far_from_zero(names, offset):
    # A diffuse start takes up any constant: nothing may be lost to cancellation.
    t, y = series(names, np.ones(40), np.zeros(40, bool))
    model, params = make(names)
    near, far = model.apply(y, params, t), model.apply(y + offset, params, t)
    assert far.llf == pytest.approx(near.llf, abs=1e-6)
    assert far.smooth().mean - offset == pytest.approx(near.smooth().mean, abs=1e-6)


def test_thousands_of_values_stay_exact():
    # Two ways through 3,000 values: the op, and matrices with a cycle that has no variance.
    rng = np.random.default_rng(0)
    t = np.cumsum(rng.exponential(size=3_000))
    y = rng.normal(size=3_000).cumsum() * 0.1 + rng.normal(size=3_000)
    params = {"sigma2.irregular": 1.0, "sigma2.level": 0.01}
    one = StateSpace("level").apply(y, params, t)
    still = {"period.cycle": 7.0, "rate.cycle": 0.1, "sigma2.cycle": 0.0}
    two = StateSpace("level + cycle").apply(y, {**params, **still}, t)
    assert two.llf == pytest.approx(one.llf, rel=1e-11)
    assert two.smooth().mean == pytest.approx(one.smooth().mean, abs=1e-9)
    assert two.smooth().variance == pytest.approx(one.smooth().variance, rel=1e-9)
