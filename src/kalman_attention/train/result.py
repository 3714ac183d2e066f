"""What a run leaves behind."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from kalman_attention.train.metrics import read_metrics

Reason = Literal["max_steps", "patience", "target"]


class Best(NamedTuple):
    """The best evaluation of a run; the last of several that are equally good.

    Attributes:
        step: updates made until then.
        value: of the monitored metric.
        metrics: all of that evaluation.
        folder: its checkpoint, for ``load_weights`` (and ``load_model``, if it is one of ours).
    """

    step: int
    value: float
    metrics: dict[str, float]
    folder: Path


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a run ended. The model that was trained has its last weights, not its best.

    Attributes:
        folder: of the run.
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
