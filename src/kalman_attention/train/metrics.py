"""Where numbers go: a line of JSON each, always; TensorBoard, when asked for."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kalman_attention._files import sync_folder
from kalman_attention._reading import checked, parse_json, read_bytes

METRICS = "metrics.jsonl"

_MOST_BYTES = 1 << 30


class MetricsLog:
    """Append records to ``metrics.jsonl``, from the given step on.

    A resumed run removes what the run before it wrote after the checkpoint, so that every step is
    there once.

    Args:
        folder: of the run.
        step: of the checkpoint that the run goes on from; 0 starts anew.
        tensorboard: also write for TensorBoard, into ``tensorboard/``.
    """

    def __init__(self, folder: Path, step: int, *, tensorboard: bool = False) -> None:
        path = folder / METRICS
        if path.exists():
            os.truncate(path, _length_up_to(path, step))
        self._board = _open_board(folder / "tensorboard", step) if tensorboard else None
        self._file = path.open("a", encoding="utf-8")
        sync_folder(folder)  # or a crash of the machine could lose a new file with all its records

    def write(self, kind: str, step: int, seconds: float, values: Mapping[str, float]) -> None:
        """Append a record.

        Args:
            kind: ``"train"`` or ``"eval"``.
            step: updates made.
            seconds: of training so far.
            values: by name; a value that is not finite becomes null, as JSON has no other word.
        """
        finite = {name: x if math.isfinite(x) else None for name, x in values.items()}
        record = {"kind": kind, "step": step, **finite, "seconds": round(seconds, 3)}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(f"{kind}/{name}", value, step)

    def sync(self) -> None:
        """Wait until all records are on the disk."""
        os.fsync(self._file.fileno())
        if self._board is not None:
            self._board.flush()

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._board is not None:
            self._board.close()


def read_metrics(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All records of a run, in the order in which they were written."""
    path = Path(folder) / METRICS
    lines = read_bytes(path, _MOST_BYTES).splitlines()
    return [_record(line, f"line {i} of {path}") for i, line in enumerate(lines, 1)]


def _record(line: bytes, where: str) -> dict[str, Any]:
    record = parse_json(line, where)
    checked(str, record.get("kind"), "kind", where)
    checked(int, record.get("step"), "step", where)
    for name in record.keys() - {"kind"}:
        checked(float | None, record[name], name, where)
    return record


def _length_up_to(path: Path, step: int) -> int:
    """Bytes of the records up to a step; a line that a kill cut short ends them too."""
    length = 0
    with path.open("rb") as file:
        for line in file:
            try:
                recorded = json.loads(line)["step"]
            except (ValueError, KeyError, TypeError):
                return length
            if recorded > step or not line.endswith(b"\n"):
                return length
            length += len(line)
    return length


def _open_board(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError(
            "tensorboard=True needs the package tensorboard, which is not installed: "
            "pip install tensorboard. The same numbers are always in metrics.jsonl."
        ) from None
    return SummaryWriter(str(folder), purge_step=step + 1)
