"""Training of one model on one synthetic task, which is what most cells do."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from kalman_attention.evaluation.synthetic import (
    PositionAccuracy,
    metrics_for,
    predicted_tokens,
)
from kalman_attention.models.autoencoder import Autoencoder, AutoencoderConfig
from kalman_attention.models.config import LanguageModelConfig
from kalman_attention.models.language_model import LanguageModel
from kalman_attention.parallel.ranks import Parallel
from kalman_attention.tasks.permutations import Permutations
from kalman_attention.tasks.registry import make_task
from kalman_attention.tasks.task import IGNORE, Sequences, Task
from kalman_attention.train.config import TrainConfig
from kalman_attention.train.data import Batches, GrowingBatches, StreamBatches, TensorBatches
from kalman_attention.train.loop import fit
from kalman_attention.train.objective import Evaluate, Loss, token_loss
from kalman_attention.train.optim import matrix_decay_groups
from kalman_attention.train.snapshot import load_weights
from kalman_attention.train.update import Updater

Model: TypeAlias = LanguageModel | Autoencoder


def published_training(
    *,
    epochs: int,
    seed: int,
    lr: float = 1e-3,
    patience: int = 70,
    schedule: Literal["constant", "cosine", "trapezoidal"] = "constant",
) -> TrainConfig:
    """Training options of the synthetic experiments, as published (``tab:training-hyperparams``).

    The model is evaluated after every epoch; training ends at 99.9 %, as in MAD-Lab.
    """
    return TrainConfig(
        epochs=epochs,
        lr=lr,
        clip=5.0,
        schedule=schedule,
        eval_every="epoch",
        monitor="accuracy",
        patience=patience,
        target=0.999,
        seed=seed,
    )


@dataclass(frozen=True, kw_only=True)
class TaskRun:
    """A model, a task, and the training of the model on the task.

    Attributes:
        task: name of the task.
        model: the model; for compression its blocks encode, and MAD's decoder follows.
        training: options of the training loop; its seed is also that of the data and of the initial
            weights, and weight decay applies to matrices only.
        batch_size: sequences per update.
        eval_batch_size: sequences per batch of an evaluation, on which macro accuracy depends
            slightly; None for ``batch_size``.
        task_options: options that differ from the published settings of the task.
        loss: cross-entropy of the posterior ``"mean"``, or the ``"marginal"`` likelihood (KLA+),
            which is then also used for predictions.
        num_samples: number of posterior samples for the marginal likelihood.
        fresh: new sequences in every batch instead of a training set of fixed size.
        validation_size: number of validation sequences, separate from training and test, that
            determine when to stop and which weights are best; the test set is then used once, with
            these weights. None uses the test set for both, as in MAD-Lab.
        start_len: begin with sequences of this length and make them longer by one whenever the loss
            of a batch falls below ``grow_below``, up to ``seq_len`` of the task; needs ``fresh``.
            None trains at full length throughout.
        grow_below: see ``start_len``.
        test_lens: further lengths at which the trained model is tested, on separate sequences.
    """

    task: str
    model: LanguageModelConfig
    training: TrainConfig
    batch_size: int
    eval_batch_size: int | None = None
    task_options: dict[str, Any] = field(default_factory=dict)
    loss: Literal["mean", "marginal"] = "mean"
    num_samples: int = 10
    fresh: bool = False
    validation_size: int | None = None
    start_len: int | None = None
    grow_below: float = 0.3
    test_lens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.start_len is not None and not self.fresh:
            raise ValueError("start_len needs new sequences in every batch: set fresh=True.")

    @property
    def updates(self) -> int:
        """Maximum number of updates."""
        training = self.training
        if training.max_steps is not None:
            return training.max_steps
        assert training.epochs is not None
        return training.epochs * -(-self.make_task().size("train") // self.batch_size)

    def make_task(self) -> Task:
        """The task, with its options."""
        return make_task(self.task, **self.task_options)

    def make_model(self) -> Model:
        """The model, with initial weights determined by the seed."""
        torch.manual_seed(self.training.seed)
        if self.task == "compression":
            return Autoencoder(AutoencoderConfig(encoder=self.model))
        return LanguageModel(self.model)

    def execute(self, folder: Path, *, show: bool) -> dict[str, Any]:
        """Train, or resume training; see ``cell.Run``."""
        task, model = self.make_task(), self.make_model()
        test, watched = self._test_and_watched(task)
        batches = self._batches(task)
        loss = self._loss()
        result = fit(
            model,
            batches,
            batches.watching(loss) if isinstance(batches, GrowingBatches) else loss,
            self.training,
            folder=folder,
            evaluate=self._evaluation(task, watched),
            groups=self._groups(model),
            about={"task": self.task, "task_options": self.task_options, "loss": self.loss},
            progress=show,
        )
        assert result.best is not None
        load_weights(model, result.best.folder)
        found = self._measured(model.eval(), task, test, result.best.metrics)
        records = result.history
        curve = [_without_kind(record) for record in records if record["kind"] == "eval"]
        return {
            **found,
            "best_step": result.best.step,
            "last": curve[-1],
            "steps": result.step,
            "ended_by": result.reason,
            "seconds": records[-1]["seconds"],
            "parameters": model.num_parameters(),
            "curve": curve,
            "positions": self._positions(model, task, test),
            "lengths": self._lengths(model, task),
        }

    def updater(self) -> Callable[[], None]:
        """A function that makes the next update of a new model, ready to be timed."""
        task, model = self.make_task(), self.make_model()
        updater = Updater(
            model,
            self._batches(task),
            self._loss(),
            self.training,
            self._groups(model),
            Path(),
            Parallel(),
        )
        steps = itertools.count()

        def update() -> None:
            updater.update(next(steps), self.updates)

        return update

    def _loss(self) -> Loss:
        return token_loss(self.loss, num_samples=self.num_samples, ignore_index=IGNORE)

    def _groups(self, model: Model) -> list[dict[str, Any]] | None:
        """Parameter groups: one, or with weight decay a separate one for the matrices."""
        t = self.training
        if t.weight_decay == 0.0:
            return None
        options: dict[str, Any] = {"lr": t.lr, "betas": t.betas, "eps": t.eps}
        return matrix_decay_groups(model, weight_decay=t.weight_decay, **options)

    def _test_and_watched(self, task: Task) -> tuple[Sequences, Sequences]:
        """The test set, and the set monitored in training: validation rows, or the test set."""
        count = task.size("test")
        rows = task.generate(
            "test", seed=self.training.seed, count=count + (self.validation_size or 0)
        )
        test, others = Sequences(*(z[:count] for z in rows)), Sequences(*(z[count:] for z in rows))
        return test, test if self.validation_size is None else others

    def _measured(
        self, model: Model, task: Task, test: Sequences, watched: Mapping[str, float]
    ) -> dict[str, Any]:
        """Scores of the best weights on the test set, and on the set that chose them."""
        if self.validation_size is None:
            return {"metrics": watched}
        torch.manual_seed(self.training.seed)  # for the samples of KLA+
        return {"metrics": self._evaluation(task, test)(model), "validation": watched}

    def _positions(self, model: Model, task: Task, test: Sequences) -> list[float] | None:
        """Accuracy at each position of a product, without BOS; None for other tasks."""
        if not isinstance(task, Permutations):
            return None
        metric = PositionAccuracy(skip=int(task.bos))
        for inputs, targets in self._test_batches(test):
            metric.update(predicted_tokens(model, inputs), targets)
        return metric.positions()

    @torch.no_grad()
    def _lengths(self, model: Model, task: Task) -> dict[str, Mapping[str, float]]:
        """Scores of the model at other lengths, by length."""
        found = {}
        for length in self.test_lens:
            other = dataclasses.replace(task, seq_len=length)
            asked = next(other.stream(task.size("test"), split="test", seed=self.training.seed))
            found[str(length)] = self._evaluation(other, asked)(model)
        return found

    def _test_batches(self, test: Sequences) -> Iterator[tuple[Tensor, Tensor]]:
        size = self.eval_batch_size or self.batch_size
        for start in range(0, len(test.inputs), size):
            yield tuple(z[start : start + size] for z in test)  # type: ignore[misc]

    def _batches(self, task: Task) -> Batches:
        seed = self.training.seed
        if self.start_len is not None:
            return GrowingBatches(
                lambda length, g: dataclasses.replace(task, seq_len=length).sample(
                    self.batch_size, g
                ),
                seed,
                start=self.start_len,
                end=task.seq_len,
                below=self.grow_below,
            )
        if self.fresh:
            return StreamBatches(lambda g: task.sample(self.batch_size, g), seed)
        return TensorBatches(task.generate("train", seed=seed), self.batch_size, seed)

    def _evaluation(self, task: Task, test: Sequences) -> Evaluate:
        """All metrics of the task; the one that tables report is also called ``accuracy``."""
        samples = self.num_samples if self.loss == "marginal" else 0

        def evaluate(model: nn.Module) -> dict[str, float]:
            assert isinstance(model, LanguageModel | Autoencoder)
            metrics = metrics_for(task)
            for inputs, targets in self._test_batches(test):
                predicted = predicted_tokens(model, inputs, num_samples=samples)
                for metric in metrics.values():
                    metric.update(predicted, targets)
            found = {name: metric.compute() for name, metric in metrics.items()}
            return {"accuracy": next(iter(found.values())), **found}

        return evaluate


def _without_kind(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != "kind"}
