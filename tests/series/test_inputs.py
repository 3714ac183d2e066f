"""What users bring, right and wrong."""

import datetime
import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from kalman_attention.series import AR1, NILE, NILE_YEARS, Cycle, Level, StateSpace

LEVEL = {"sigma2.irregular": 15_099.0, "sigma2.level": 1_469.0}
MODEL = StateSpace("level")
YEARS = np.array(NILE_YEARS, float)
VALUES = np.array(NILE, float)
PER_DAY = {"sigma2.irregular": 15_099.0, "sigma2.level": 1_469.0 / 365.0}


def llf(y, times=None, params=LEVEL, **options):
    return MODEL.log_likelihood(y, params, times, **options)


EXPECTED = llf(VALUES)
DATES = np.datetime64("2001-01-01") + 365 * np.arange(100)


@pytest.mark.parametrize(
    ("y", "times", "params"),
    [
        (NILE, NILE_YEARS, LEVEL),
        ([*NILE], None, LEVEL),
        (VALUES.astype(np.float32), YEARS.astype(int), LEVEL),
        (np.ma.array(VALUES), [*YEARS], LEVEL),
        (torch.tensor(NILE), torch.arange(100), LEVEL),
        (torch.tensor(NILE, dtype=torch.float64, requires_grad=True), None, LEVEL),
        (VALUES, DATES, PER_DAY),
        (VALUES, DATES.astype("datetime64[ns]"), PER_DAY),
        (VALUES, DATES.tolist(), PER_DAY),
        (VALUES, DATES.astype("datetime64[s]").tolist(), PER_DAY),
    ],
    ids=["tuple", "list", "float32", "masked", "tensor", "grad", "dates", "ns", "date", "datetime"],
)  # fmt: skip
def test_forms_of_values_and_stamps(y, times, params):
    assert llf(y, times, params) == pytest.approx(EXPECTED, abs=1e-8)


def test_pandas():
    pandas = pytest.importorskip("pandas")
    index = pandas.date_range("1871-01-01", periods=100, freq="YS")
    y = pandas.Series(VALUES, index=index, name="flow")
    found = MODEL.apply(y, PER_DAY)
    leap = np.diff(index.to_numpy()) / np.timedelta64(1, "D")
    days = np.concatenate([[0.0], np.cumsum(leap)])
    assert found.llf == pytest.approx(llf(VALUES, days, PER_DAY), abs=1e-9)
    assert (found.fittedvalues.index == index).all()
    assert (found.resid.index == index).all()
    ahead = found.forecast(2)
    assert [*ahead.predicted_mean.index.year] == [1971, 1972]
    assert [*ahead.predicted_mean.index.month] == [1, 1]
    assert [*ahead.summary_frame().index] == [*ahead.predicted_mean.index]
    for same in (
        y.index.tz_localize("UTC"),
        pandas.PeriodIndex(index, freq="Y"),
        pandas.Series(index),
    ):
        assert llf(VALUES, same, PER_DAY) == pytest.approx(found.llf, abs=1e-9)
    frame = pandas.DataFrame({"a": y, "b": y.where(y > 800)})
    both = MODEL.apply(frame, PER_DAY)
    assert [*both.fittedvalues.columns] == ["a", "b"]
    assert both["a"].llf == pytest.approx(found.llf, abs=1e-9)
    assert both.smooth().mean.shape == (100, 2)
    plain = pandas.Series(VALUES, index=YEARS)
    assert [*MODEL.apply(plain, LEVEL).forecast(2).predicted_mean.index] == [1971.0, 1972.0]
    missing = y.astype("Float64").where(y > 800)
    assert llf(missing, params=PER_DAY) == pytest.approx(both["b"].llf, abs=1e-9)


@pytest.mark.parametrize("unit", ["h", "s", datetime.timedelta(hours=1), np.timedelta64(1, "h")])
def test_units_of_dates(unit):
    hours = 1 / 3600 if unit == "s" else 1
    params = {"sigma2.irregular": 15_099.0, "sigma2.level": 1_469.0 / 365.0 / 24.0 * hours}
    assert llf(VALUES, DATES, params, time_unit=unit) == pytest.approx(EXPECTED, abs=1e-8)


def test_centuries_of_dates():
    dates = np.datetime64("1500-01-01") + 3650 * np.arange(100)
    for stamps in (dates, dates.astype("datetime64[s]")):
        params = {"sigma2.irregular": 15_099.0, "sigma2.level": 1_469.0 / 3650.0}
        found = MODEL.apply(VALUES, params, stamps)
        assert found.llf == pytest.approx(EXPECTED, abs=1e-8)
        assert [*found.forecast(2).times.astype("datetime64[D]")] == [
            dates[-1] + 3650,
            dates[-1] + 7300,
        ]
    with pytest.raises(ValueError, match="the series ends at"):
        found.forecast(dates[-2:-1])


