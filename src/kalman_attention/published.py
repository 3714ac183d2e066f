"""Figures that the paper reports, copied from its tables; nothing here is measured by us.

Sources are labels of the paper's LaTeX. Accuracies in percent, means of five seeds. Curves that
exist only as pictures (MQAR, A5, OU over depth) are not here: no number is read off a plot.
"""

import re
from typing import Any, TypeAlias

ModelRow: TypeAlias = tuple[str, str, int, int, dict[str, Any]]

MAD_TASKS = (
    "compression",
    "memorization",
    "recall",
    "noisy_recall",
    "fuzzy_recall",
    "selective_copying",
)
"""The six MAD tasks, in the order of the paper's table."""


def _row(*accuracies: float) -> dict[str, float]:
    return dict(zip(MAD_TASKS, accuracies, strict=True))


MAD = {
    "gated_deltanet": _row(65.53, 99.93, 99.94, 99.95, 37.04, 90.30),
    "gla": _row(49.45, 99.99, 73.60, 85.24, 18.22, 82.41),
    "mamba": _row(78.35, 99.96, 99.92, 99.93, 30.83, 80.60),
    "mlstm": _row(57.17, 99.98, 99.98, 99.99, 25.43, 36.61),
    "kla": _row(85.03, 98.87, 99.95, 99.93, 45.70, 90.67),
    "kla+": _row(88.87, 99.94, 99.94, 99.95, 43.32, 91.45),
}
"""``tab:accuracy-heatmap``."""

PROCESS_NOISE = {
    "learned": MAD["kla"],
    "zero": _row(72.91, 100.0, 100.0, 100.0, 43.21, 75.73),
}
"""``tab:process-noise-ablation``."""

PENDULUM = {
    "RoMAE": "3.32",
    "S5": "3.41",
    "CRU": "3.94 to 4.63",
    "RKN with time": "5.09",
    "GRU with time": "5.44",
    "S5 without time": "6.68",
    "ODE-RNN": "7.26",
    "RKN": "8.43",
    "GRU": "9.44",
    "mTAND": "65.6",
}
"""Test error of 1e-3 on the pendulum, as the papers of CRU, S5 and RoMAE report it; not in ours."""

PHYSIONET = {
    "mTAND-Full": 0.858,
    "mTAND-Enc": 0.854,
    "Phased-LSTM": 0.836,
    "ODE-RNN": 0.833,
    "Latent-ODE": 0.829,
    "GRU-D": 0.818,
    "RNN-Impute": 0.764,
}
"""Test AUROC of mortality on PhysioNet 2012, as the paper of mTAN reports it; not in ours."""

MQAR_KLA_256 = "> 95"
"""``fig:mqar-results``: the one value the text states, KLA at width 256; the rest is a picture."""

SCALING_CUDA_SPEEDUP = 350
"""``sec:compute-scaling``: CUDA kernel against the recurrent update, T = 2,048, on an A100."""

_HEADS = {"d_model": 128, "num_heads": 4, "expand_k": 0.5, "expand_v": 1.0}
_MQAR_KEYS = {64: 1.0, 128: 0.5, 256: 0.25}


