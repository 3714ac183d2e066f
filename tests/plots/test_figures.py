"""Figures can be drawn from plain tensors."""

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib")

from kalman_attention.plots.beliefs import (
    plot_attention_maps,
    plot_posterior_variance,
    plot_scores,
)
from kalman_attention.plots.common import line_style, save_figure
from kalman_attention.plots.speed import draw_scaling, plot_decode_speed
from kalman_attention.plots.training import (
    plot_accuracy_over_length,
    plot_fewest_blocks,
    plot_learning_curves,
    plot_pretraining,
    plot_scale_out,
)


def test_a_figure_drawn_again_is_the_same_file(tmp_path):
    written = [
        save_figure(plot_decode_speed([128, 256], {"kla": [1.0, 2.0]}), tmp_path / folder / "a.png")
        for folder in ("first", "second")
    ]
    assert [path.suffix for path in written[0]] == [".png", ".svg"]
    for first, second in zip(*written, strict=True):
        assert first.read_bytes() == second.read_bytes()


def test_fifty_lines_can_be_told_apart():
    styles = [tuple(line_style(i).items()) for i in range(50)]
    assert len(set(styles)) == 50
    lines = {(f"model {i}", ""): [(0.0, 0.0), (1.0, float(i))] for i in range(12)}
    figure = plot_learning_curves({"task": lines, "another": {("model 11", ""): [(0.0, 0.0)]}})
    first, second = figure.axes[:2]
    drawn = {(line.get_color(), line.get_linestyle()) for line in first.lines}
    assert len(drawn) == 12
    assert first.lines[1].get_color() == first.lines[11].get_color()
    assert second.lines[0].get_linestyle() == first.lines[11].get_linestyle() == "--"


def test_numbers_of_updates_are_short():
    figure = plot_learning_curves({"task": {("kla", ""): [(0.0, 0.0), (10_000.0, 1.0)]}})
    axis = figure.axes[0].xaxis
    figure.draw_without_rendering()
    assert {"0", "10k"} <= {label.get_text() for label in axis.get_ticklabels()}


def test_a_long_legend_leaves_room_for_the_curves():
    lines = {(f"a model with a long name, number {i}", ""): [(0.0, 0.0)] for i in range(18)}
    figure = plot_learning_curves({"task": lines})
    figure.draw_without_rendering()
    panel, legend = figure.axes[0].get_window_extent(), figure.legends[0].get_window_extent()
    assert panel.height > 0.3 * figure.bbox.height
    assert figure.bbox.y0 <= legend.y0 < legend.y1 <= panel.y0


def test_variants_of_a_model_share_its_colour():
    curve = [(0.0, 0.0), (1.0, 0.5), (2.0, 1.0)]
    one = dict.fromkeys([("kla", "rate 1"), ("mamba", "rate 1"), ("kla", "rate 2")], curve)
    two = {("mamba", "rate 2"): curve[:1]}
    figure = plot_learning_curves({"first": one, "second": two})
    kla, mamba, kla_again = figure.axes[0].lines
    (mamba_again,) = figure.axes[1].lines
    assert kla.get_color() == kla_again.get_color() != mamba.get_color()
    assert mamba.get_color() == mamba_again.get_color()
    assert [x.get_linestyle() for x in (kla, mamba)] == ["-", "-"]
    assert [x.get_linestyle() for x in (kla_again, mamba_again)] == ["--", "--"]
    assert mamba_again.get_marker() == "."  # a single point is visible
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["kla rate 1", "kla rate 2", "mamba rate 1", "mamba rate 2"]


def test_scaling_marks_where_an_engine_gives_up(tmp_path):
    rows = {
        "cpu": {"seconds": {"8": 0.001, "16": 0.002}, "gave_up": None},
        "matrix": {"seconds": {"8": 0.001}, "gave_up": "out of memory at T = 16"},
        "reference": {"seconds": {}, "gave_up": "failed"},
    }
    sweep = {"shape": "B=1", "passes": {"forward": rows, "forward + backward": rows}}
    paths = draw_scaling(tmp_path, sweep, "scaling")
    assert [p.name for p in paths] == ["scaling_forward.png", "scaling_forward_backward.png"]
    assert all(p.exists() and p.with_suffix(".svg").exists() for p in paths)
    svg = paths[0].with_suffix(".svg").read_text()
    assert "gives up: memory" in svg


