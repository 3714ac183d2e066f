"""``kla check``: which engines work here, which one ``auto`` picks, and whether they are right."""

import argparse
import platform
from pathlib import Path

import torch

from kalman_attention import __version__
from kalman_attention.cli import check_compile
from kalman_attention.cli.table import render
from kalman_attention.ops.cpu import library
from kalman_attention.ops.engines import ENGINES, REFERENCE, resolve
from kalman_attention.tools.selfcheck import Case, errors, make_call, misses, run_call

CASES = {
    "plain": Case(B=2, T=130, N=4, D=24),
    "long": Case(B=1, T=2048, N=2, D=8),
    "no process noise": Case(B=2, T=300, N=3, D=8, p_max=0.0, a_min=1e-3),
    "strong evidence": Case(B=2, T=100, N=4, D=8, lam_max=1e6),
    "left padding": Case(B=3, T=90, N=4, D=8, padding="left"),
    "right padding": Case(B=3, T=90, N=4, D=8, padding="right"),
    "packed": Case(B=1, T=150, N=4, D=8, documents=5),
}
"""What ``--run`` computes with every engine."""

ERROR_HEADER = ("engine", "case", "y, y_var", "belief", "gradients", "verdict")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument(
        "--run",
        action="store_true",
        help="run each usable engine against the float64 reference, values and gradients",
    )
    parser.add_argument("--engine", help="only this engine (with --run)")
    parser.add_argument(
        "--compile",
        nargs="*",
        metavar="ARCH",
        help="compile the GPU engines for these architectures (all of "
        f"{', '.join(check_compile.ARCHITECTURES)} if none is named); needs no GPU",
    )
    parser.add_argument("--markdown", type=Path, help="write the table of --compile here too")


def run(args: argparse.Namespace) -> int:
    """Print the engines; with ``--run`` also their errors. 1 if an engine breaks the contract."""
    if args.compile is not None:
        return check_compile.run(args.compile, args.markdown)
    device = _device()
    print(
        f"kalman_attention {__version__}, torch {torch.__version__}, "
        f"Python {platform.python_version()}, {torch.get_num_threads()} threads, "
        f"tensors on {device.type}\n"
    )
    print(render(["engine", "usable", "what it is"], _engine_rows(device)))
    print(f"\nauto on {device.type} means: {resolve('auto', device, torch.float32)}")
    _print_native()
    return _run_engines(args.engine, device) if args.run else 0


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _engine_rows(device: torch.device) -> list[list[str]]:
    rows = [[REFERENCE, "yes", "loop over time in torch, differentiated by autograd"]]
    for engine in ENGINES.values():
        reason = engine.why_not(device, torch.float32)
        says = engine.summary if reason is None else f"{engine.summary} (no: {reason})"
        rows.append([engine.name, "yes" if reason is None else "no", says])
    return rows


def _print_native() -> None:
    if library.why_not() is not None:
        return
    native = library.info()
    sets = ", ".join(native.isas)
    print(
        f"native library: {native.library}\n"
        f"  instruction set {native.isa} (can run: {sets}), up to {native.threads} threads "
        f"from {'torch' if native.pool == 'openmp' else 'a pool of its own'}"
    )


def _run_engines(only: str | None, device: torch.device) -> int:
    if only is not None:
        resolve(only, device, torch.float32)
    usable = [e for e in ENGINES.values() if e.why_not(device, torch.float32) is None]
    names = [only] if only else [REFERENCE, *(engine.name for engine in usable)]
    failed, rows = measure_engines(names, device)
    print("\nfloat32 against the float64 reference: max|error| / max|reference|")
    print("allowed: 1e-5 for y and y_var, 1e-4 for the last belief and every gradient\n")
    print(render(ERROR_HEADER, rows))
    return 1 if failed else 0


def measure_engines(names: list[str], device: torch.device) -> tuple[bool, list[list[str]]]:
    """Errors of engines in all ``CASES``: whether one breaks the contract, and rows of a table."""
    rows, failed = [], False
    for case_name, case in CASES.items():
        call = make_call(case)
        truth = run_call(call, REFERENCE, torch.float64)
        for name in names:
            found = errors(run_call(call, name, torch.float32, device=device.type), truth)
            missed = misses(found)
            failed = failed or bool(missed)
            rows.append([name, case_name, *_worst(found), _verdict(missed)])
    rows.sort(key=lambda row: names.index(row[0]))
    return failed, rows


def _worst(found: dict[str, float]) -> list[str]:
    groups = {"y": 0.0, "state": 0.0, "d": 0.0}
    for name, error in found.items():
        group = "d" if name.startswith("d ") else name.partition(".")[0].partition("_")[0]
        groups[group] = max(groups[group], error)
    return [f"{error:.1e}" for error in groups.values()]


def _verdict(missed: dict[str, float]) -> str:
    return "ok" if not missed else "MISSES: " + ", ".join(missed)
