"""Metrics: a line of JSON per record, and optional boards that plot them.

Also the result of a run: its best evaluation, why it ended, and its records.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from kalman_attention._files import sync_folder
from kalman_attention._reading import checked, parse_json, read_bytes

METRICS = "metrics.jsonl"

# A limit against files that are not ours; a million records take about 200 MB.
_MOST_BYTES = 1 << 30


class MetricsLog:
    """Append records to ``metrics.jsonl``, after the given step.

    A resumed run removes the records after its checkpoint, so that every step occurs once.

    Args:
        folder: folder of the run.
        step: step of the checkpoint that the run continues from; 0 for a new run.
        boards: names in ``BOARDS`` that also receive the records, in a folder of that name.
    """

    def __init__(self, folder: Path, step: int, *, boards: Sequence[str] = ()) -> None:
        unknown = [name for name in boards if name not in BOARDS]
        if unknown:
            raise ValueError(f"unknown board {', '.join(unknown)}. Known: {', '.join(BOARDS)}.")
        path = folder / METRICS
        # Records after the checkpoint belong to updates that will be repeated.
        if path.exists():
            os.truncate(path, _length_up_to(path, step))
        self._boards = [BOARDS[name](folder, step) for name in boards]
        self._file = path.open("a", encoding="utf-8")
        sync_folder(folder)  # otherwise a crash of the machine could lose the new file

    def write(self, kind: str, step: int, seconds: float, values: Mapping[str, float]) -> None:
        """Append a record.

        Args:
            kind: ``"train"`` or ``"eval"``.
            step: updates made.
            seconds: seconds of training so far.
            values: values by name; those that are not finite become null, because JSON has neither
                NaN nor infinity.
        """
        finite = {name: x if math.isfinite(x) else None for name, x in values.items()}
        record = {"kind": kind, "step": step, **finite, "seconds": round(seconds, 3)}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        for board in self._boards:
            board.write({f"{kind}/{name}": value for name, value in values.items()}, step)

    def sync(self) -> None:
        """Flush all records to disk."""
        os.fsync(self._file.fileno())
        for board in self._boards:
            board.flush()

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        for board in self._boards:
            board.close()


def read_metrics(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All records of a run, in order."""
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
    """Bytes of the records up to a step, or up to a line that a kill truncated."""
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


class Board(Protocol):
    """A service that plots curves."""

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Record the values of a step."""

    def flush(self) -> None:
        """Write everything to disk."""

    def close(self) -> None:
        """Finish."""


class TensorBoard:
    """Events in ``tensorboard/``; those after the step that a run continues from are dropped.

    Args:
        folder: folder of the run.
        step: step of the checkpoint that the run continues from.
    """

    def __init__(self, folder: Path, step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise _missing("tensorboard", "pip install tensorboard") from None
        self._writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Take the values of a step."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """Write pending events."""
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases in ``wandb/``, configured by its variables, such as WANDB_MODE.

    The run is identified by its folder, so that a resumed run continues there. Its axis is
    ``step``.

    Args:
        folder: folder of the run.
        step: unused: a step that is repeated gets another point.
    """

    def __init__(self, folder: Path, step: int) -> None:
        try:
            import wandb
        except ImportError:
            raise _missing("wandb", "pip install 'kalman_attention[wandb]'") from None
        whole = folder.resolve()
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "kalman_attention"),
            name=whole.name,
            id=hashlib.sha256(str(whole).encode()).hexdigest()[:16],
            resume="allow",
            dir=str(whole),
            settings=wandb.Settings(console="off"),  # progress is for people, not for the record
        )
        self._run.define_metric("*", step_metric="step")

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Take the values of a step."""
        self._run.log({**values, "step": step})

    def flush(self) -> None:
        """Nothing to do: its own process writes immediately."""

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


BOARDS: dict[str, Callable[[Path, int], Board]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
}
"""What ``fit(..., boards=...)`` can name."""


def _missing(name: str, way: str) -> ValueError:
    return ValueError(
        f"the board {name} needs the package {name}, which is not installed: {way}. The same "
        "values are always in metrics.jsonl."
    )


Reason = Literal["max_steps", "patience", "target"]


class Best(NamedTuple):
    """The best evaluation of a run; the last one if several are equally good.

    Attributes:
        step: updates made so far.
        value: value of the monitored metric.
        metrics: all metrics of that evaluation.
        folder: its checkpoint, for ``load_weights`` (and ``load_model`` for models of this
            library).
    """

    step: int
    value: float
    metrics: dict[str, float]
    folder: Path


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a run ended. The trained model has its last weights, not its best.

    Attributes:
        folder: folder of the run.
        step: updates made.
        reason: why it ended: ``"max_steps"``, ``"patience"`` or ``"target"``.
        best: the best evaluation; None if nothing was monitored.
    """

    folder: Path
    step: int
    reason: Reason
    best: Best | None

    @property
    def history(self) -> list[dict[str, Any]]:
        """All records of ``metrics.jsonl``, of kind ``"train"`` and ``"eval"``."""
        return read_metrics(self.folder)
