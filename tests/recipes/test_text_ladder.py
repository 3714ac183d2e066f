"""The ladder of options on text: equal sizes, and cells that do not depend on where text lies."""

import json

import pytest

pytest.importorskip("tokenizers")

from kalman_attention.cli.main import main
from kalman_attention.recipes import text_ladder
from kalman_attention.recipes.pretrain import PretrainRecipe, recipe
from tests.data.small import shards

pytestmark = pytest.mark.usefixtures("no_flush")


@pytest.mark.parametrize("name", text_ladder.LADDER)
def test_sizes_are_equal(name):
    rung = text_ladder.LADDER[name]
    found = recipe(f"{rung.model}-micro", architecture=rung.config()).parameters
    assert found == pytest.approx(recipe("kla-micro").parameters, rel=0.013)


def test_a_recipe_with_a_model_of_its_own_survives_json():
    cell = text_ladder.cells("smoke")[-4]
    own = cell.run.recipe
    assert own.architecture is not None
    assert PretrainRecipe.from_dict(json.loads(json.dumps(own.to_dict()))) == own


def test_a_cell_runs_and_does_not_know_the_place(tmp_path, capsys):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    data = shards(corpus)
    out = tmp_path / "results"
    command = ["reproduce", "text-ladder", "--scale", "smoke", "--only", "shared 4"]
    assert main([*command, "--out", str(out)]) == 1
    assert "--shards" in capsys.readouterr().err
    assert main([*command, "--shards", str(data), "--out", str(out)]) == 0
    assert "shared 4" in capsys.readouterr().out
    (path,) = (out / "text-ladder-smoke" / "cells").iterdir()
    stored = json.loads(path.read_text())
    assert "shards" not in stored["config"]
    assert stored["metrics"]["bits_per_byte"] > 0
    # Found again without being told where the text was.
    assert main([*command, "--table", "--out", str(out)]) == 0
    assert f"{stored['metrics']['bits_per_byte']:.3f}" in capsys.readouterr().out


def test_seeds_stand_beside_their_mean():
    results = [
        {"labels": {"model": model, "seed": f"seed{seed}"}, "metrics": {"bits_per_byte": bits}}
        for model, seed, bits in (("kla", 100, 2.25), ("kla", 101, 2.125), ("mamba", 101, 2.0))
    ]
    (table,) = text_ladder.tables("cpu", results)
    shown = {name: figures for name, _, *figures in table.rows}
    assert shown["kla"] == ["2.250", "2.125", "2.188"]
    assert shown["mamba"] == ["-", "2.000", "-"]
    assert shown["gdn"] == ["-", "-", "-"]


def test_text_is_for_experiments_on_text(tmp_path, capsys):
    command = ["reproduce", "mqar", "--scale", "smoke", "--shards", str(tmp_path)]
    assert main([*command, "--out", str(tmp_path / "results")]) == 1
    assert "--shards does not apply to mqar" in capsys.readouterr().err
