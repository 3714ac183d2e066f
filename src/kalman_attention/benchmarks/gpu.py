"""``kla bench gpu``: report of a GPU machine: accuracy, the paper's scaling figures, resources."""

import argparse
import sys
from typing import Any

import torch

from kalman_attention._tables import markdown_rows
from kalman_attention.benchmarks import roofline, scan
from kalman_attention.benchmarks.measure import Shape, save_results
from kalman_attention.ops.engines import ENGINES, REFERENCE
from kalman_attention.tools import ARCHITECTURES
from kalman_attention.tools import engines as engine_checks

COMPARED = (REFERENCE, "associative")
"""What the GPU engines are compared with: the recurrence, and the parallel scan in torch."""


def run(args: argparse.Namespace) -> int:
    """Write report.md, report.json and figures; 1 without a GPU or when an engine is wrong."""
    device = torch.device("cuda")
    parts = [f"# GPU report\n\n{_about()}"]
    results: dict[str, Any] = {}
    code = 0
    if torch.cuda.is_available():
        engines = _usable(device)
        failed, rows = engine_checks.measure_engines(engines, device)
        parts.append("## Accuracy\n\n" + markdown_rows(engine_checks.ERROR_HEADER, rows))
        results["accuracy"] = rows
        code = 1 if failed else 0
        if not failed:
            parts.append(_speed(args, [*COMPARED, *engines], device, results))
    elif not args.dry_run:
        print(
            "torch sees no GPU here, so there is nothing to report. `kla bench gpu --dry-run` "
            "writes what can be known without one: compiled resources and the roofline.",
            file=sys.stderr,
        )
        return 1
    parts.append("## Roofline\n\n" + markdown_rows(roofline.HEADER, list(roofline.table())))
    parts.append("## Resources\n\n" + _resources())
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "report.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    save_results(args.out / "report.json", results)
    print(f"report: {args.out / 'report.md'}")
    return code


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


def _speed(
    args: argparse.Namespace, engines: list[str], device: torch.device, results: dict[str, Any]
) -> str:
    shape = Shape(args.batch, scan.PAPER.T, args.channels, args.slots)
    sweep = scan.sweep_lengths(shape, args.lengths, args.patience, engines, device)
    results["sweep"] = sweep
    scan.plot_sweep(sweep, args.out)
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
