"""Draws, bands and pictures."""

import math

import numpy as np
import pytest

from kalman_attention.series import NILE, NILE_YEARS, Estimate, StateSpace
from tests.series.oracle import Oracle

PARAMS = {"sigma2.irregular": 0.5, "sigma2.level": 0.2, "rate.ou": 0.5, "sigma2.ou": 1.0}
TIMES = np.array([0.0, 1.0, 1.5, 4.0, 4.0, 9.0])
OU = {"sigma2.irregular": 0.5, "rate.ou": 0.5, "sigma2.ou": 1.0}
VALUES = np.array([5.0, 6.0, math.nan, 4.0, 4.5, math.nan])


def test_draws_have_the_moments_of_the_belief():
    model = StateSpace("level + ou")
    found = model.apply(VALUES, PARAMS, TIMES)
    at = np.array([2.0, 3.0, 12.0])
    draws = found.sample(20_000, at, seed=1)
    belief = found.predict(at)
    error = belief.std / math.sqrt(20_000)
    assert (abs(draws.mean(0) - belief.mean) < 4 * error).all()
    assert draws.std(0) == pytest.approx(belief.std, rel=0.02)
    truth = Oracle(["level", "ou"], PARAMS, TIMES, VALUES).condition(at).covariance
    assert np.cov(draws.T) == pytest.approx(truth + 0.5 * np.eye(3), rel=0.05, abs=0.02)
    assert (found.sample(3, seed=5) == found.sample(3, seed=5)).all()
    assert (found.sample(3, seed=5) != found.sample(3, seed=6)).all()


def test_draws_of_one_latent_and_of_matrices_agree():
    one = StateSpace("ou").apply(VALUES, {**OU, "intercept": 4.0}, TIMES)
    still = {"sigma2.level": 0.0}
    two = StateSpace("level + ou").apply(VALUES, {**OU, **still}, TIMES)
    for found in (one, two):
        draws = found.sample(20_000, seed=2)
        belief = found.predict()
        assert (abs(draws.mean(0) - belief.mean) < 4 * belief.std / math.sqrt(20_000)).all()
        assert draws.std(0) == pytest.approx(belief.std, rel=0.03)


def test_simulated_series_have_the_covariance_of_the_model():
    params = {**OU, "intercept": 3.0}
    draws = StateSpace("ou").simulate(params, [0.0, 1.0, 3.0], num_samples=20_000, seed=0)
    truth = Oracle(["ou"], params, np.array([0.0, 1.0, 3.0]), np.zeros(3))
    assert np.cov(draws.T) == pytest.approx(truth.K, abs=0.04)
    assert draws.mean(0) == pytest.approx(np.full(3, 3.0), abs=0.03)


def test_bands_contain_what_they_promise():
    model, params = StateSpace("level"), {"sigma2.irregular": 1.0, "sigma2.level": 0.1}
    (y,) = model.simulate(params, 4_000, seed=0)
    hidden = np.random.default_rng(0).random(4_000) < 0.3
    found = model.apply(np.where(hidden, math.nan, y), params).predict()
    for level in (0.5, 0.95):
        low, high = found.bounds(1 - level)
        inside = ((low < y) & (y < high))[hidden].mean()
        assert inside == pytest.approx(level, abs=3 * math.sqrt(level * (1 - level) / hidden.sum()))


def test_estimates():
    found = StateSpace("level").apply(
        NILE, {"sigma2.irregular": 15_099.0, "sigma2.level": 1_469.0}, NILE_YEARS
    )
    ahead = found.forecast(3)
    assert isinstance(ahead, Estimate)
    assert len(ahead) == 3
    assert [*ahead.times] == [1971.0, 1972.0, 1973.0]
    assert np.asarray(ahead) == pytest.approx(ahead.mean)
    low, high = ahead.bounds()
    assert high - low == pytest.approx(2 * 1.959963984540054 * ahead.se_mean)
    assert found.predict([1971.0, 1972.0, 1973.0]).mean == pytest.approx(ahead.mean)
    assert (found.smooth().variance <= found.filter().variance + 1e-9).all()
    text = found.summary()
    assert "level: 100 values" in text
    assert "15099" in text


def test_fit_then_other_data():
    found = StateSpace("level").fit(NILE[:60], NILE_YEARS[:60])
    direct = found.model.log_likelihood(NILE[60:], found.params, NILE_YEARS[60:])
    assert found.log_likelihood(NILE[60:], NILE_YEARS[60:]) == direct
    assert "std err" in found.summary()


def test_plot(tmp_path):
    pytest.importorskip("matplotlib").use("agg")
    import matplotlib.pyplot as plt

    found = StateSpace("level").apply(
        NILE, {"sigma2.irregular": 15_099.0, "sigma2.level": 1_469.0}, NILE_YEARS
    )
    figure = found.plot(horizon=10)
    (axes,) = figure.axes
    assert axes.get_xlim()[1] > 1979
    assert {"95 %", "given all values", "forecast", "seen"} <= set(
        axes.get_legend_handles_labels()[1]
    )
    figure.savefig(tmp_path / "nile.png")
    own = plt.figure()
    assert found.plot(axes=own.add_subplot()) is own
    plt.close("all")
