"""One cell of a table: a complete configuration as input, one JSON file as output."""

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
    """What a cell computes: a frozen dataclass with a method that executes it."""

    @property
    def updates(self) -> int:
        """Maximum number of steps, for the progress bar."""

    def execute(self, folder: Path, *, show: bool) -> dict[str, Any]:
        """Compute the result; ``folder`` holds what is needed to resume after a kill.

        Args:
            folder: folder for the checkpoints and metrics of this cell only.
            show: whether to print progress.

        Returns:
            The content of the result file: ``metrics`` and anything else that JSON can store.
        """


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One entry of an experiment.

    Attributes:
        experiment: name of the experiment that stores the result; others may use it.
        labels: what distinguishes it from other cells, such as model, task, lr and seed.
        run: what to compute.
    """

    experiment: str
    labels: Mapping[str, str]
    run: Run

    @property
    def name(self) -> str:
        """The labels joined into one path-like word."""
        return "/".join(self.labels.values())

    def matches(self, pattern: str) -> bool:
        """Whether every word of a pattern such as ``kla/compression`` is one of the labels."""
        return set(pattern.strip("/").split("/")) <= set(self.labels.values())


class Results:
    """The result files of all experiments at one scale.

    Args:
        root: root folder, with one folder per experiment and scale.
        scale: the scale.
    """

    def __init__(self, root: Path, scale: str) -> None:
        self.root, self.scale = root, scale

    def folder(self, experiment: str) -> Path:
        """The folder of an experiment."""
        return self.root / f"{experiment}-{self.scale}"

    def path(self, cell: Cell) -> Path:
        """The result file of a cell."""
        return self.folder(cell.experiment) / "cells" / f"{_file_name(cell)}.json"

    def workplace(self, cell: Cell) -> Path:
        """The folder for the checkpoints of a running cell, and for its best model afterwards."""
        return self.folder(cell.experiment) / "runs" / _file_name(cell)

    def load(self, cell: Cell) -> dict[str, Any] | None:
        """The result of a cell, or None; a result of a different configuration is an error."""
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
                f"{path} was computed with a different configuration: {'; '.join(changed)}. "
                "Move it away, or choose another folder."
            )
        return result

    def save(self, cell: Cell, found: dict[str, Any]) -> None:
        """Write the result of a cell, atomically."""
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
"""Fields of a result that are read back."""


def _finite(value: Any) -> Any:
    """Replace numbers that JSON does not support by null, as in ``metrics.jsonl``."""
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _file_name(cell: Cell) -> str:
    return cell.name.replace("/", ",")


def plain(value: Any) -> Any:
    """A configuration as read back from JSON, without fields that only hold a path."""
    places = [x.name for x in dataclasses.fields(value) if x.metadata.get("place")]
    found = dataclasses.asdict(value)
    return json.loads(json.dumps({k: v for k, v in found.items() if k not in places}))


def completed(stored: Any, like: Any) -> Any:
    """A stored configuration, with options that were added later at their defaults.

    Args:
        stored: the configuration as read from JSON.
        like: a dataclass of the same type, for its fields and their defaults.
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
    """Descriptions of the differences between two configurations."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        keys: Iterable[str] = dict.fromkeys([*ours, *theirs])
        found = [
            differences(ours.get(k), theirs.get(k), f"{where}.{k}" if where else k) for k in keys
        ]
        return [line for lines in found for line in lines]
    return [] if ours == theirs else [f"{where} is {theirs!r} there and {ours!r} here"]
