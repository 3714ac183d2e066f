"""The benches of layer and decoding run, print tables and write numbers."""

import json

import pytest
import torch

from kalman_attention import KLA, KLALayerConfig
from kalman_attention.cli import bench_layer
from kalman_attention.cli.main import main


def call(*argv):
    return main([str(a) for a in argv])


def test_layer(tmp_path, capsys):
    sizes = ("--lengths", 8, 16, "--width", 16, "--state", 4)
    assert call("bench", "layer", *sizes, "--repeats", 2, "--out", tmp_path) == 0
    assert "kla / products" in capsys.readouterr().out
    data = json.loads((tmp_path / "layer.json").read_text())
    assert [(r["T"], r["backward"]) for r in data["rows"]] == [
        (8, False), (16, False), (8, True), (16, True)
    ]  # fmt: skip
    assert {"products", "kla", "attention"} <= set(data["rows"][0]["seconds"])
    assert data["about"]["torch"] == torch.__version__
    assert data["settings"]["width"] == 16


def test_products_are_those_of_the_layer():
    layer = KLA(KLALayerConfig(d_model=12, d_state=4, precision_rank=3))
    products = bench_layer.Products(layer)
    assert {id(p) for p in products.parameters()} == {
        id(p) for n, p in layer.named_parameters() if n.endswith(".weight") and "conv" not in n
    }
    shapes = [tuple(y.shape) for y in products(*products.inputs(2, 5))]
    assert shapes == [(2, 5, 24), (2, 5, 11), (2, 5, 12), (2, 5, 12)]


def test_decode(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    sizes = ("--contexts", 4, 9, "--tokens", 2, "--width", 16, "--state", 4, "--depth", 2)
    assert call("bench", "decode", *sizes, "--repeats", 2, "--out", tmp_path) == 0
    assert "tokens/s" in capsys.readouterr().out
    rows = json.loads((tmp_path / "decode.json").read_text())["rows"]
    assert [row["model"] for row in rows] == ["kla", "attention"]
    assert all(len(row["milliseconds"]) == 2 for row in rows)
    assert (tmp_path / "decode.png").stat().st_size > 0
