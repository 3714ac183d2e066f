"""All experiments that train, by name: listed without torch, loaded on demand."""

import importlib

from kalman_attention._text import unknown
from kalman_attention.recipes.experiment import Experiment

EXPERIMENTS = {
    "mad": "one block of six models on the six MAD tasks",
    "mad-bare": "the same without the paper's encoder and decoder MLPs",
    "mad-variations": "some runs of mad with more epochs, or with smaller embeddings",
    "process-noise": "learned process noise against p = 0, on the MAD tasks",
    "ou-depth": "the OU prior against none, over depth",
    "mqar": "recall of many pairs over long contexts, over width",
    "text-ladder": "options of the KLA layer on text, at equal size (needs --shards)",
    "a5": "products in the group A5: the fewest blocks that solve each length",
    "a5-curriculum": "the same with lengths that grow during training, best of three seeds",
    "state-tracking": "words of groups, trained at length 20 and tested at up to 1,024",
    "uncertainty": "which score of a language model detects foreign text, and which mistakes",
    "rotation": "rotating blocks on recall and copying, where nothing has to be tracked",
    "series": "state-space models of the Nile, of sunspots and of a drive (needs --data)",
    "pendulum": "the angle of a pendulum from noisy images at irregular times",
    "physionet": "mortality and missing measurements in intensive care (needs --data)",
    "forecasting": "ETTh1, 96 hours ahead, with a variance (needs --data)",
}
"""Experiments in the order of the paper, with descriptions."""

_ELSEWHERE = {
    "mad-bare": ("mad", "BARE_EXPERIMENT"),
    "a5-curriculum": ("a5", "CURRICULUM_EXPERIMENT"),
}


def load_experiment(name: str) -> Experiment:
    """Load an experiment by name, by default ``EXPERIMENT`` of the module of that name."""
    if name not in EXPERIMENTS:
        raise ValueError(unknown("experiment", name, EXPERIMENTS))
    module, attribute = _ELSEWHERE.get(name, (name.replace("-", "_"), "EXPERIMENT"))
    found = getattr(importlib.import_module(f"kalman_attention.recipes.{module}"), attribute)
    assert isinstance(found, Experiment)
    return found
