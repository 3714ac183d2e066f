"""``kla check --compile``: compile the GPU engines ahead of time, on a machine without a GPU."""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from kalman_attention.cli.table import render
from kalman_attention.ops.engines import ENGINES
from kalman_attention.recipes.table import markdown_rows
from kalman_attention.tools.resources import KernelResources

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
"""A100, H100 and B200."""

GPU_ENGINES = ("triton", "cuda")

HEADER = ("engine", "kernel", "variant", "architecture", "registers", "spilled", "shared")
"""Numbers are per architecture, in its order; spilled and shared are bytes."""


def run(architectures: Sequence[str], path: Path | None) -> int:
    """Print what every kernel needs; 1 if nothing could be compiled.

    Args:
        architectures: such as ``sm_80``; none means all of ``ARCHITECTURES``.
        path: where to write the table as Markdown too, or None.
    """
    rows: list[list[str]] = []
    for engine in GPU_ENGINES:
        found = compile_engine(engine, architectures or ARCHITECTURES)
        if isinstance(found, str):
            print(f"{engine}: not compiled: {found}")
        else:
            rows += table(engine, found)
    if not rows:
        print("nothing to compile", file=sys.stderr)
        return 1
    print("\n" + render(HEADER, rows))
    spilling = [row for row in rows if set(row[5]) - set("0 /")]
    print(f"\n{len(rows)} variants compiled, {len(spilling)} of them spill registers")
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(markdown_rows(HEADER, rows) + "\n")
        print(f"table: {path}")
    return 0


def table(engine: str, found: Sequence[KernelResources]) -> list[list[str]]:
    """One row per kernel and variant, with the numbers of all architectures side by side."""
    groups: dict[tuple[str, str], list[KernelResources]] = {}
    for row in found:
        groups.setdefault((row.kernel, row.variant), []).append(row)
    return [
        [engine, *names, *(_joined(column) for column in list(zip(*rows, strict=True))[2:])]
        for names, rows in groups.items()
    ]


def _joined(cells: Sequence[object]) -> str:
    return " / ".join(str(cell) for cell in cells)


def compile_engine(engine: str, architectures: Sequence[str]) -> list[KernelResources] | str:
    """Resources of an engine's kernels, or why they cannot be had."""
    if engine not in ENGINES:
        return "this version has no such engine"
    if engine == "triton" and ENGINES[engine].missing is not None:
        return str(ENGINES[engine].missing)
    name = f"kalman_attention.tools.{engine}_resources"
    if importlib.util.find_spec(name) is None:
        return "it does not report resources"
    try:
        found: list[KernelResources] = importlib.import_module(name).resources(architectures)
    except (RuntimeError, ValueError) as reason:
        return str(reason)
    return found