def _mqar(d: int) -> tuple[ModelRow, ...]:
    delta = {"d_model": d, "num_heads": d // 32, "expand_k": 0.75, "expand_v": 1.5}
    gla = {"d_model": d, "num_heads": 4, "expand_k": _MQAR_KEYS[d], "expand_v": 1.0}
    return (
        ("KLA", "kla", 2, 32 * d, {"d_model": d, "d_state": 16}),
        ("Mamba", "mamba", 2, 32 * d, {"d_model": d, "d_state": 16, "expand": 2}),
        ("GatedDeltaNet", "gated_deltanet", 2, 36 * d, delta),
        ("GLA", "gla", 2, 32 * d, gla),
    )


MODEL_DIMENSIONS: dict[str, tuple[ModelRow, ...]] = {
    "mad": (
        ("KLA", "kla", 1, 2048, {"d_model": 128, "d_state": 8}),
        ("Mamba", "mamba", 1, 2048, {"d_model": 128, "d_state": 16, "expand": 1}),
        ("GatedDeltaNet", "gated_deltanet", 1, 2048, _HEADS),
        ("GLA", "gla", 1, 2048, _HEADS),
        ("mLSTM", "mlstm", 1, 2048, {"d_model": 128, "num_heads": 16}),
    ),
    "mqar": (*_mqar(64), *_mqar(128), *_mqar(256)),
}
"""``tab:model-dims`` and ``tab:mqar-model-configs``: name, mixer, blocks, state size and options,
all as printed. ``models.matching`` builds them."""

_PRETRAINING_SHARED = {
    "layers": "12 blocks",
    "vocabulary": "32,768",
    "seq_len": "2,048",
    "embedding": "base 0.3",
    "weight_decay": "0.1",
    "adam": "betas 0.8, 0.95, eps 1e-10",
    "schedule": "warm-up 0, decay over the last 0.4",
    "clip": "3.0",
    "precision": "fp32, embedding bfloat16",
}

PRETRAINING = {
    "45m": {
        **_PRETRAINING_SHARED,
        "d_model": "496",
        "parameters": "45M",
        "tokens": "1.8B",
        "batch_tokens": "131,072",
        "hidden": "2.5e-3",
        "state_space": "2.5e-4",
    },
    "180m": {
        **_PRETRAINING_SHARED,
        "d_model": "1360",
        "parameters": "180M",
        "tokens": "10.9B",
        "batch_tokens": "524,288",
        "hidden": "3.0e-3",
        "state_space": "3.0e-4",
    },
}
"""``tab:lm-pretrain-hparams`` and ``app:lm-details``, as printed."""

KLA_ONLY = ("d_model", "hidden", "state_space")
"""Entries that the paper gives for KLA only: rates depend on the width."""

NILE = {"sigma2.irregular": 15_099, "sigma2.level": 1_469}
"""Not the paper's: variances of the local level model of the Nile, as textbooks print them (Durbin
and Koopman, Time Series Analysis by State Space Methods)."""

ZERO_SHOT_ITEMS = 500
"""Items of each task that the paper scored: every figure is a multiple of 0.2, and a standard error
is about 2 points."""

ZERO_SHOT = {
    "GPT-45M": (16.0, 28.6, 58.0, 40.2, 20.6, 50.0, 27.4, 37.4),
    "Mamba-45M": (9.2, 29.2, 59.8, 37.2, 25.4, 48.8, 25.4, 61.6),
    "GDN-45M": (16.0, 28.2, 58.4, 39.0, 23.4, 52.6, 27.2, 45.2),
    "KLA-45M": (7.6, 28.8, 58.6, 40.6, 23.2, 52.2, 27.4, 63.0),
    "GPT+KLA-45M": (16.0, 28.2, 58.6, 42.8, 23.0, 50.8, 24.4, 62.8),
    "GPT-180M": (28.8, 32.2, 63.4, 51.0, 27.0, 49.2, 31.2, 54.8),
    "Mamba-180M": (24.0, 30.6, 63.0, 51.0, 27.2, 53.8, 33.0, 55.8),
    "GDN-180M": (27.8, 31.6, 60.4, 45.6, 25.8, 53.4, 30.0, 60.8),
    "KLA-180M": (22.4, 34.0, 63.0, 50.0, 26.0, 53.6, 32.4, 60.8),
    "GPT+KLA-180M": (30.2, 34.4, 64.2, 55.8, 29.0, 51.8, 31.0, 63.2),
}
"""``tab:lm-main``: scores by model, in the order of ``evaluation.questions.BENCHMARKS``."""
WHERE = {
    "Th:Mobius": "theorem 1",
    "fig:a5-min-layers": "figure 1a",
    "fig:mqar-results": "figure 6a",
    "fig:ou-ablation": "figure 3b",
    "fig:posterior-var-sc": "figure 5b",
    "fig:scaling": "figure 4",
    "sec:attention-viz": "the attention maps in the appendix",
    "sec:compute-scaling": "the section on compute scaling",
    "tab:accuracy-heatmap": "figure 5a",
    "tab:lm-main": "table 4",
    "tab:process-noise-ablation": "figure 6b",
}
"""Labels as a reader of the printed paper finds them, counted in its LaTeX."""


def in_print(text: str) -> str:
    """A text with the LaTeX labels of the paper replaced by their names in the printed paper."""
    return re.sub(r"\b(Th|fig|sec|tab):[\w-]+", lambda found: WHERE.get(found[0], found[0]), text)
