"""An experiment: its cells at each scale, and how their results become tables."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from kalman_attention._tables import Table
from kalman_attention.recipes.cell import Cell

Scale: TypeAlias = Literal["smoke", "cpu", "paper"]
SCALES: tuple[Scale, ...] = ("smoke", "cpu", "paper")
"""Seconds, for the tests; hours on two cores, for results; as published, for a GPU."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One of the paper's experiments, or one of ours.

    Attributes:
        name: what the user types.
        source: where it stands in the paper, as a label of its LaTeX; None if it is ours.
        cells: all cells at a scale.
        tables: tables from the results that are there, which may be few.
        metric: what learning curves show.
        prepare: makes what the runs need in a folder, where the user names nothing, and returns
            the fields of the runs that say where it is.
    """

    name: str
    source: str | None
    cells: Callable[[Scale], Sequence[Cell]]
    tables: Callable[[Scale, Sequence[dict[str, Any]]], list[Table]]
    metric: str = "accuracy"
    prepare: Callable[[Path], dict[str, str]] | None = None

    def render(self, scale: Scale, results: Sequence[dict[str, Any]]) -> list[Table]:
        """The tables, and below each how many of the runs it speaks of are not there yet."""
        tables, total = self.tables(scale, results), len(self.cells(scale))
        if len(results) == total:
            return tables
        note = f"{total - len(results)} of {total} runs are not there yet"
        return [table._replace(notes=[*table.notes, note]) for table in tables]


def notes(scale: Scale, changes: Sequence[str]) -> list[str]:
    """What stands below a table: the scale, and what it changed of the published protocol."""
    return [f"scale {scale}", *changes]


def best(
    results: Sequence[dict[str, Any]], metric: str = "accuracy", **labels: str
) -> dict[str, Any] | None:
    """The result with the highest metric among those with the given labels; None if none is there.

    It is chosen by the validation set where there was one. Learning rates of a cell are compared
    this way. Seeds are not: see ``mean_of_best``.
    """
    chosen = [r for r in results if all(r["labels"].get(k) == v for k, v in labels.items())]
    return max(chosen, key=lambda r: r.get("validation", r["metrics"])[metric], default=None)


def mean_of_best(
    results: Sequence[dict[str, Any]], metric: str = "accuracy", **labels: str
) -> float | None:
    """Mean over seeds of the best learning rate's metric; None if no result is there."""
    seeds = sorted({r["labels"].get("seed", "") for r in results})
    found = [best(results, metric, **labels, **({"seed": s} if s else {})) for s in seeds]
    values = [r["metrics"][metric] for r in found if r is not None]
    return sum(values) / len(values) if values else None
