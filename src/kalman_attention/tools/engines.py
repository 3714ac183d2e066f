"""``kla check``: which engines work here, how accurate they are, what they compile to."""

import importlib
import importlib.util
import platform
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from kalman_attention import __version__
from kalman_attention._tables import markdown_rows, render
from kalman_attention.ops.cpu import library
from kalman_attention.ops.engines import ENGINES, REFERENCE, resolve
from kalman_attention.tools.resources import KernelResources
from kalman_attention.tools.selfcheck import Case, errors, make_call, misses, run_call

CASES = {
    "plain": Case(B=2, T=130, N=4, D=24),
    "long": Case(B=1, T=2048, N=2, D=8),
    "no process noise": Case(B=2, T=300, N=3, D=8, p_max=0.0, a_min=1e-3),
    "strong evidence": Case(B=2, T=100, N=4, D=8, lam_max=1e6),
    "left padding": Case(B=3, T=90, N=4, D=8, padding="left"),
    "right padding": Case(B=3, T=90, N=4, D=8, padding="right"),
    "packed": Case(B=1, T=150, N=4, D=8, documents=5),
    "time gaps": Case(B=2, T=100, N=4, D=8, gaps="channel"),
    "shared precision": Case(B=2, T=100, N=8, D=8, share=4),
    "both, packed": Case(B=1, T=150, N=8, D=8, share=2, gaps="token", documents=5),
}
"""The calls that ``kla check --run`` computes with every engine that supports them."""

ERROR_HEADER = ("engine", "case", "y, y_var", "belief", "gradients", "verdict")

GPU_ENGINES = ("triton", "cuda")

RESOURCE_HEADER = ("engine", "kernel", "variant", "architecture", "registers", "spilled", "shared")
"""Numbers are per architecture, in its order; spilled and shared are bytes."""


def show_engines() -> None:
    """Print every engine, usable or why not, and which one ``auto`` means."""
    device = here()
    print(
        f"kalman_attention {__version__}, torch {torch.__version__}, "
        f"Python {platform.python_version()}, {torch.get_num_threads()} threads, "
        f"tensors on {device.type}\n"
    )
    print(render(["engine", "usable", "what it is"], _engine_rows(device)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a missing native engine is reported below
        print(f"\nauto on {device.type} means: {resolve('auto', device, torch.float32)}")
    _print_native()


def here() -> torch.device:
    """The device to check: the GPU, if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _engine_rows(device: torch.device) -> list[list[str]]:
    rows = [[REFERENCE, "yes", "loop over time in torch, differentiated by autograd"]]
    for engine in ENGINES.values():
        reason = engine.why_not(device, torch.float32)
        says = engine.summary if reason is None else f"{engine.summary} (no: {reason})"
        rows.append([engine.name, "yes" if reason is None else "no", says])
    return rows


def _print_native() -> None:
    missing = library.why_not()
    if missing is not None:
        print(f"native library: {missing}")
        return
    native = library.info()
    sets = ", ".join(native.isas)
    print(
        f"native library: {native.library}\n"
        f"  instruction set {native.isa} (can run: {sets}), up to {native.threads} threads "
        f"from {'torch' if native.pool == 'openmp' else 'a pool of its own'}"
    )


def run_engines(only: str | None) -> int:
    """Print the errors of one engine, or of all usable ones; 1 if one breaks the contract."""
    device = here()
    if only is not None:
        resolve(only, device, torch.float32)
    usable = [e for e in ENGINES.values() if e.why_not(device, torch.float32) is None]
    names = [only] if only else [REFERENCE, *(engine.name for engine in usable)]
    failed, rows = measure_engines(names, device)
    print("\nfloat32 against the float64 reference: max|error| / max|reference|")
    print("allowed: 1e-5 for y and y_var, 1e-4 for the final state and every gradient\n")
    print(render(ERROR_HEADER, rows))
    return 1 if failed else 0


def measure_engines(names: list[str], device: torch.device) -> tuple[bool, list[list[str]]]:
    """Errors of engines in all ``CASES``: whether one breaks the contract, and rows of a table."""
    rows, failed = [], False
    for case_name, case in CASES.items():
        call = make_call(case)
        truth = run_call(call, REFERENCE, torch.float64)
        for name in names:
            reason = _not_yet(name, case)
            if reason is not None:
                rows.append([name, case_name, "-", "-", "-", reason])
                continue
            found = errors(run_call(call, name, torch.float32, device=device.type), truth)
            missed = misses(found)
            failed = failed or bool(missed)
            rows.append([name, case_name, *_worst(found), _verdict(missed)])
    rows.sort(key=lambda row: names.index(row[0]))
    return failed, rows


def _not_yet(name: str, case: Case) -> str | None:
    """Why an engine does not support a case, or None."""
    if name != REFERENCE and case.gaps != "none" and not ENGINES[name].gaps:
        return "does not take dt yet"
    if name != REFERENCE and case.share > 1 and not ENGINES[name].shared:
        return "does not take shared precisions yet"
    return None


def _worst(found: dict[str, float]) -> list[str]:
    groups = {"y": 0.0, "state": 0.0, "d": 0.0}
    for name, error in found.items():
        group = "d" if name.startswith("d ") else name.partition(".")[0].partition("_")[0]
        groups[group] = max(groups[group], error)
    return [f"{error:.1e}" for error in groups.values()]


def _verdict(missed: dict[str, float]) -> str:
    return "ok" if not missed else "MISSES: " + ", ".join(missed)


def show_resources(architectures: Sequence[str], path: Path | None) -> int:
    """Print the resources of every kernel; return 1 if nothing could be compiled.

    Args:
        architectures: such as ``sm_80``.
        path: file for the table as Markdown, or None.
    """
    rows: list[list[str]] = []
    for engine in GPU_ENGINES:
        found = compile_engine(engine, architectures)
        if isinstance(found, str):
            print(f"{engine}: not compiled: {found}")
        else:
            rows += resource_rows(engine, found)
    if not rows:
        print("nothing to compile", file=sys.stderr)
        return 1
    print("\n" + render(RESOURCE_HEADER, rows))
    spilling = [row for row in rows if set(row[5]) - set("0 /")]
    print(f"\n{len(rows)} variants compiled, {len(spilling)} of them spill registers")
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(markdown_rows(RESOURCE_HEADER, rows) + "\n", encoding="utf-8")
        print(f"table: {path}")
    return 0


def resource_rows(engine: str, found: Sequence[KernelResources]) -> list[list[str]]:
    """One row per kernel and variant, with the numbers of all architectures."""
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
    """Resources of an engine's kernels, or why they are not available."""
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
