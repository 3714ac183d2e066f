"""One cell of a table: a complete configuration on the way in, one JSON file on the way out."""

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kalman_attention._files import write_json
from kalman_attention._reading import checked, read_json
from kalman_attention.recipes.machine import about


class Run(Protocol):
    """What a cell computes: a frozen dataclass that knows how to carry itself out."""

    @property
    def updates(self) -> int:
        """The most steps it takes, for showing how far it is."""

    def execute(self, folder: Path, *, show: bool) -> dict[str, Any]:
        """Compute, keeping what is needed to go on after a kill in ``folder``.

        Args:
            folder: for checkpoints and metrics of this cell alone.
            show: whether to print progress.

        Returns:
            What goes into the result file: ``metrics`` and anything else that survives JSON.
        """


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One entry of an experiment.

    Attributes:
        experiment: name of the experiment that keeps the result; others may use it.
        labels: what tells it from the other cells, such as model, task, lr and seed.
        run: what to compute.
    """

    experiment: str
    labels: Mapping[str, str]
    run: Run

    @property
    def name(self) -> str:
        """The labels in one path-like word."""
        return "/".join(self.labels.values())

    def matches(self, pattern: str) -> bool:
        """Whether every word of a pattern such as ``kla/compression`` is one of the labels."""
        return set(pattern.strip("/").split("/")) <= set(self.labels.values())


class Results:
    """The files of all experiments at one scale.

    Args:
        root: where they are, in a folder for each experiment and scale.
        scale: which scale.
    """

    def __init__(self, root: Path, scale: str) -> None:
        self.root, self.scale = root, scale

    def folder(self, experiment: str) -> Path:
        """Where everything of an experiment is."""
        return self.root / f"{experiment}-{self.scale}"

    def path(self, cell: Cell) -> Path:
        """The file of a cell."""
        return self.folder(cell.experiment) / "cells" / f"{_file_name(cell)}.json"

    def workplace(self, cell: Cell) -> Path:
        """Where a cell keeps checkpoints while it runs, and its best model afterwards."""
        return self.folder(cell.experiment) / "runs" / _file_name(cell)

    def load(self, cell: Cell) -> dict[str, Any] | None:
        """The result of a cell, or None; one made with another configuration is an error."""
        path = self.path(cell)
        if not os.path.lexists(path):
            return None
        result = read_json(path)
        for name, kind in _KINDS.items():
            checked(kind, result.get(name), name, str(path))
        changed = differences(plain(cell.run), completed(result["config"], cell.run))
        changed += differences(dict(cell.labels), result["labels"], "labels")
        if changed:
            raise ValueError(
                f"{path} was made with another configuration: {'; '.join(changed)}. "
                "Move it away, or choose another folder."
            )
        return result

    def save(self, cell: Cell, found: dict[str, Any]) -> None:
        """Write the result of a cell, at once or not at all."""
        result = {
            "labels": dict(cell.labels),
            **_finite(found),
            "config": plain(cell.run),
            "about": about(),
        }
        path = self.path(cell)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, result)


_KINDS: dict[str, Any] = {
    "config": dict[str, Any],
    "labels": dict[str, str],
    "metrics": dict[str, float | None],
    "curve": list[dict[str, float | None]] | None,
    "positions": list[float] | None,
}
"""Fields of a result that are read again."""


def _finite(value: Any) -> Any:
    """Data without numbers that JSON does not know: they become null, as in ``metrics.jsonl``."""
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _file_name(cell: Cell) -> str:
    return cell.name.replace("/", ",")


def plain(value: Any) -> Any:
    """A configuration as JSON would give it back, without fields that only name a place."""
    places = [x.name for x in dataclasses.fields(value) if x.metadata.get("place")]
    found = dataclasses.asdict(value)
    return json.loads(json.dumps({k: v for k, v in found.items() if k not in places}))


def completed(stored: Any, like: Any) -> Any:
    """A stored configuration, with options that came later at their defaults.

    Args:
        stored: as JSON has it.
        like: a dataclass of the same kind, which knows its fields and their defaults.
    """
    if not (dataclasses.is_dataclass(like) and isinstance(stored, dict)):
        return stored
    found = dict(stored)
    for field in dataclasses.fields(like):
        if field.metadata.get("place"):
            continue
        if field.name in stored:
            found[field.name] = completed(stored[field.name], getattr(like, field.name))
        elif field.default is not dataclasses.MISSING:
            default = json.dumps(field.default, default=dataclasses.asdict)
            found[field.name] = json.loads(default)
    return found


def differences(ours: Any, theirs: Any, where: str = "") -> list[str]:
    """Where two configurations differ, in words."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        keys: Iterable[str] = dict.fromkeys([*ours, *theirs])
        found = [
            differences(ours.get(k), theirs.get(k), f"{where}.{k}" if where else k) for k in keys
        ]
        return [line for lines in found for line in lines]
    return [] if ours == theirs else [f"{where} is {theirs!r} there and {ours!r} here"]
