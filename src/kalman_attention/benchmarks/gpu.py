"""``kla bench gpu``: report on a GPU: accuracy, the paper's scaling figures, resources."""

import sys
from pathlib import Path
from typing import Any

import torch

from kalman_attention._tables import markdown_rows
from kalman_attention.benchmarks import scan
from kalman_attention.benchmarks.measure import save_results
from kalman_attention.benchmarks.options import SweepOptions
from kalman_attention.ops.engines import ENGINES, REFERENCE
from kalman_attention.tools import ARCHITECTURES, roofline
from kalman_attention.tools import engines as engine_checks

COMPARED = (REFERENCE, "associative")
"""What the GPU engines are compared with: the loop over tokens and the parallel scan in torch."""


def report_gpu(options: SweepOptions, *, out: Path, dry_run: bool = False) -> bool:
    """Write ``report.md``, ``report.json`` and figures about the engines of a GPU.

    Args:
        options: sizes of the sweep.
        out: folder for the report.
        dry_run: without a GPU, write what can be known without one.

    Returns:
        Whether every engine satisfies the accuracy contract; if not, nothing is timed.

    Raises:
        ValueError: if torch sees no GPU and this is no dry run.
    """
    parts = [f"# GPU report\n\n{_about()}"]
    results: dict[str, Any] = {}
    accurate = True
    if torch.cuda.is_available():
        device = torch.device("cuda")
        engines = _usable(device)
        failed, rows = engine_checks.measure_engines(engines, device)
        accurate = not failed
        parts.append("## Accuracy\n\n" + markdown_rows(engine_checks.ERROR_HEADER, rows))
        results["accuracy"] = rows
        if accurate:
            results["sweep"] = scan.sweep_lengths(options, [*COMPARED, *engines], device)
            scan.plot_sweep(results["sweep"], out)
            parts.append(_speed(results["sweep"]))
    elif not dry_run:
        raise ValueError(
            "torch sees no GPU here, so there is nothing to report. `kla bench gpu --dry-run` "
            "writes what can be known without one: compiled resources and the roofline."
        )
    parts.append("## Roofline\n\n" + markdown_rows(roofline.HEADER, list(roofline.table())))
    parts.append("## Resources\n\n" + _resources())
    save_results(out / "report.json", results)
    (out / "report.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    print(f"report: {out / 'report.md'}")
    return accurate


def _about() -> str:
    if not torch.cuda.is_available():
        return "Dry run: no GPU here. Nothing below ran on hardware."
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}."


def _usable(device: torch.device) -> list[str]:
    names = engine_checks.GPU_ENGINES
    usable = [n for n in names if n in ENGINES and not ENGINES[n].why_not(device, torch.float32)]
    for name in set(names).difference(usable):
        print(f"{name}: not usable here", file=sys.stderr)
    return usable


def _speed(sweep: dict[str, Any]) -> str:
    parts = ["## Speed"]
    for kind, found in sweep["passes"].items():
        lengths = sorted({T for row in found.values() for T in row["seconds"]})
        rows = [
            [engine, *(_milliseconds(row["seconds"].get(T)) for T in lengths), row["gave_up"] or ""]
            for engine, row in found.items()
        ]
        header = ["engine", *(f"T={T}" for T in lengths), "gave up"]
        parts.append(
            f"{kind}, {sweep['shape']}, float32, milliseconds\n\n{markdown_rows(header, rows)}"
        )
    return "\n\n".join(parts)


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.3f}"


def _resources() -> str:
    rows: list[list[str]] = []
    for engine in engine_checks.GPU_ENGINES:
        found = engine_checks.compile_engine(engine, ARCHITECTURES)
        if isinstance(found, str):
            rows.append([engine, f"not compiled: {found}", *[""] * 5])
        else:
            rows += engine_checks.resource_rows(engine, found)
    return markdown_rows(engine_checks.RESOURCE_HEADER, rows)
