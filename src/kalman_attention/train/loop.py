"""The training loop: one for synthetic tasks and for language models."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from kalman_attention._progress import TrainingProgress
from kalman_attention.parallel.ranks import Parallel
from kalman_attention.train.checkpoint import (
    TrainingState,
    checkpoint_folder,
    locked,
    newest_checkpoint,
    point_to,
    prune_checkpoints,
    read_checkpoint,
    remove_leftovers,
    write_checkpoint,
)
from kalman_attention.train.config import TrainConfig
from kalman_attention.train.data import Batches
from kalman_attention.train.metrics import Best, MetricsLog, Reason, Result
from kalman_attention.train.objective import Evaluate, Loss
from kalman_attention.train.seeds import derive_seed, own_randomness, seed_global
from kalman_attention.train.signals import Signals, StopNow
from kalman_attention.train.snapshot import (
    check_identity,
    identity,
    load_optimiser,
    load_weights,
    snapshot_files,
)
from kalman_attention.train.update import Updater


def fit(
    model: nn.Module,
    batches: Batches,
    loss: Loss,
    config: TrainConfig,
    *,
    folder: str | os.PathLike[str],
    evaluate: Evaluate | None = None,
    groups: Sequence[dict[str, Any]] | None = None,
    about: Mapping[str, Any] | None = None,
    resume: bool = True,
    progress: bool = True,
    boards: Sequence[str] = (),
    command: str | None = None,
    parallel: Parallel | None = None,
) -> Result:
    """Train a model, from the start or from the newest checkpoint in the folder.

    If it is killed at any moment and called again with the same arguments, it produces the same
    bits as an uninterrupted run.

    Args:
        model: the model to train, in place, on its current device.
        batches: the data to train on.
        loss: the loss to minimise.
        config: options of the training.
        folder: folder of the run: ``checkpoints/``, links ``last`` and ``best``, ``metrics.jsonl``.
        evaluate: the evaluation to run every ``config.eval_every`` updates.
        groups: parameter groups for AdamW, such as ``optim.param_groups`` builds; None for one
            group with the learning rate of the config.
        about: anything else that defines the run, as values that JSON can represent; a checkpoint
            with other values is rejected.
        resume: False rejects a folder that already has checkpoints; nothing is ever overwritten.
        progress: show progress on standard error.
        boards: additional destinations of the metrics: "tensorboard", "wandb".
        command: command that continues the run, shown after an interruption; None for the command
            that was run.
        parallel: the processes that train together, all of which call ``fit`` in the same way; a
            run can be resumed with any number of them. None trains in this process alone.

    Returns:
        A ``Result``, with ``result.history`` and ``result.best``.

    Raises:
        NonFiniteError: a loss or gradient is infinite or NaN; the update is saved for inspection.
        KeyboardInterrupt: Ctrl-C, after saving. SIGTERM and SIGHUP, after saving, raise
            SystemExit with the codes 143 and 129.
    """
    where = Path(folder)
    where.mkdir(parents=True, exist_ok=True)
    device = next(model.parameters()).device
    parallel = parallel or Parallel()
    progress = progress and parallel.main
    with (
        locked(where) if parallel.main else contextlib.nullcontext(),
        own_randomness(device),
        _threads(config.threads),
        Signals(announce=progress) as signals,
        parallel.prepared(model, groups) as own_groups,
    ):
        updater = Updater(model, batches, loss, config, own_groups, where, parallel)
        run = _Run(updater, evaluate, signals, command or _own_command(parallel))
        own = identity(config, model, updater.optimiser.param_groups, about or {})
        try:
            run.start(own, resume=resume, progress=progress, boards=boards)
            return run.train()
        finally:
            run.close()


@dataclass
class _State:
    """The part of a run's state, other than tensors, that a checkpoint contains."""

    step: int = 0
    seconds: float = 0.0
    stale: int = 0  # evaluations since the best
    unmeasured: bool = False  # a signal interrupted the evaluation of this step
    best: dict[str, Any] | None = None
    batches: dict[str, Any] = field(default_factory=dict)
    threads: int = 0
    torch: str = ""
    ranks: int = 1


