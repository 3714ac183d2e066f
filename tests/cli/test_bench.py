"""The bench verbs run, print tables and write numbers."""

import argparse
import json

import pytest
import torch

from kalman_attention import KLA, KLALayerConfig
from kalman_attention.cli import bench_decode, bench_layer
from kalman_attention.cli.timing import interleaved


def call(verb, *argv):
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    return verb.run(parser.parse_args([str(a) for a in argv]))


def test_layer(tmp_path, capsys):
    path = tmp_path / "new" / "layer.json"
    argv = ("--lengths", 8, 16, "--width", 16, "--state", 4, "--repeats", 2, "--json", path)
    assert call(bench_layer, *argv) == 0
    assert "kla / products" in capsys.readouterr().out
    data = json.loads(path.read_text())
    assert [(r["T"], r["backward"]) for r in data["rows"]] == [
        (8, False), (16, False), (8, True), (16, True)
    ]  # fmt: skip
    assert {"products", "kla", "attention"} <= set(data["rows"][0]["seconds"])
    assert data["environment"]["torch"] == torch.__version__


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
    argv = (
        "--contexts", 4, 9, "--tokens", 2, "--width", 16, "--state", 4, "--depth", 2,
        "--repeats", 2, "--json", tmp_path / "a.json", "--plot", tmp_path / "a.png",
    )  # fmt: skip
    assert call(bench_decode, *argv) == 0
    assert "tokens/s" in capsys.readouterr().out
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert [row["model"] for row in rows] == ["kla", "attention"]
    assert all(len(row["milliseconds"]) == 2 for row in rows)
    assert (tmp_path / "a.png").stat().st_size > 0


def test_interleaving():
    order = []
    work = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    times = interleaved(work, repeats=3, seconds=60.0)
    assert order == ["a", "b"] * 4
    assert [len(t) for t in times.values()] == [3, 3]
    assert len(interleaved(work, repeats=9, seconds=0.0)["a"]) == 2