def test_missing_values_and_missing_rows_are_the_same():
    keep = np.arange(100) % 3 > 0
    holes = np.where(keep, VALUES, math.nan)
    assert llf(holes) == pytest.approx(llf(VALUES[keep], YEARS[keep]), abs=1e-9)
    masked = np.ma.array(VALUES, mask=~keep)
    assert llf(masked) == llf(holes)


def test_two_values_at_one_instant():
    # They say what their mean says, with half the noise; what is left is their difference.
    twice = MODEL.apply([1000.0, 1200.0, 1150.0], LEVEL, [0.0, 0.0, 3.0])
    once = MODEL.apply([1100.0, math.nan, 1150.0], LEVEL, [0.0, 0.0, 3.0])
    filtered = twice.filter()
    assert filtered.mean[1] == pytest.approx(1100.0)
    assert filtered.variance[1] == pytest.approx(LEVEL["sigma2.irregular"] / 2)
    assert once.filter().variance[1] == pytest.approx(LEVEL["sigma2.irregular"])
    swapped = MODEL.apply([1200.0, 1000.0, 1150.0], LEVEL, [0.0, 0.0, 3.0])
    assert swapped.llf == pytest.approx(twice.llf)


def test_one_value():
    found = MODEL.apply([1000.0], LEVEL, [5.0])
    assert found.llf == pytest.approx(-0.5 * math.log(2 * math.pi))
    ahead = found.forecast([5.0, 7.0])
    assert ahead.mean == pytest.approx([1000.0, 1000.0])
    assert ahead.variance == pytest.approx([2 * 15_099.0, 2 * 15_099.0 + 2 * 1_469.0])
    with pytest.raises(ValueError, match="no spacing"):
        found.forecast(2)
    with pytest.raises(ValueError, match="1 values cannot determine"):
        MODEL.fit([1000.0])


def test_a_constant_series():
    with pytest.raises(ValueError, match="constant"):
        MODEL.fit([3.3] * 20)
    with pytest.raises(ValueError, match="constant"):
        StateSpace("ou").fit([3.3] * 20)
    found = MODEL.apply([3.3] * 20, LEVEL)
    assert found.smooth().mean == pytest.approx(np.full(20, 3.3))


