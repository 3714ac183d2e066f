"""Gradients, starts and standard errors of the fit."""

import math

import numpy as np
import pytest
import torch

from kalman_attention.series import NILE, StateSpace, fitting
from kalman_attention.series.data import read_panel
from kalman_attention.series.fitting import Standard
from tests.series.oracle import Oracle

MODELS = ["level", "ou", "ar", "trend", "cycle", "level + ou", "trend + cycle"]
YEARS = np.arange(30.0)
SHORT = np.where(np.arange(30) % 7 == 3, math.nan, np.array(NILE[:30], float))


def objective(formula, y=SHORT, times=None):
    model = StateSpace(formula)
    panel = read_panel(y, times)
    standard = Standard.of(model.structure, panel)
    return fitting.Objective(model.structure, standard.values(panel), standard.scales)


@pytest.mark.parametrize("formula", MODELS)
def test_gradients(formula):
    height = objective(formula)
    x = height.starts(2).requires_grad_()
    assert torch.autograd.gradcheck(height, x, atol=1e-6)


def natural_hessian(names, params, y, step=1e-3):
    """Second derivative of the oracle's log-likelihood in the parameters themselves."""
    t, keys = np.arange(len(y), dtype=float), list(params)

    def value(moves):
        moved = {k: v * (1 + moves.get(k, 0.0)) for k, v in params.items()}
        return Oracle(names, moved, t, y).log_likelihood()

    found = np.empty((len(keys), len(keys)))
    for i, a in enumerate(keys):
        for j, b in enumerate(keys):
            signs = [(s, r, s * r) for s in (1, -1) for r in (1, -1)]
            if i == j:
                two = value({a: step}) + value({a: -step}) - 2 * value({})
                found[i, j] = two / (step * params[a]) ** 2
            else:
                four = sum(sign * value({a: s * step, b: r * step}) for s, r, sign in signs)
                found[i, j] = four / (4 * step * params[a] * step * params[b])
    return -found


@pytest.mark.parametrize("names", [["level"], ["ou"]], ids="+".join)
def test_standard_errors_are_the_curvature_of_the_dense_likelihood(names):
    y = np.array(NILE, float)
    y[10:20] = math.nan
    found = StateSpace(" + ".join(names)).fit(y)
    expected = np.linalg.inv(natural_hessian(names, found.params, y))
    assert found.cov_params == pytest.approx(
        expected, rel=1e-3, abs=1e-3 * abs(expected).max() ** 0.5
    )
    assert [*found.bse.values()] == pytest.approx(np.sqrt(np.diag(expected)), rel=1e-3)


def test_nothing_nearby_is_more_likely():
    found = StateSpace("ou").fit(NILE)
    for name, value in found.params.items():
        for factor in (0.97, 1.03):
            moved = {**found.params, name: value * factor}
            assert found.llf > found.model.log_likelihood(NILE, moved)


def test_a_variance_of_zero_has_no_standard_error():
    # Values that alternate have no level that wanders; their noise still has an error.
    y = np.where(np.arange(100) % 2, 1.0, -1.0) + np.random.default_rng(3).normal(0, 0.5, 100)
    found = StateSpace("level").fit(y)
    assert found.params["sigma2.level"] < 1e-6
    assert math.isnan(found.bse["sigma2.level"])
    assert found.bse["sigma2.irregular"] == pytest.approx(
        found.params["sigma2.irregular"] * math.sqrt(2 / 99), rel=1e-4
    )
    assert "does not determine" in found.summary()


@pytest.mark.parametrize("factor", [1e-9, 1e9])
def test_units_do_not_matter(factor):
    values, times = np.array(NILE, float), np.arange(100.0)
    base = StateSpace("ou").fit(values, times)
    for y, t, size, length in (
        (values * factor, times, factor, 1.0),
        (values, times * factor, 1.0, factor),
    ):
        found = StateSpace("ou").fit(y, t)
        expected = {
            "sigma2.irregular": base.params["sigma2.irregular"] * size**2,
            "rate.ou": base.params["rate.ou"] / length,
            "sigma2.ou": base.params["sigma2.ou"] * size**2 / length,
            "intercept": base.params["intercept"] * size,
        }
        assert found.params == pytest.approx(expected, rel=1e-5)
        assert found.llf == pytest.approx(base.llf - 100 * math.log(size), abs=1e-6)


def test_a_model_with_two_maxima_takes_the_higher_one():
    found = StateSpace("level + ou").fit(NILE)
    assert len(found.climbs) == 4
    assert max(found.climbs) == 0.0
    assert min(found.climbs) < -1.0
    assert found.llf > StateSpace("level").fit(NILE).llf + 2.0


def test_series_share_parameters():
    model = StateSpace("level")
    params = {"sigma2.irregular": 1.0, "sigma2.level": 0.3}
    rows = [*model.simulate(params, 40, num_samples=6, seed=0)]
    rows[0], rows[3] = rows[0][:25], rows[3] + 100.0  # own lengths, own levels
    found = model.fit(rows)
    each = [model.log_likelihood(row, found.params) for row in rows]
    assert found.llf == pytest.approx(sum(each), abs=1e-9)
    assert len(found) == 6
    assert found.df_model == 2 + 6
    alone = found[3]
    assert alone.llf == pytest.approx(each[3])
    assert alone.params == found.params
    assert found[0].smooth().mean == pytest.approx(
        model.apply(rows[0], found.params).smooth().mean, abs=1e-9
    )
