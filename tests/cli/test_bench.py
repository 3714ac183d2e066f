"""Benchmarks print tables and write numbers, from the command line and from Python."""

import json

import pytest
import torch

from kalman_attention import KLA, KLAConfig
from kalman_attention.benchmarks import (
    DecodeOptions,
    LayerOptions,
    MixerOptions,
    SweepOptions,
    TaskOptions,
)
from kalman_attention.benchmarks import layer as bench_layer
from kalman_attention.benchmarks import mixers as bench_mixers
from kalman_attention.benchmarks.measure import Shape, make_inputs
from kalman_attention.cli.main import main, parse
from kalman_attention.cli.verbs import bench
from kalman_attention.models.mixers import MIXERS
from kalman_attention.models.sizes import mixer_size
from kalman_attention.ops.arithmetic import needed_dtype
from kalman_attention.ops.contract import ScanInputs


def call(*argv):
    return main([str(a) for a in argv])


@pytest.mark.parametrize(
    ("subject", "kind"),
    [
        ("scan", SweepOptions),
        ("gpu", SweepOptions),
        ("layer", LayerOptions),
        ("mixers", MixerOptions),
        ("decode", DecodeOptions),
        ("tasks", TaskOptions),
    ],
)
def test_the_command_line_has_every_option_and_its_default(subject, kind):
    assert bench._options(kind, parse(["bench", subject])) == kind()


