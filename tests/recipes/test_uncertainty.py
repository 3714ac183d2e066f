"""Signals of uncertainty on text: every row runs, and a score must earn its figure."""

import json

import numpy as np
import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("sklearn")

from kalman_attention.cli.main import main
from kalman_attention.recipes import uncertainty
from tests.data.small import shards, text

pytestmark = pytest.mark.usefixtures("no_flush")


def test_a_cell_says_what_each_score_finds(tmp_path, capsys):
    corpus, domains = tmp_path / "corpus", tmp_path / "domains"
    corpus.mkdir()
    domains.mkdir()
    (domains / "other.txt").write_text("\n".join(text(i, 30) for i in range(500, 540)))
    data, out = shards(corpus), tmp_path / "results"
    command = ["reproduce", "uncertainty", "--scale", "smoke", "--out", str(out), "--only", "kla"]
    assert main([*command, "--shards", str(data)]) == 1
    assert "--domains" in capsys.readouterr().err
    assert main([*command, "--shards", str(data), "--domains", str(domains)]) == 0
    (path,) = (out / "uncertainty-smoke" / "cells").iterdir()
    found = json.loads(path.read_text())
    assert set(found["domains"]["other"]) == set(uncertainty.SCORES)
    assert not {"shards", "domains"} & set(found["config"])
    (domains / "other.txt").write_text("short")
    (path).unlink()
    assert main([*command, "--shards", str(data), "--domains", str(domains)]) == 1
    assert "fewer than two windows" in capsys.readouterr().err


def test_no_texts_to_compare_with(tmp_path):
    with pytest.raises(ValueError, match="contains no text"):
        uncertainty.domain_files(tmp_path)


def test_means_leave_out_what_a_model_does_not_have():
    domains = {"a": {"gain": {"auroc": 0.2}}, "b": {"gain": {"auroc": 0.4}}}
    assert uncertainty._mean_auroc({"domains": domains}, "gain") == pytest.approx(0.3)
    assert uncertainty._mean_auroc({"domains": domains}, "epistemic") is None
    assert uncertainty._over_seeds([0.5, None, 0.7]) == f"0.600 ({np.std([0.5, 0.7], ddof=1):.3f})"
