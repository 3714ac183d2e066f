"""Series with hidden parts: what is hidden, what is scored, and what the tables say."""

import json

import numpy as np
import pytest

from kalman_attention.cli.main import main
from kalman_attention.recipes import series
from kalman_attention.recipes.series import CHOSEN, FILES, MODELS, SeriesRun

pytestmark = pytest.mark.usefixtures("no_flush")


@pytest.fixture
def data(tmp_path):
    """Small files of the right form, one in the folder and one in a folder in it."""
    folder = tmp_path / "data"
    (folder / "drive").mkdir(parents=True)
    years = np.arange(1700, 1790)
    spots = 50 + 45 * np.sin(2 * np.pi * years / 11)
    rows = [f"{year},{number:.1f}" for year, number in zip(years, spots, strict=True)]
    (folder / FILES["sunspots"]).write_text('"YEAR","SUNACTIVITY"\n' + "\n".join(rows))
    t = np.arange(0, 60, 0.02)
    lines = [
        f"{int(10 * x)},{1e3 * x:.1f},{51 + 1e-5 * x:.7f},{13 + 1e-4 * np.sin(x / 9):.7f}"
        for x in t
    ]
    (folder / "drive" / FILES["car"]).write_text(
        "time,millis,latitude,longitude\n" + "\n".join(lines)
    )
    return folder


def test_what_is_hidden(data):
    first = SeriesRun(series="sunspots", model=CHOSEN["sunspots"], data=str(data)).measured()
    assert first.hidden.sum() == 30
    other = SeriesRun(
        series="sunspots", model=CHOSEN["sunspots"], seed=1, data=str(data)
    ).measured()
    assert (first.hidden != other.hidden).any()
    drive = SeriesRun(series="car", model=CHOSEN["car"], data=str(data)).measured()
    assert drive.values.shape == (600, 2)  # ten positions a second
    assert drive.times[-1] == pytest.approx(59.9, abs=0.1)
    assert drive.values[-1, 1] == pytest.approx(60e-5 * 111_320, rel=0.01)  # metres to the north
    lengths = np.diff(np.flatnonzero(np.diff(np.r_[0, drive.hidden, 0])))[::2]
    assert lengths.min() >= 9  # a second, or what an overlap leaves of none
    assert 0.2 < drive.hidden.mean() < 0.9
    assert not SeriesRun(series="nile", model="level").measured().hidden.any()


def test_scores_of_a_known_belief(data):
    pytest.importorskip("scoringrules")
    run = SeriesRun(series="sunspots", model="root, level", data=str(data), starts=1, max_iter=20)
    measured = run.measured()
    fitted = run.fit(measured)
    found = run.score(measured, fitted)
    bands = fitted.predict()
    truth, at = np.sqrt(measured.values[:, 0]), measured.hidden
    low, high = bands.bounds()
    assert found["coverage"] == pytest.approx(((low <= truth) & (truth <= high))[at].mean())
    assert found["width"] == pytest.approx((high**2 - np.clip(low, 0, None) ** 2)[at].mean())
    assert 0 < found["crps"] < found["rmse"] * 1.1
    assert found["hidden"] == 30


def test_a_smoke_run(data, tmp_path, capsys):
    pytest.importorskip("scoringrules")
    out = tmp_path / "results"
    command = ["reproduce", "series", "--scale", "smoke", "--out", str(out)]
    assert main(command) == 1
    assert "sunspots.csv: pass the folder" in capsys.readouterr().err
    assert main([*command, "--only", "nile"]) == 0  # was kept, and needs no data
    assert "published (Durbin and Koopman)" in capsys.readouterr().out
    assert main([*command, "--data", str(data)]) == 0
    shown = capsys.readouterr().out
    assert "root, level + cycle" in shown
    cells = {path.name: json.loads(path.read_text()) for path in out.glob("*/cells/*.json")}
    assert len(cells) == 3
    for cell in cells.values():
        assert "data" not in cell["config"]
        assert cell["labels"]["series"] == "nile" or 0 <= cell["metrics"]["coverage"] <= 1
    assert (out / "series-smoke" / "sunspots.png").exists()


def test_a_folder_without_the_file(tmp_path):
    run = SeriesRun(series="car", model="level", data=str(tmp_path))
    with pytest.raises(ValueError, match=r"there is no 2014-03-26-000-Data.csv in"):
        run.measured()
    (tmp_path / FILES["car"]).write_text("time,millis\n1,2\n")
    with pytest.raises(ValueError, match="has no column latitude, longitude"):
        run.measured()


def test_cells_and_choices():
    assert all(CHOSEN[name] in models for name, models in MODELS.items())
    cells = series.cells("cpu")
    assert len({cell.name for cell in cells}) == len(cells)
    reported = {
        c.labels["model"] for c in cells if c.run.seed < 100 and c.labels["series"] == "car"
    }
    assert reported == {CHOSEN["car"]}
