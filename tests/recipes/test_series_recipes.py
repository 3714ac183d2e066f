"""Recipes on series: they run, say what is missing, and keep test sets apart."""

import dataclasses
import json

import pytest
import torch

pytest.importorskip("scoringrules")
pytest.importorskip("sklearn")
pytest.importorskip("torchmetrics")

from kalman_attention.cli.main import main
from kalman_attention.data.measurements import Stays
from kalman_attention.models.series import SeriesModel
from kalman_attention.models.series_config import SeriesConfig
from kalman_attention.recipes import forecasting, pendulum, physionet
from kalman_attention.recipes.series_run import Series, over_seeds, series_loss, series_scores
from tests.data.stays import write_stays, write_table

pytestmark = pytest.mark.usefixtures("no_flush")


def reproduce(folder, *args: str) -> int:
    return main(["reproduce", *args, "--scale", "smoke", "--out", str(folder / "results")])


def test_pendulum_runs(tmp_path, capsys):
    assert reproduce(tmp_path, "pendulum", "--only", "kla", "--only", "gru without time") == 0
    printed = capsys.readouterr().out
    assert "S5 (published)" in printed
    assert "3 of 5 runs are still missing" in printed
    cells = tmp_path / "results" / "pendulum-smoke" / "cells"
    stored = json.loads((cells / "kla,seed0.json").read_text())
    assert {"mse", "nll", "crps", "coverage"} == set(stored["metrics"]) == set(stored["validation"])


def test_physionet_runs_and_does_not_know_the_place(tmp_path, capsys):
    chosen = ["--only", "kla/mortality", "--only", "boosted trees", "--only", "gru/interpolation"]
    assert reproduce(tmp_path, "physionet", *chosen) == 1
    assert "--data" in capsys.readouterr().err
    data = write_stays(tmp_path / "stays", 60)
    assert reproduce(tmp_path, "physionet", *chosen, "--data", str(data)) == 0
    printed = capsys.readouterr().out
    assert "mTAND-Full (published)" in printed
    assert "interpolation" in printed
    cells = tmp_path / "results" / "physionet-smoke" / "cells"
    for path in cells.iterdir():
        assert "data" not in json.loads(path.read_text())["config"]
    assert reproduce(tmp_path, "physionet", "--table") == 0


def test_forecasting_runs(tmp_path, capsys):
    data = write_table(tmp_path / "ett", 20 * forecasting.MONTH)
    assert reproduce(tmp_path, "forecasting", "--data", str(data)) == 0
    assert "still missing" not in capsys.readouterr().out
    short = write_table(tmp_path / "short", 100)
    assert reproduce(tmp_path / "other", "forecasting", "--data", str(short)) == 1
    assert "has 100 rows" in capsys.readouterr().err


def test_data_is_for_experiments_on_measured_series(tmp_path, capsys):
    assert reproduce(tmp_path, "pendulum", "--data", str(tmp_path)) == 1
    assert "--data does not apply to pendulum" in capsys.readouterr().err


def test_controls_differ_in_one_option():
    for models in (pendulum.MODELS, *physionet.MODELS.values(), forecasting.MODELS["thinned"]):
        blind = dataclasses.replace(models["kla without time"], use_time=True)
        assert blind == models["kla"]


def test_splits_of_stays_do_not_overlap_and_are_scaled_by_the_training_set(tmp_path):
    data = write_stays(tmp_path, 50)
    splits = physionet.stay_splits(str(data), 1, None)
    assert [len(part.times) for part in splits] == [32, 8, 10]
    marks = [tuple(map(tuple, part.times.tolist())) for part in splits]
    assert len(set().union(*map(set, marks))) == 50
    seen = splits.train.values[splits.train.observed[..., 19]][:, 19]  # the heart rate
    assert seen.mean().abs() < 1e-4
    assert seen.std() == pytest.approx(1.0, abs=0.01)
    physionet.stay_splits.cache_clear()


def test_ranks_become_normal_quantiles_whatever_the_unit(tmp_path):
    data = write_stays(tmp_path, 50)
    train = physionet.stay_splits(str(data), 1, None, "ranks").train
    plain = physionet.stay_splits(str(data), 1, None).train
    seen = train.observed[..., 19]
    found, before = train.values[seen][:, 19], plain.values[seen][:, 19]
    order = before.argsort()
    assert (found[order].diff() >= 0).all()
    assert found.median().abs() < 0.05
    assert found.std() == pytest.approx(1.0, abs=0.01)
    physionet.stay_splits.cache_clear()


def test_ranks_do_not_depend_on_other_stays():
    values = torch.tensor([[[3.0]], [[1.0]], [[1.0]], [[2.0]], [[100.0]]])
    observed = torch.ones_like(values, dtype=torch.bool)
    times = torch.zeros(5, 1)
    stays = Stays(values, observed, times, times == 0, torch.zeros(5))
    found = physionet._normal_scores(stays, [0, 1, 2]).flatten()
    quantiles = torch.special.ndtri(torch.tensor([1 / 3, 5 / 6]))  # middles of the ranks
    low, high = quantiles.tolist()
    expected = [high, low, low, (low + high) / 2, high]
    torch.testing.assert_close(found, torch.tensor(expected))


