"""An experiment: its cells at each scale, and the tables of their results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from kalman_attention._tables import Table
from kalman_attention.recipes.cell import Cell

Scale: TypeAlias = Literal["smoke", "cpu", "paper"]
SCALES: tuple[Scale, ...] = ("smoke", "cpu", "paper")
"""Seconds, for tests; hours on two cores, for results; as published, for a GPU."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One of the paper's experiments, or one of ours.

    Attributes:
        name: its name on the command line.
        source: where it is in the paper, as a LaTeX label; None if it is not in the paper.
        cells: all cells at a scale.
        tables: tables of the available results, which may be incomplete.
        metric: the metric of the learning curves.
        prepare: creates the inputs of the runs in a folder, if the user passes none, and returns
            the fields of the runs that hold their paths.
    """

    name: str
    source: str | None
    cells: Callable[[Scale], Sequence[Cell]]
    tables: Callable[[Scale, Sequence[dict[str, Any]]], list[Table]]
    metric: str = "accuracy"
    prepare: Callable[[Path], dict[str, str]] | None = None

    def render(self, scale: Scale, results: Sequence[dict[str, Any]]) -> list[Table]:
        """The tables, each with a note on the number of runs that are still missing."""
        tables, total = self.tables(scale, results), len(self.cells(scale))
        if len(results) == total:
            return tables
        note = f"{total - len(results)} of {total} runs are still missing"
        return [table._replace(notes=[*table.notes, note]) for table in tables]


def notes(scale: Scale, changes: Sequence[str]) -> list[str]:
    """The notes below a table: the scale, and how it differs from the published protocol."""
    return [f"scale {scale}", *changes]


def best(
    results: Sequence[dict[str, Any]], metric: str = "accuracy", **labels: str
) -> dict[str, Any] | None:
    """The result with the highest metric among those with the given labels; None without results.

    It is chosen on the validation set if there was one. This is how the learning rates of a cell
    are compared. Seeds are averaged instead: see ``mean_of_best``.
    """
    chosen = [r for r in results if all(r["labels"].get(k) == v for k, v in labels.items())]
    return max(chosen, key=lambda r: r.get("validation", r["metrics"])[metric], default=None)


def mean_of_best(
    results: Sequence[dict[str, Any]], metric: str = "accuracy", **labels: str
) -> float | None:
    """Mean over seeds of the metric at the best learning rate; None without results."""
    seeds = sorted({r["labels"].get("seed", "") for r in results})
    found = [best(results, metric, **labels, **({"seed": s} if s else {})) for s in seeds]
    values = [r["metrics"][metric] for r in found if r is not None]
    return sum(values) / len(values) if values else None