def test_from_python(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    options = MixerOptions(
        lengths=(8,), width=16, state=4, mixers=["kla"], rivals_at=(), repeats=1, threads=1
    )
    results = bench_mixers.bench_mixers(options)
    assert set(results["sweep"]["passes"]["forward"]["kla"]["seconds"]) == {8}
    assert "results:" not in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    assert torch.get_num_threads() == threads
    assert bench_mixers.bench_mixers(options, out=tmp_path)["settings"] == results["settings"]
    written = json.loads((tmp_path / "mixers.json").read_text())
    assert written["settings"] == {**results["settings"], "lengths": [8], "rivals_at": []}


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
    layer = KLA(KLAConfig(d_model=12, d_state=4, precision_rank=3))
    products = bench_layer.Products(layer)
    assert {id(p) for p in products.parameters()} == {
        id(p)
        for n, p in layer.named_parameters()
        if n.endswith("proj.weight") or n == "precision_up.weight"
    }
    shapes = [tuple(y.shape) for y in products(*products.inputs(2, 5))]
    assert shapes == [(2, 5, 24), (2, 5, 11), (2, 5, 12), (2, 5, 12)]


def test_decode(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    sizes = ("--contexts", 4, 9, "--tokens", 2, "--width", 16, "--state", 4, "--depth", 2)
    sizes = (*sizes, "--preset", "kla-nano")
    assert call("bench", "decode", *sizes, "--repeats", 2, "--out", tmp_path) == 0
    assert "tokens/s" in capsys.readouterr().out
    data = json.loads((tmp_path / "decode.json").read_text())
    assert [row["weights"] for row in data["kla-nano"]] == ["float32", "bfloat16"]
    for row in data["kla-nano"]:
        assert row["bound"] > 0
        assert row["ratio"] == pytest.approx(row["milliseconds"] / row["bound"])
    rows = data["rows"]
    assert [row["model"] for row in rows] == ["kla", "attention"]
    assert all(len(row["milliseconds"]) == 2 for row in rows)
    assert (tmp_path / "decode.png").stat().st_size > 0


def test_mixers(tmp_path, capsys):
    sizes = ("--lengths", 8, 16, "--width", 16, "--state", 4, "--rivals-at", "--repeats", 2)
    assert call("bench", "mixers", *sizes, "--out", tmp_path) == 0
    assert "gated_deltanet" in capsys.readouterr().out
    data = json.loads((tmp_path / "mixers.json").read_text())
    for found in data["sweep"]["passes"].values():
        assert set(found) == set(MIXERS).difference(bench_mixers.UNMATCHED)
        assert all(set(row["seconds"]) == {"8", "16"} for row in found.values())
    assert data["rivals"] == []
    assert data["sizes"]["kla"]["state"] == 2 * 4 * 16


@pytest.mark.parametrize(("width", "state"), [(512, 16), (64, 4), (960, 16)])
def test_mixers_are_compared_at_equal_states(width, state):
    for name in set(MIXERS).difference(bench_mixers.UNMATCHED):
        options = bench_mixers.matched_options(name, width, state)
        found = getattr(options, "state_size", None) or mixer_size(name, options).state
        assert found == (0 if name == "attention" else 2 * state * width), name
    with pytest.raises(ValueError, match="multiple of 4 x d_state"):
        bench_mixers.matched_options("gla", 100, 16)


@pytest.mark.filterwarnings("ignore")  # whatever others have to say when imported
@pytest.mark.parametrize("rival", bench_mixers.RIVALS, ids=lambda rival: rival.package)
def test_public_layers_are_of_the_same_shape(rival):
    theirs = rival.build(64, 4, 10)
    if theirs is None:
        pytest.skip(f"needs {rival.package}: pip install 'kalman_attention[bench,hf]'")
    ours = MIXERS[rival.mixer].module(bench_mixers.matched_options(rival.mixer, 64, 4))
    assert theirs(torch.randn(1, 10, 64)).shape == (1, 10, 64)
    one, other = (sum(p.numel() for p in layer.parameters()) for layer in (ours, theirs))
    assert abs(one - other) < 0.01 * one


def test_a_public_layer_beside_ours(monkeypatch, tmp_path, capsys):
    # With a stand-in, so that the table and its limits are tested without the packages.
    rivals = (bench_mixers.Rival("mamba", "stand-in", lambda *sizes: torch.nn.Identity()),)
    monkeypatch.setattr(bench_mixers, "RIVALS", rivals)
    sizes = ("--lengths", 8, "--width", 16, "--state", 4, "--mixers", "mamba", "--repeats", 1)
    assert call("bench", "mixers", *sizes, "--rivals-at", 8, 16, "--out", tmp_path) == 0
    assert "theirs / ours" in capsys.readouterr().out
    rows = json.loads((tmp_path / "mixers.json").read_text())["rivals"]
    assert [(row["T"], row["pass"]) for row in rows] == [
        (8, "forward"), (16, "forward"), (8, "forward + backward"), (16, "forward + backward")
    ]  # fmt: skip
    monkeypatch.setattr(bench_mixers, "available_memory", lambda: -1)
    assert call("bench", "mixers", *sizes, "--rivals-at", 8, "--out", tmp_path) == 0
    assert "theirs / ours" not in capsys.readouterr().out


@pytest.mark.parametrize("slots", [16, 64])
def test_what_is_timed_is_float32(slots: int) -> None:
    """One slot with hardly any noise would take the whole call to float64, at twice the time."""
    inputs = make_inputs(Shape(B=1, T=2048, D=960, N=slots), grad=False)
    belief = torch.zeros(1, slots, 960), torch.ones(1, slots, 960)
    call = ScanInputs(*inputs, *belief, None, None)
    assert needed_dtype(call, gradients=True) == torch.float32


def test_tasks(tmp_path, capsys):
    options = ("--scale", "smoke", "--only", "compression", "--repeats", 2, "--out", tmp_path)
    assert call("bench", "tasks", "mad", *options) == 0
    found = json.loads((tmp_path / "tasks.json").read_text())
    assert list(found["updates"])[-3:] == [
        "kla+/compression",
        "shared 4/compression",
        "shared 4, rotating/compression",
    ]
    assert "kla+/compression" in capsys.readouterr().out
    for measured in found["updates"].values():
        assert measured["updates"] == 2  # an epoch of 64 sequences in batches of 32
        assert measured["seconds"] > 0


def test_tasks_that_do_not_exist(capsys):
    assert call("bench", "tasks", "mad", "--only", "kla/nothing") == 1
    assert "kla reproduce mad --list" in capsys.readouterr().err
    assert call("bench", "tasks", "series") == 1