class _Run:
    log: MetricsLog | None = None
    progress: TrainingProgress | None = None

    def __init__(
        self,
        updater: Updater,
        evaluate: Evaluate | None,
        signals: Signals,
        command: str | None,
    ) -> None:
        config = updater.config
        if config.monitor is not None and evaluate is None:
            raise ValueError(
                f"monitor is {config.monitor!r}, but there is no evaluation to compute it: pass "
                "evaluate."
            )
        self.updater, self.evaluate, self.signals = updater, evaluate, signals
        self.config, self.model, self.batches = config, updater.model, updater.batches
        self.folder, self.command, self.parallel = updater.folder, command, updater.parallel
        self.checkpoints = self.folder / "checkpoints"
        self.total, self.eval_every = _lengths(config, self.batches)
        self.state = _State()
        self.identity: dict[str, Any] = {}
        self.saved: tuple[int, float] = (-1, 0.0)  # step and time of the last checkpoint
        self.saved_best: set[int] = set()  # the best step recorded in the last checkpoint

    def start(
        self, own: dict[str, Any], *, resume: bool, progress: bool, boards: Sequence[str]
    ) -> None:
        """Load the newest checkpoint, or write the first."""
        self.identity = own
        notes: list[str] = []
        found = self._newest()
        if found is not None:
            if not resume:
                raise ValueError(
                    f"{self.folder} already contains a run, at step {found.step}. Choose another "
                    "folder, or continue it with resume=True."
                )
            notes = self._load(found)
        self.started = time.perf_counter() - self.state.seconds
        if self.parallel.main:
            self.log = MetricsLog(self.folder, self.state.step, boards=boards)
        self.progress = TrainingProgress(
            self.total, self.state.step, monitor=self.config.monitor, enabled=progress
        )
        for note in notes:
            self.progress.note(note)
        if found is None:
            self._save()

    def train(self) -> Result:
        """Update until there is a reason to stop."""
        self.model.train()
        self.updater.clear_gradients()
        if self.state.unmeasured and self.evaluate is not None:
            self._evaluate(self.evaluate)
            self._save()
        while (reason := self._reason()) is None:
            # Between updates only: an interrupted update would leave weights of no step.
            if self._interrupted():
                self._interrupt()
            values = self.updater.update(self.state.step, self.total)
            self.state.step += 1
            self._after(values)
        if self.saved[0] != self.state.step:
            self._save()
        if self._interrupted():  # also waits until all ranks have the last checkpoint
            self._interrupt()
        return Result(folder=self.folder, step=self.state.step, reason=reason, best=self._best())

    def close(self) -> None:
        """Close files, and keep the live line."""
        if self.log is not None:
            self.log.close()
        if self.progress is not None:
            self.progress.close()

    def _after(self, values: Mapping[str, float | Tensor]) -> None:
        """Log, evaluate and save, whatever is due at this step."""
        assert self.progress is not None
        step, config = self.state.step, self.config
        last = step == self.total
        self.progress.update(step, float(values["loss"]))
        if last or step % config.log_every == 0:
            self._write("train", {name: float(value) for name, value in values.items()})
        best = False
        if self.evaluate is not None and (last or step % self.eval_every == 0):
            best = self._evaluate(self.evaluate)
        every, seconds = config.save_every, config.save_seconds
        due = every is not None and step % every == 0
        late = seconds is not None and self._all_late(seconds)
        if best or due or late:
            self._save()

    def _evaluate(self, evaluate: Evaluate) -> bool:
        """Evaluate the model, record the result, and return whether it is the best so far."""
        # Of two equal results the later is best: a metric that stays at zero, such as the share of
        # long sequences that are correct, must not select the model of the first evaluation.
        assert self.progress is not None
        state, config = self.state, self.config
        # The same random numbers in every evaluation: results differ only by the weights.
        seed_global(derive_seed(config.seed, "evaluation"), self.updater.device)
        self.model.eval()
        # Several ranks must stop at the same point, which is the next update.
        alone = self.parallel.size == 1
        try:
            with (
                self.signals.at_once() if alone else contextlib.nullcontext(),
                torch.no_grad(),
                self.updater.products(),
                self.updater.autocast(),
                self.parallel.evaluating(self.model),
            ):
                found = {name: float(value) for name, value in evaluate(self.model).items()}
        except StopNow:
            state.unmeasured = True
            self._interrupt()
        state.unmeasured = False
        found = self.parallel.follow(found)
        self.model.train()
        self._write("eval", found)
        best = False
        if config.monitor is not None:
            if config.monitor not in found:
                raise ValueError(
                    f"monitor is {config.monitor!r}, but the evaluation returns only "
                    f"{', '.join(found) or 'nothing'}."
                )
            value = found[config.monitor]
            improved = config.is_better(value, state.best["value"] if state.best else None)
            state.stale = 0 if improved else state.stale + 1
            best = improved or (state.best is not None and value == state.best["value"])
            if best:
                state.best = {"step": state.step, "value": value, "metrics": found}
        self.progress.evaluated(state.step, found, best=best)
        return best

    def _save(self) -> None:
        """Write a checkpoint of this moment."""
        state = self.state
        state.seconds, state.batches = self._seconds(), self.batches.state_dict()
        state.threads, state.torch = torch.get_num_threads(), str(torch.__version__)
        state.ranks = self.parallel.size
        files = snapshot_files(self.model, self.updater.optimiser, self.parallel)
        # The previous checkpoint, kept as a fallback, refers to the best step before this one.
        known = {state.best["step"]} if state.best else set()
        if self.log is not None:
            self.log.sync()  # before the checkpoint, so that no record up to its step is missing
            stored = {"identity": self.identity, **vars(state)}
            written = write_checkpoint(self.checkpoints, state.step, files, stored)
            self._link(written)
            prune_checkpoints(self.checkpoints, known | self.saved_best)
        self.saved_best = known
        self.saved = (state.step, time.perf_counter())

    def _link(self, newest: Path) -> None:
        point_to(self.folder / "last", newest)
        if best := self._best():
            point_to(self.folder / "best", best.folder)

    def _load(self, found: TrainingState) -> list[str]:
        """Restore the state of a checkpoint; return notes for the user."""
        stored = dict(found.state)
        check_identity(stored.pop("identity"), self.identity, found.folder)
        load_weights(self.model, found.folder)
        load_optimiser(self.model, self.updater.optimiser, found.folder)
        self.state = _State(**stored)
        self.batches.load_state_dict(self.state.batches)
        self.saved = (found.step, time.perf_counter())
        self.saved_best = {self.state.best["step"]} if self.state.best else set()
        if self.parallel.main:
            self._link(found.folder)  # a kill may have prevented the links from being updated
            remove_leftovers(self.checkpoints)
        notes = [f"resuming {self.folder} at step {found.step} of {self.total}"]
        for name, before, now in (
            ("torch", self.state.torch, str(torch.__version__)),
            ("threads", self.state.threads, torch.get_num_threads()),
            ("ranks", self.state.ranks, self.parallel.size),
        ):
            if before != now:
                notes.append(f"{name}: {before} until now, {now} from here on: bits may differ.")
        return notes

    def _newest(self) -> TrainingState | None:
        """The checkpoint to continue from, found by one rank and used by all."""
        found = newest_checkpoint(self.checkpoints) if self.parallel.main else None
        step = self.parallel.agree(-1 if found is None else found.step)
        if found is None and step >= 0:
            return read_checkpoint(checkpoint_folder(self.checkpoints, step))
        return found

    def _interrupted(self) -> bool:
        """Whether any rank received a signal: then all stop, at the same step."""
        self.signals.received = self.parallel.agree(self.signals.received or 0) or None
        return self.signals.received is not None

    def _all_late(self, seconds: float) -> bool:
        late = time.perf_counter() - self.saved[1] >= seconds
        return bool(self.parallel.agree(late))

    def _write(self, kind: str, values: Mapping[str, float]) -> None:
        if self.log is not None:
            self.log.write(kind, self.state.step, self._seconds(), values)

    def _interrupt(self) -> NoReturn:
        assert self.progress is not None
        if self.saved[0] != self.state.step:
            self._save()
        how = f"run\n  {self.command}" if self.command else "call fit again in the same way"
        self.progress.note(
            f"{self.signals.name}: stopped and saved at step {self.state.step} of {self.total}, in "
            f"{self.folder}. To continue, {how}"
        )
        self.signals.stop()

    def _reason(self) -> Reason | None:
        """Why to stop, or None: a function of the state, so that a finished run stays finished."""
        state, config = self.state, self.config
        if state.best is not None and config.reaches_target(state.best["value"]):
            return "target"
        if config.patience is not None and state.stale >= config.patience:
            return "patience"
        return "max_steps" if state.step >= self.total else None

    def _best(self) -> Best | None:
        best = self.state.best
        if best is None:
            return None
        return Best(**best, folder=checkpoint_folder(self.checkpoints, best["step"]))

    def _seconds(self) -> float:
        return time.perf_counter() - self.started


def _lengths(config: TrainConfig, batches: Batches) -> tuple[int, int]:
    """Number of updates, and updates between evaluations (more than all: only at the end)."""
    length = len(batches) if isinstance(batches, Sized) else None
    if length is None and (config.epochs is not None or config.eval_every == "epoch"):
        raise ValueError(
            "these batches have no length, so there are no epochs: pass max_steps, and eval_every "
            "in updates."
        )
    if config.max_steps is not None:
        total = config.max_steps
    else:
        assert config.epochs is not None
        assert length is not None
        total = -(-config.epochs * length // config.accumulate)
    if config.warmup_steps >= total:
        raise ValueError(f"warmup_steps is {config.warmup_steps}, but there are {total} updates.")
    if config.eval_every == "epoch":
        assert length is not None
        return total, -(-length // config.accumulate)
    return total, config.eval_every or total + 1


def _own_command(parallel: Parallel) -> str | None:
    """The command that runs this program; None in a notebook or an interactive session."""
    has_file = hasattr(sys.modules.get("__main__"), "__file__")
    return parallel.command(sys.orig_argv) if has_file else None


@contextlib.contextmanager
def _threads(number: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if number is not None:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
