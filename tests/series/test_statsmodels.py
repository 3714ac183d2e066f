"""A second opinion: the textbook values of the Nile, and statsmodels on models that both have."""

import math

import numpy as np
import pytest

from kalman_attention.series import AR1, NILE, NILE_YEARS, Cycle, StateSpace, Trend

tsa = pytest.importorskip("statsmodels.tsa.api")

RNG = np.random.default_rng(0)
HOLES = np.where(RNG.random(100) < 0.2, math.nan, np.array(NILE, float))


@pytest.fixture(scope="module")
def nile():
    return StateSpace("level").fit(NILE, NILE_YEARS)


def unobserved(y, **options):
    return tsa.UnobservedComponents(np.asarray(y, float), use_exact_diffuse=True, **options)


def test_the_nile_gives_the_values_of_the_textbook(nile):
    # Durbin and Koopman, Time Series Analysis by State Space Methods, section 2.10.
    assert round(nile.params["sigma2.irregular"]) == 15_099
    assert round(nile.params["sigma2.level"]) == 1_469
    assert nile.converged


def test_the_likelihood_is_that_of_statsmodels_and_no_lower(nile):
    theirs = unobserved(NILE, level="local level")
    assert nile.llf == pytest.approx(theirs.loglike([*nile.params.values()]), abs=1e-9)
    fitted = theirs.fit(disp=0)
    assert nile.llf == pytest.approx(fitted.llf, abs=1e-4)
    assert nile.llf >= fitted.llf
    assert nile.df_model == fitted.df_model
    assert nile.aic == pytest.approx(fitted.aic, abs=1e-3)
    assert nile.bic == pytest.approx(fitted.bic, abs=1e-3)


def test_what_statsmodels_does_by_default(nile):
    # There the level starts from N(0, 1e6) and the first value is left out of the sum.
    theirs = tsa.UnobservedComponents(np.array(NILE, float), level="local level")
    assert theirs.loglikelihood_burn == 1
    left_out = nile.llf + 0.5 * math.log(2 * math.pi)
    assert left_out == pytest.approx(theirs.loglike([*nile.params.values()]), abs=0.01)
    theirs.ssm.initialize_approximate_diffuse(variance=1e12)
    assert left_out == pytest.approx(theirs.loglike([*nile.params.values()]), abs=1e-4)


def test_standard_errors(nile):
    theirs = unobserved(NILE, level="local level")
    found = theirs.smooth(
        [*nile.params.values()], cov_type="approx", cov_kwds={"approx_centered": True}
    )
    assert [*nile.bse.values()] == pytest.approx(found.bse, rel=1e-4)


def test_filter_smoother_and_forecast_with_missing_values(nile):
    ours = nile.model.apply(HOLES, nile.params)
    theirs = unobserved(HOLES, level="local level").smooth([*nile.params.values()])
    assert ours.llf == pytest.approx(theirs.llf, abs=1e-9)
    assert ours.filter().mean == pytest.approx(theirs.level.filtered)
    assert ours.filter().variance == pytest.approx(theirs.level.filtered_cov)
    assert ours.smooth().mean == pytest.approx(theirs.level.smoothed)
    assert ours.smooth().variance == pytest.approx(theirs.level.smoothed_cov)
    assert ours.fittedvalues[1:] == pytest.approx(theirs.fittedvalues[1:])
    assert ours.resid[1:] == pytest.approx(theirs.resid[1:], nan_ok=True)
    ahead = theirs.get_forecast(7)
    assert ours.forecast(7).mean == pytest.approx(ahead.predicted_mean)
    assert ours.forecast(7).se_mean == pytest.approx(ahead.se_mean)
    assert ours.forecast(7).conf_int(0.1) == pytest.approx(ahead.conf_int(alpha=0.1))
    frame = ours.forecast(7).summary_frame()
    expected = ahead.summary_frame()
    assert [*frame.columns] == [*expected.columns]
    assert frame.to_numpy() == pytest.approx(expected.to_numpy())


def test_a_damped_cycle_about_a_level():
    # Theirs is in discrete time: decay and noise of one step are those of a continuous one.
    params = {
        "sigma2.irregular": 3_000.0,
        "sigma2.level": 900.0,
        "period.cycle": 9.0,
        "rate.cycle": 0.2,
        "sigma2.cycle": 5_000.0,
    }
    rho = math.exp(-params["rate.cycle"])
    step = params["sigma2.cycle"] / (2 * params["rate.cycle"]) * (1 - rho**2)
    model = unobserved(
        HOLES, level="local level", cycle=True, stochastic_cycle=True, damped_cycle=True
    )
    # They start a damped cycle anywhere, though it has a stationary distribution.
    for states, kind in (((0, 3), None), ((0, 1), "diffuse"), ((1, 3), "stationary")):
        start = model.ssm.initialization
        start.unset(None) if kind is None else start.set(states, kind)
    theirs = model.smooth([3_000.0, 900.0, step, 2 * math.pi / 9.0, rho])
    ours = StateSpace("level + cycle").apply(HOLES, params)
    assert ours.llf == pytest.approx(theirs.llf, abs=1e-8)
    assert ours.smooth("cycle").mean == pytest.approx(theirs.cycle.smoothed)
    assert ours.smooth("cycle").variance == pytest.approx(theirs.cycle.smoothed_cov)
    assert ours.smooth("level").mean == pytest.approx(theirs.level.smoothed)


def test_autoregression_with_a_negative_coefficient():
    # An AR(1) seen with noise and a constant; theirs has the constant as a regressor.
    params = {"sigma2.irregular": 4e3, "ar.L1": -0.5, "sigma2.ar": 1e4, "intercept": 900.0}
    theirs = tsa.SARIMAX(HOLES, order=(1, 0, 0), measurement_error=True, exog=np.ones(100))
    expected = theirs.loglike([900.0, -0.5, 4e3, 1e4])
    assert StateSpace(AR1()).log_likelihood(HOLES, params) == pytest.approx(expected, abs=1e-8)


def test_a_smooth_trend_in_continuous_time():
    # Theirs has noise in the slope at whole steps only: same matrices, another covariance.
    slope, noise = 2.0, 1.5e4
    theirs = unobserved(HOLES, level="local linear trend")
    theirs.update([noise, 1.0, 1.0])
    theirs["selection"] = np.eye(2)
    theirs["state_cov"] = slope * np.array([[1 / 3, 1 / 2], [1 / 2, 1.0]])
    ours = StateSpace(Trend(smooth=True)).apply(
        HOLES, {"sigma2.irregular": noise, "sigma2.slope": slope}
    )
    found = theirs.ssm.smooth()
    assert ours.llf == pytest.approx(found.llf, abs=1e-8)
    assert ours.smooth().mean == pytest.approx(found.smoothed_state[0])


def test_a_period_is_found():
    true = {
        "sigma2.irregular": 0.1,
        "period.cycle": 11.0,
        "rate.cycle": 0.03,
        "sigma2.cycle": 0.06,
        "intercept": 5.0,
    }
    model = StateSpace(Cycle())
    (y,) = model.simulate(true, 300, seed=1)
    found = model.fit(y)
    for name, (low, high) in found.conf_int(0.001).items():
        assert low < true[name] < high
    assert found.llf > model.log_likelihood(y, true)