@pytest.mark.parametrize(
    ("y", "times", "message"),
    [
        ([], None, "empty"),
        (np.zeros((0, 2)), None, "empty"),
        (np.zeros((2, 2, 2)), None, "shape"),
        ([math.nan] * 4, None, "all values are missing"),
        (np.array([[1.0, math.nan], [2.0, math.nan]]), None, "all values of series 1"),
        ([1.0, math.inf, 2.0], None, "value 1 is infinite"),
        ([1e120, -1e120, 0.0], None, "another unit"),
        ([1e-200, -1e-200, 0.0], None, "another unit"),
        (["a", "b"], None, "not numbers"),
        ([1.0, 2.0, 3.0], [0.0, 2.0, 1.0], "time stamp 2.*sort"),
        ([1.0, 2.0, 3.0], [0.0, math.nan, 1.0], "time stamp 1 is nan"),
        ([1.0, 2.0], [0.0, math.inf], "time stamp 1 is inf"),
        ([1.0, 2.0], ["2001-01-01", "2002-01-01"], "pass numbers or dates"),
        ([1.0, 2.0], np.array(["2001-01-01", "NaT"], "datetime64[D]"), "time stamp 1 is NaT"),
        ([1.0, 2.0], [0.0, 1.0, 2.0], "2 values and 3 time stamps"),
        ([1.0, 2.0], [[0.0, 1.0]], "one for each value"),
        ([[1.0, 2.0], [3.0]], [[0.0, 1.0]], "2 series and time stamps for 1"),
        ([[1.0, 2.0], np.zeros((3, 2))], None, "each must be"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(y, times, message):
    with pytest.raises(ValueError, match=message):
        MODEL.fit(y, times)


@pytest.mark.parametrize("unit", ["M", "fortnight", 5, datetime.timedelta(0)])
def test_units_that_are_none(unit):
    with pytest.raises(ValueError, match="time_unit"):
        MODEL.fit(VALUES, DATES, time_unit=unit)


def test_what_is_asked_wrongly():
    found = MODEL.apply(VALUES, LEVEL, YEARS)
    with pytest.raises(ValueError, match="at least one step"):
        found.forecast(0)
    with pytest.raises(ValueError, match=r"ends at 1970.*predict\(times\)"):
        found.forecast([1969.0])
    with pytest.raises(ValueError, match="sort"):
        found.predict([1990.0, 1980.0])
    with pytest.raises(ValueError, match="both be dates"):
        found.predict(DATES)
    with pytest.raises(ValueError, match="no component 'ou'"):
        found.smooth("ou")
    with pytest.raises(ValueError, match="alpha"):
        found.smooth().conf_int(95)
    with pytest.raises(ValueError, match="given, not fitted"):
        found.bse  # noqa: B018
    many = MODEL.apply([VALUES, VALUES[:50]], LEVEL)
    with pytest.raises(ValueError, match=r"results\[i\]"):
        many.smooth()
    with pytest.raises(ValueError, match=r"results\[i\].forecast"):
        many.forecast(3)
    with pytest.raises(IndexError, match="no series 7"):
        many[7]


def test_models_that_are_none():
    with pytest.raises(ValueError, match="did you mean 'level'"):
        StateSpace("levels")
    with pytest.raises(ValueError, match="the same constant twice"):
        StateSpace("level + ou", intercept=True)
    with pytest.raises(ValueError, match="components"):
        StateSpace([])
    with pytest.raises(ValueError, match="period"):
        Cycle(period=(9.0, 3.0))
    with pytest.raises(ValueError, match=r"missing: .*sigma2.level"):
        MODEL.apply(VALUES, {"sigma2.irregular": 1.0})
    with pytest.raises(ValueError, match=r"sigma2.irregular is 0.0"):
        MODEL.apply(VALUES, {"sigma2.irregular": 0.0, "sigma2.level": 1.0})
    with pytest.raises(ValueError, match=r"sigma2.level is nan"):
        MODEL.apply(VALUES, {"sigma2.irregular": 1.0, "sigma2.level": math.nan})


def test_starts_that_nothing_determines():
    flat = {"sigma2.irregular": 1.0, "sigma2.level": 1.0, "sigma2.level2": 1.0}
    with pytest.raises(ValueError, match="cannot be distinguished"):
        StateSpace("level + level").apply(VALUES, flat)
    trend = {"sigma2.irregular": 1.0, "sigma2.slope": 1.0, "sigma2.trend": 1.0}
    with pytest.raises(ValueError, match="a different time"):
        StateSpace("trend").apply([1.0, 2.0, 3.0], trend, [4.0, 4.0, 4.0])


def test_an_autoregression_needs_a_grid():
    with pytest.raises(ValueError, match=r"gap of 0.5.*AR1\(step=...\).*'ou'"):
        StateSpace("ar").fit(VALUES[:3], [0.0, 1.0, 1.5])
    params = {"sigma2.irregular": 1.0, "ar.L1": -0.4, "sigma2.ar": 2.0, "intercept": 900.0}
    halves = StateSpace(AR1(step=0.5)).log_likelihood(VALUES, params, YEARS / 2)
    assert halves == pytest.approx(StateSpace("ar").log_likelihood(VALUES, params, YEARS))


def test_formulas():
    assert StateSpace("Level +  OU").param_names == [
        "sigma2.irregular",
        "sigma2.level",
        "rate.ou",
        "sigma2.ou",
    ]
    assert StateSpace(Level() + Cycle() + Cycle()).param_names[4:6] == [
        "sigma2.cycle",
        "period.cycle2",
    ]
    assert "intercept" in StateSpace("ou").param_names
    assert "intercept" not in StateSpace("ou", intercept=False).param_names
    assert repr(StateSpace("smooth trend + ar")) == "StateSpace('trend + ar')"


def test_arrays_need_neither_pandas_nor_matplotlib():
    program = (
        "import sys; sys.modules['pandas'] = sys.modules['matplotlib'] = None\n"
        "from kalman_attention.series import NILE, StateSpace\n"
        "params = {'sigma2.irregular': 15099.0, 'sigma2.level': 1469.0}\n"
        "found = StateSpace('level').apply(NILE, params)\n"
        "assert len(found.forecast(3).predicted_mean) == 3\n"
        "for ask in (found.plot, found.forecast(3).summary_frame):\n"
        "    try:\n"
        "        ask()\n"
        "    except ModuleNotFoundError as error:\n"
        "        print(error)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    plot, table = run.stdout.splitlines()
    assert "kalman_attention[plot]" in plot
    assert "kalman_attention[series]" in table
