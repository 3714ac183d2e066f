"""All tasks by name."""

from typing import Any

from kalman_attention._text import unknown
from kalman_attention.tasks.mad.copying import Compression, SelectiveCopying
from kalman_attention.tasks.mad.fuzzy_recall import FuzzyRecall
from kalman_attention.tasks.mad.recall import Memorization, NoisyRecall, Recall
from kalman_attention.tasks.mqar import MQAR, ZoologyMQAR
from kalman_attention.tasks.permutations import A5, S5, Z60, A4xZ5, Parity
from kalman_attention.tasks.task import Task

TASKS: dict[str, type[Task]] = {
    "recall": Recall,
    "noisy_recall": NoisyRecall,
    "fuzzy_recall": FuzzyRecall,
    "selective_copying": SelectiveCopying,
    "compression": Compression,
    "memorization": Memorization,
    "mqar": MQAR,
    "mqar_zoology": ZoologyMQAR,
    "parity": Parity,
    "a5": A5,
    "a4xz5": A4xZ5,
    "z60": Z60,
    "s5": S5,
}
"""Name to configuration class; the defaults are the published settings."""

MAD = tuple(TASKS)[:6]
"""Names of the six MAD tasks."""


def make_task(name: str, **options: Any) -> Task:
    """A task by name; options override the published settings."""
    if name not in TASKS:
        raise ValueError(unknown("task", name, TASKS))
    return TASKS[name](**options)
