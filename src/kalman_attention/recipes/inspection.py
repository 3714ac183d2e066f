"""Inspection of models trained by ``mad``: posterior variance, Kalman attention maps."""

from typing import NamedTuple

import torch
from torch import Tensor

from kalman_attention.evaluation.uncertainty import attention_maps
from kalman_attention.models.language_model import LanguageModel
from kalman_attention.recipes import mad
from kalman_attention.recipes.cell import Cell, Results
from kalman_attention.recipes.experiment import Scale
from kalman_attention.recipes.task_run import TaskRun
from kalman_attention.tasks.task import Sequences
from kalman_attention.train.snapshot import load_weights


class Trained(NamedTuple):
    """A trained model, with one sequence of its test set.

    Attributes:
        model: the model with its best weights.
        sequence: inputs and targets of one row, ``[1, T]`` each.
        tokens: readable name of every input token.
    """

    model: LanguageModel
    sequence: Sequences
    tokens: list[str]


class VarianceTrace(NamedTuple):
    """The data of ``fig:posterior-var-sc``.

    Attributes:
        variance: variance of every channel of the read-out, ``[T, D]``.
        gain: Kalman gain, of the same shape.
        marked: positions of the tokens to copy.
        tokens: readable names.
    """

    variance: Tensor
    gain: Tensor
    marked: list[int]
    tokens: list[str]


def trained_kla(results: Results, scale: Scale, task: str) -> Trained:
    """The KLA model that ``mad`` trained on a task with its first seed, at the rate chosen there.

    Raises:
        ValueError: there is none; the message says how to train one.
    """
    cell = mad.chosen_cells(scale, {task: ("kla",)})[0]
    found = load_trained(results, cell)
    if found is None:
        raise ValueError(
            f"there is no KLA model trained on {task} in {results.folder('mad')}. Train one with "
            f"`kla reproduce mad --scale {scale} --only {cell.name}`."
        )
    return found


def load_trained(results: Results, cell: Cell) -> Trained | None:
    """The language model of a cell with its best weights; None without a result."""
    if results.load(cell) is None or not (results.workplace(cell) / "best").exists():
        return None
    assert isinstance(cell.run, TaskRun)
    model, problem = cell.run.make_model(), cell.run.make_task()
    assert isinstance(model, LanguageModel)
    load_weights(model, results.workplace(cell) / "best")
    sequence = problem.generate("test", seed=cell.run.training.seed, count=1)
    names = problem.token_names()
    return Trained(model.eval(), sequence, [names[i] for i in sequence.inputs[0].tolist()])


def variance_trace(trained: Trained) -> VarianceTrace:
    """Variance and gain of the last block over a selective-copying sequence."""
    found = trained.model.uncertainty(trained.sequence.inputs)
    variance, gain = found.variance[-1], found.gain[-1]
    assert variance is not None
    assert gain is not None
    blank = trained.tokens[-1]  # the model answers at the blanks at the end
    scored = int((trained.sequence.targets[0] >= 0).sum())
    body = trained.tokens[: len(trained.tokens) - scored - 1]
    marked = [i for i, token in enumerate(body) if token != blank]
    return VarianceTrace(variance[0], gain[0], marked, trained.tokens)


def sample_maps(trained: Trained, count: int = 4) -> dict[int, Tensor]:
    """Attention maps of randomly chosen channels of the last block, ``[T, T]`` each."""
    width = trained.model.config.mixer_options("kla").width
    order = torch.randperm(width, generator=torch.Generator().manual_seed(0))
    channels = sorted(order[:count].tolist())
    maps = attention_maps(trained.model, trained.sequence.inputs, block=-1, channels=channels)
    return dict(zip(channels, maps[0], strict=True))
