"""The options of a training run, as plain data that JSON can represent."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from kalman_attention.train.schedule import constant, cosine, trapezoidal

# ``threads`` may change rounding, but a run must be able to move to another machine.
FREE = frozenset(
    {"eval_every", "log_every", "save_every", "save_seconds", "patience", "target", "threads"}
)
"""Fields that may change when a run is resumed, because no weight depends on them."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How to train; what to train is passed to ``fit``.

    Attributes:
        max_steps: number of updates; pass this or epochs.
        epochs: number of passes over the data, if it has a length.
        lr: learning rate, if no parameter groups are given.
        betas: Adam's betas, if no parameter groups are given.
        eps: Adam's epsilon, if no parameter groups are given.
        weight_decay: decoupled weight decay, if no parameter groups are given.
        clip: maximum norm of all gradients together; None for no clipping.
        schedule: ``"constant"``, ``"cosine"``, or the paper's ``"trapezoidal"``.
        warmup_steps: updates of linear warm-up before the schedule.
        decay_fraction: fraction of the updates in which the trapezoidal schedule decays.
        final_fraction: final value of the cosine and trapezoidal schedules.
        accumulate: batches per update; their losses have equal weight.
        eval_every: updates between evaluations, or ``"epoch"``; there is always one after the last
            update.
        log_every: updates between lines of training metrics.
        save_every: updates between checkpoints; None to use only ``save_seconds``.
        save_seconds: seconds between checkpoints; None to use only ``save_every``. The start, the
            end, an interruption and every best evaluation are always saved.
        monitor: metric of the evaluation that determines the best model; None for none.
        mode: whether the ``"max"`` or ``"min"`` of it is best.
        min_delta: smallest change that counts as an improvement.
        patience: stop after this many evaluations without improvement; None to disable.
        target: stop once the metric reaches this value; None to disable.
        seed: random seed.
        dtype: ``"float32"`` computes in the dtypes of the model, ``"bfloat16"`` under autocast. A
            CPU without instructions for bfloat16 multiplies in float32 and rounds the product.
        threads: number of torch threads; None leaves it unchanged. Matrix products may round
            differently with another number.
    """

    max_steps: int | None = None
    epochs: int | None = None
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float | None = None
    schedule: Literal["constant", "cosine", "trapezoidal"] = "constant"
    warmup_steps: int = 0
    decay_fraction: float = 0.4
    final_fraction: float = 0.0
    accumulate: int = 1
    eval_every: int | Literal["epoch"] | None = None
    log_every: int = 10
    save_every: int | None = None
    save_seconds: float | None = 60.0
    monitor: str | None = None
    mode: Literal["max", "min"] = "max"
    min_delta: float = 0.0
    patience: int | None = None
    target: float | None = None
    seed: int = 0
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        if (self.max_steps is None) == (self.epochs is None):
            raise ValueError("pass either max_steps or epochs, which set how long to train.")
        for name, (holds, rule) in self._rules().items():
            if not holds:
                raise ValueError(f"{name} must be {rule}, got {getattr(self, name)!r}.")
        if self.monitor is None and (self.patience is not None or self.target is not None):
            raise ValueError(
                "patience and target need a metric to monitor: set monitor to the name of one "
                "that the evaluation returns."
            )

    def _rules(self) -> dict[str, tuple[bool, str]]:
        whole = ("max_steps", "epochs", "accumulate", "log_every", "save_every", "patience")
        rules = {name: (_is_count(getattr(self, name)), "a whole number, 1 or more")
                 for name in (*whole, "threads")}  # fmt: skip
        for name in ("lr", "eps", "clip", "save_seconds"):
            value = getattr(self, name)
            rules[name] = (value is None or 0.0 < value < math.inf, "positive and finite")
        for name, words in _WORDS.items():
            rules[name] = (getattr(self, name) in words, f"one of {', '.join(words)}")
        every = self.eval_every
        rules["eval_every"] = (every == "epoch" or _is_count(every), "1 or more, or 'epoch'")
        for name in ("weight_decay", "min_delta", "warmup_steps"):
            rules[name] = (0 <= getattr(self, name) < math.inf, "0 or more, and finite")
        for name in ("decay_fraction", "final_fraction"):
            rules[name] = (0.0 <= getattr(self, name) <= 1.0, "between 0 and 1")
        betas = self.betas
        rules["betas"] = (
            len(betas) == 2 and all(0.0 <= b < 1.0 for b in betas), "two numbers in [0, 1)"
        )  # fmt: skip
        return rules

    def factor(self, step: int, total: int) -> float:
        """The factor of the schedule on all learning rates.

        Args:
            step: updates already made.
            total: number of updates of the whole run.
        """
        warmup, final = self.warmup_steps, self.final_fraction
        if self.schedule == "cosine":
            return cosine(step, total, warmup=warmup, final=final)
        if self.schedule == "trapezoidal":
            fraction = self.decay_fraction
            return trapezoidal(step, total, warmup=warmup, final=final, decay_fraction=fraction)
        return constant(step, total, warmup=warmup)

    def is_better(self, value: float, best: float | None) -> bool:
        """Whether a value of the monitored metric is a new best; NaN never is."""
        if math.isnan(value):
            return False
        if best is None:
            return True
        gain = value - best if self.mode == "max" else best - value
        return gain > self.min_delta

    def reaches_target(self, value: float) -> bool:
        """Whether a value of the monitored metric reaches the target."""
        if self.target is None:
            return False
        return value >= self.target if self.mode == "max" else value <= self.target

    def fixed(self) -> dict[str, Any]:
        """The fields that must not change when a run is resumed.

        The length is one of them only if the schedule depends on it.
        """
        free = FREE | ({"max_steps", "epochs"} if self.schedule == "constant" else set())
        return {name: value for name, value in self.to_dict().items() if name not in free}

    def to_dict(self) -> dict[str, Any]:
        """Convert to a dictionary of plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "TrainConfig":
        """The inverse of ``to_dict``, also after a round trip through JSON."""
        unknown = sorted(set(data) - {field.name for field in dataclasses.fields(cls)})
        if unknown:
            raise ValueError(
                f"this configuration has unknown fields: {', '.join(unknown)}. It was written by "
                "another version of the library, or is not a training configuration."
            )
        return cls(**data)


_WORDS = {
    "schedule": ("constant", "cosine", "trapezoidal"),
    "mode": ("max", "min"),
    "dtype": ("float32", "bfloat16"),
}


def _is_count(value: Any) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1)