def test_paths_are_trained_separately():
    options = {"head": "classes", "summary_knots": 3, "d_model": 4, "kla": {"d_state": 2}}
    model = SeriesModel(SeriesConfig(channels=2, outputs=2, **options))
    values, times = torch.randn(6, 5, 2), torch.arange(5.0).expand(6, 5)
    mask = torch.ones(6, 5, dtype=torch.bool)
    targets = torch.tensor([0, 1, 0, 0, 1, 1])
    given = Series(values, torch.ones(6, 5, 2).bool(), times, mask, targets, targets == targets)

    def gradient():
        model.zero_grad()
        series_loss(model, given, torch.Generator()).backward()
        return model.summaries.head.weight.grad.clone()

    before = gradient()
    torch.nn.init.normal_(model.head.weight)
    assert torch.equal(gradient(), before)
    paths = model(*given[:4]).paths
    expected = sum(torch.nn.functional.cross_entropy(path, targets) for path in paths) / 2
    torch.testing.assert_close(series_loss(model, given, torch.Generator()), expected)


def test_hidden_measurements_are_asked_for_and_not_seen(tmp_path):
    part = physionet.stay_splits(str(write_stays(tmp_path, 50)), 1, None).test
    hidden = physionet._hidden(part)
    assert not (hidden.observed & hidden.asked).any()
    assert torch.equal(hidden.observed | hidden.asked, part.observed)
    assert not hidden.asked[..., : physionet.TOLD_ONCE].any()
    share = hidden.asked.sum() / part.observed[..., physionet.TOLD_ONCE :].sum()
    assert 0.3 < share < 0.7
    physionet.stay_splits.cache_clear()


def test_summaries_by_hand():
    values = torch.tensor([[[2.0, 0.0], [4.0, 0.0], [9.0, 0.0]]])
    observed = torch.tensor([[[True, False], [True, False], [False, False]]])
    times = torch.zeros(1, 3)
    part = Series(values, observed, times, times == 0, torch.zeros(1), torch.ones(1).bool())
    found = torch.from_numpy(physionet.summaries(part)).view(7, 2)
    assert found[:, 0].tolist() == [2.0, 3.0, 1.0, 2.0, 4.0, 2.0, 4.0]
    assert found[0, 1] == 0
    assert found[1:, 1].isnan().all()


def test_windows_do_not_reach_into_the_next_part(tmp_path):
    folder = tmp_path / "ramp"
    folder.mkdir()
    rows = 20 * forecasting.MONTH
    lines = ["date,a,b,c,d,e,f,g"] + [f"h,{','.join([str(t)] * 7)}" for t in range(rows)]
    (folder / "ETTh1.csv").write_text("\n".join(lines))
    setting = forecasting.Setting(hours=4, ahead=2, stride=1)
    train, validation, test = forecasting.windows(str(folder), setting)
    hours = 12 * forecasting.MONTH
    assert len(train.past) == hours - 4 - 2 + 1
    assert len(validation.past) == len(test.past) == 4 * forecasting.MONTH - 2 + 1
    # A ramp: what follows the last value rises by one step of it per hour.
    steps = torch.cat([test.past, test.future], 1).diff(dim=1)
    torch.testing.assert_close(steps, steps[:1, :1].expand_as(steps), rtol=1e-2, atol=1e-5)
    forecasting.windows.cache_clear()


def test_hours_that_were_left_out_are_no_tokens():
    windows = forecasting.Windows(torch.randn(3, 8, 7), torch.randn(3, 4, 7))
    found = forecasting._series(windows, "thinned", 0)
    assert found.mask[:, 8:].all()
    assert not found.mask[:, :8].all()
    assert torch.equal(found.observed.any(-1)[:, :8], found.mask[:, :8])
    assert torch.equal(found.targets[found.asked].view(3, 4, 7), windows.future)


def test_only_what_is_asked_counts():
    torch.manual_seed(0)
    model = SeriesModel(SeriesConfig(channels=2, outputs=2, d_model=4, kla={"d_state": 2})).eval()
    values, times = torch.randn(3, 5, 2), torch.arange(5.0).expand(3, 5)
    mask = torch.ones(3, 5, dtype=torch.bool)
    asked = torch.rand(3, 5, 2) < 0.5
    given = Series(values, torch.ones_like(asked), times, mask, values, asked)
    other = given._replace(targets=values.where(asked, 1e6))
    generator = torch.Generator()
    assert series_loss(model, given, generator) == series_loss(model, other, generator)
    scores = series_scores(model, given, 2)
    assert series_scores(model, other, 2) == scores
    assert series_scores(model, given, 3) == pytest.approx(scores, rel=1e-5)


def test_means_over_seeds():
    results = [
        {"labels": {"model": "a", "seed": f"seed{i}"}, "metrics": {"mse": x}}
        for i, x in enumerate((0.001, 0.003))
    ]
    assert over_seeds(results, "mse", ".2f", factor=1e3, model="a") == "2.00 +- 1.41 (2 runs)"
    assert over_seeds(results[:1], "mse", ".3f", model="a") == "0.001"
    assert over_seeds(results, "mse", ".2f", model="b") == "-"