def test_posterior_variance(tmp_path):
    variance = torch.rand(12, 5)
    figure = plot_posterior_variance(variance, variance / 2, tokens=range(12))
    assert len(figure.axes) == 4  # three panels and a colour bar
    figure.savefig(tmp_path / "a.png")
    assert len(plot_posterior_variance(variance.bfloat16()).axes) == 3


def test_attention_maps(tmp_path):
    figure = plot_attention_maps(torch.randn(3, 6, 6).tril(), tokens="abcdef")
    assert len(figure.axes) == 4
    figure.savefig(tmp_path / "a.png")
    two = plot_attention_maps(torch.eye(2).expand(2, 2, 2) * torch.tensor([[[1e-3]], [[5.0]]]))
    assert [axis.get_title() for axis in two.axes[:2]] == [
        "channel 0, largest 0.001",
        "channel 1, largest 5",
    ]
    for axis in two.axes[:2]:
        assert axis.images[0].get_array().max() == 1
    blank = plot_attention_maps(torch.zeros(1, 2, 2), titles=["none"])
    assert blank.axes[0].get_title() == "none, largest 0"


def test_decode_speed(tmp_path):
    figure = plot_decode_speed([128, 256], {"kla": [1.0, 1.0], "attention": [1.0, 2.0]})
    assert len(figure.axes[0].lines) == 2
    figure.savefig(tmp_path / "a.png")


def test_pretraining_curve():
    records = [
        {"kind": "train", "step": 10, "loss": 5.0},
        {"kind": "train", "step": 20, "loss": None},
        {"kind": "eval", "step": 20, "loss": 4.0, "bits_per_byte": 2.0},
    ]
    figure = plot_pretraining(records, 1_000_000, title="kla-nano")
    loss, bits = figure.axes
    assert loss.lines[0].get_xydata().tolist() == [[10.0, 5.0]]
    assert bits.lines[0].get_xydata().tolist() == [[20.0, 2.0]]


def test_scale_out(tmp_path):
    figure = plot_scale_out({"one": [3.0, 2.0], "two": [3.0, 2.5], "four": [3.0, 2.0]})
    above, below = figure.axes
    assert len(above.lines) == 3
    assert below.lines[0].get_ydata().tolist() == [1e-8, 0.5]
    figure.savefig(tmp_path / "a.png")


def test_state_tracking(tmp_path):
    panels = {"a5": {"kla": [1.0, 0.5], "mamba": [0.2, None]}, "parity": {"kla": [None, None]}}
    figure = plot_accuracy_over_length([20, 64], panels, trained=20)
    first, second = figure.axes
    assert first.lines[0].get_ydata() == pytest.approx([100.0, 50.0])
    assert len(first.lines) == 3  # two models and the mark
    assert len(second.lines) == 1
    figure.savefig(tmp_path / "a.png")
    (axes,) = plot_fewest_blocks([20, 64], {"kla": [1, None]}, deepest=2).axes
    assert [round(y) for y in axes.lines[0].get_ydata()] == [1, 3]
    assert axes.get_yticklabels()[-1].get_text() == "> 2"


def test_scores_shade_what_is_unusual():
    windows = {"nll": np.array([1.0, 5.0, np.nan]), "mahalanobis": np.array([3.0, 2.0, 1.0])}
    figure = plot_scores(
        windows,
        {"nll": np.arange(9.0)},
        size=4,
        labels={"nll": "surprise"},
        thresholds={"nll": 2.0},
        unusual={"nll": np.array([False, True, False])},
    )
    first, second = figure.axes
    assert first.get_ylabel() == "surprise"
    assert second.get_ylabel() == "mahalanobis"
    (shade,) = [p for p in first.patches if p.get_alpha() == 0.3]
    assert shade.get_bbox().intervalx.tolist() == [4.0, 8.0]
    assert not [p for p in second.patches if p.get_alpha() == 0.3]
