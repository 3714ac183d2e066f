"""What ``kla demo`` shows: a filter, two models that learn, and the speed of the engines."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kalman_attention import ScanOutput, discretise, kla_scan
from kalman_attention._tables import Table, print_table, render
from kalman_attention.benchmarks.measure import Shape, fastest, make_inputs, scan_pass
from kalman_attention.cli.watch import CellProgress
from kalman_attention.ops.engines import ENGINES, REFERENCE
from kalman_attention.recipes.cell import Results
from kalman_attention.recipes.demo import EXPERIMENT, SUMMARY, TRACKING, TRACKING_SUMMARY
from kalman_attention.recipes.inspection import Trained, load_trained, variance_trace
from kalman_attention.recipes.runner import run_cells
from kalman_attention.report import curves
from kalman_attention.report.charts import Axis, Chart, Line, Panel
from kalman_attention.report.page import Section, write_page

LEAD = (
    "The results of kla demo on this machine: a filter that quantifies its uncertainty, two models "
    "trained for a minute, and the speed of the engines."
)
NOISE = 0.4
GAP = slice(170, 230)  # tokens without an observation
_INTERVAL = 1.96  # standard deviations on either side that contain 95 % of a normal distribution

_SHAPE = Shape(B=4, T=512, D=256, N=16)


def demonstrate(out: Path) -> None:
    """Show the filter, train models, time the engines, and write the page."""
    print("1. The filter\n")
    belief = show_belief(out)
    print("\n2. Learning: copy the 4 relevant tokens out of 32, and track permutations\n")
    learning = _learn(Results(out, "cpu"))
    print("\n3. Speed of the engines on this machine\n")
    speed = engine_speed()
    print_table(speed)
    sections = [
        Section(
            name="filter",
            title="The filter",
            text="A signal observed with noise, and not observed at all in the middle: without "
            "evidence from tokens, the uncertainty grows.",
            charts=[belief],
        ),
        *learning,
        Section(name="speed", title="Speed", tables=[speed]),
    ]
    try:
        write_page(out / "report.html", LEAD, sections)
    except ModuleNotFoundError as error:
        print(f"\nno page: it needs {error.name} (pip install 'kalman_attention[report]')")
    else:
        print(f"\nreport: {out / 'report.html'}")


def _learn(results: Results) -> list[Section]:
    cells = EXPERIMENT.cells("cpu")
    watch = CellProgress(results, period=10.0)
    found = run_cells(cells, results, jobs=2, say=watch.say, watch=watch)
    copying, tracking = EXPERIMENT.tables("cpu", found)
    for table in (copying, tracking):
        print_table(table)
    trained = load_trained(results, cells[0])
    variance = [_variance(trained)] if trained is not None else []
    return [
        Section(
            name="learning",
            title="Learning",
            text=f"{SUMMARY}.",
            tables=[copying],
            charts=[*curves.learning_chart(EXPERIMENT, found), *variance],
        ),
        Section(
            name="tracking",
            title="State tracking",
            text=TRACKING_SUMMARY,
            tables=[tracking],
            charts=[_lengths(found)],
        ),
    ]


def _lengths(found: Sequence[dict[str, Any]]) -> Chart:
    """Accuracy over length of the models for state tracking."""
    lines = {
        result["labels"]["model"]: [x["accuracy"] for x in result["lengths"].values()]
        for result in found
        if result["lengths"]
    }
    caption = "Fraction of sequences without an error over their length; the mark is the longest "
    caption += "length in training."
    return curves.length_chart(
        TRACKING.test_lens, {"A5, one block": lines}, TRACKING.seq_len, caption
    )


def _variance(trained: Trained) -> Chart:
    """Posterior variance and gain of a model over one sequence; tokens to copy are marked."""
    trace = variance_trace(trained)
    means = {"variance": trace.variance, "gain": trace.gain}
    return Chart(
        caption="Posterior variance and Kalman gain of the trained KLA over one sequence, means "
        "over channels; lines mark the tokens to copy.",
        panels=[Panel("", [_line(name, x.mean(-1)) for name, x in means.items()])],
        x=Axis("token"),
        y=Axis("variance, gain"),
        marks=trace.marked,
    )


def _line(name: str, values: Tensor) -> Line:
    return Line(name, list(enumerate(values.tolist())))


def engine_speed() -> Table:
    """Time of a forward and backward pass with every usable engine, interleaved."""
    cpu = torch.device("cpu")
    usable = [e.name for e in ENGINES.values() if e.why_not(cpu, torch.float32) is None]
    names = [REFERENCE, *usable]
    inputs = make_inputs(_SHAPE, grad=True)
    runs = {name: scan_pass(inputs, name, backward=True) for name in names}
    seconds = fastest(runs, seconds=6.0, most=10)
    rows = [
        [name, f"{1e3 * seconds[name]:.1f}", f"{seconds[REFERENCE] / seconds[name]:.1f} x"]
        for name in sorted(names, key=lambda name: seconds[name])
    ]
    notes = [f"{_SHAPE}, float32, {torch.get_num_threads()} threads, minimum of several passes"]
    header = ["engine", "forward + backward, ms", "speed-up over the loop in torch"]
    return Table("Engines", header, rows, notes)


def show_belief(folder: Path) -> Chart:
    """Filter signals, print the accuracy of the posterior, and draw one."""
    a_bar, p_bar = (x.view(1, 1) for x in discretise(*torch.tensor([0.02, 0.15, 1.0])))
    signal = sample_prior(a_bar, p_bar)
    values, precision = observe(signal)
    out = filter_signals(values, precision, a_bar, p_bar)
    rows, T, _ = signal.shape
    print(f"{rows} random signals of {T} tokens with noise of standard deviation {NOISE}, hidden")
    print(f"from token {GAP.start} to {GAP.stop - 1}. The posterior of KLA after each token:\n")
    header = ["tokens", "rms error, raw", "rms error, KLA", "KLA expected", "truth inside 95 %"]
    print(render(header, _score(out, signal, values)))
    assert out.y_var is not None
    first = [x[0, :, 0] for x in (signal, values, out.y, out.y_var)]
    _save(folder, *first)
    return _belief(*first)


def sample_prior(a_bar: Tensor, p_bar: Tensor, rows: int = 1000, T: int = 400) -> Tensor:
    """Signals drawn from the prior that the filter assumes, ``[rows, T, 1]``."""
    noise = torch.randn(T + 1, rows, generator=torch.Generator().manual_seed(6))
    z, path = noise[0], []
    for t in range(T):
        z = a_bar[0, 0] * z + p_bar[0, 0].sqrt() * noise[t + 1]
        path.append(z)
    return torch.stack(path, dim=1).unsqueeze(-1)


def observe(signal: Tensor) -> tuple[Tensor, Tensor]:
    """Noisy values and their precisions; a precision of 0 means "not observed"."""
    noise = torch.randn(signal.shape, generator=torch.Generator().manual_seed(2))
    precision = torch.full_like(signal, NOISE**-2)
    precision[:, GAP] = 0.0
    return signal + NOISE * noise, precision


def filter_signals(v: Tensor, lam_v: Tensor, a_bar: Tensor, p_bar: Tensor) -> ScanOutput:
    """The op itself, with one slot (N = 1) and one channel (D = 1)."""
    ones = torch.ones_like(v)
    return kla_scan(ones, ones, v, lam_v, a_bar, p_bar, return_variance=True)


def _score(out: ScanOutput, signal: Tensor, values: Tensor) -> list[list[str]]:
    assert out.y_var is not None
    gap = torch.zeros(signal.shape[1], dtype=torch.bool)
    gap[GAP] = True
    error, deviation = out.y - signal, out.y_var.sqrt()
    rows = []
    for name, where in (("observed", ~gap), ("in the gap", gap)):
        raw = "-" if name == "in the gap" else f"{_rms((values - signal)[:, where]):.3f}"
        inside = (error.abs() < _INTERVAL * deviation)[:, where].float().mean()
        expected = f"{_rms(deviation[:, where]):.3f}"
        rows.append([name, raw, f"{_rms(error[:, where]):.3f}", expected, f"{100 * inside:.1f} %"])
    return rows


def _rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


def _belief(signal: Tensor, values: Tensor, mean: Tensor, variance: Tensor) -> Chart:
    edge = _INTERVAL * variance.sqrt()
    band = zip(range(len(mean)), (mean - edge).tolist(), (mean + edge).tolist(), strict=True)
    seen = [(t, v) for t, v in enumerate(values.tolist()) if not GAP.start <= t < GAP.stop]
    lines = [
        _line("posterior mean", mean),
        Line("observations", seen, joined=False),
        _line("signal", signal),
    ]
    return Chart(
        caption="Signal, observations, posterior mean, and 95 % interval (shaded).",
        panels=[Panel("", lines, [*band])],
        x=Axis("token"),
        y=Axis("value"),
    )


def _save(folder: Path, *first: Tensor) -> None:
    """The same figure as a file, if matplotlib is installed."""
    try:
        from kalman_attention.plots.beliefs import draw_belief
    except ModuleNotFoundError:
        return
    folder.mkdir(parents=True, exist_ok=True)
    observed = torch.ones(len(first[0]), dtype=torch.bool)
    observed[GAP] = False
    draw_belief(folder / "belief.png", *first, observed=observed)
