"""``kla bench gpu``: report of a GPU machine: accuracy, the paper's scaling figures, resources."""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from kalman_attention.cli import bench_roofline, bench_scan, check, check_compile
from kalman_attention.cli.measure import save_results
from kalman_attention.ops.engines import ENGINES, REFERENCE
from kalman_attention.recipes.table import markdown_rows

COMPARED = (REFERENCE, "associative")
"""What the GPU engines are compared with: the recurrence, and the parallel scan in torch."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument("--lengths", nargs="+", type=int, default=bench_scan.LENGTHS, help="T")
    parser.add_argument("--batch", type=int, default=bench_scan.PAPER.B, help="B")
    parser.add_argument("--channels", type=int, default=bench_scan.PAPER.D, help="D")
    parser.add_argument("--slots", type=int, default=bench_scan.PAPER.N, help="N")
    parser.add_argument("--patience", type=float, default=20.0, help="seconds before giving up")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-report"), help="where it goes")
    parser.add_argument(
        "--dry-run", action="store_true", help="without a GPU: only what needs none"
    )


def run(args: argparse.Namespace) -> int:
    """Write report.md, report.json and figures; 1 without a GPU or when an engine is wrong."""
    device = torch.device("cuda")
    parts = [f"# GPU report\n\n{_about()}"]
    results: dict[str, Any] = {}
    code = 0
    if torch.cuda.is_available():
        engines = _usable(device)
        failed, rows = check.measure_engines(engines, device)
        parts.append("## Accuracy\n\n" + markdown_rows(check.ERROR_HEADER, rows))
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
    parts.append(
        "## Roofline\n\n" + markdown_rows(bench_roofline.HEADER, list(bench_roofline.table()))
    )
    parts.append("## Resources\n\n" + _resources())
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "report.md").write_text("\n\n".join(parts) + "\n")
    save_results(args.out / "report.json", results)
    print(f"report: {args.out / 'report.md'}")
    return code


def _about() -> str:
    if not torch.cuda.is_available():
        return "Dry run: no GPU here. Nothing below ran on hardware."
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}."


def _usable(device: torch.device) -> list[str]:
    names = check_compile.GPU_ENGINES
    usable = [n for n in names if n in ENGINES and not ENGINES[n].why_not(device, torch.float32)]
    for name in set(names).difference(usable):
        print(f"{name}: not usable here", file=sys.stderr)
    return usable


def _speed(
    args: argparse.Namespace, engines: list[str], device: torch.device, results: dict[str, Any]
) -> str:
    sweep = bench_scan.sweep_lengths(args, engines, device)
    results["sweep"] = sweep
    bench_scan.plot_sweep(sweep, args.out)
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
    for engine in check_compile.GPU_ENGINES:
        found = check_compile.compile_engine(engine, check_compile.ARCHITECTURES)
        if isinstance(found, str):
            rows.append([engine, f"not compiled: {found}", *[""] * 5])
        else:
            rows += check_compile.table(engine, found)
    return markdown_rows(check_compile.HEADER, rows)
