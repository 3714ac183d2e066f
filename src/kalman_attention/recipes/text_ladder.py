"""``text-ladder``: options of the KLA layer on text, one after the other, at equal size.

Small language models with about as many parameters as ``kla-micro``, trained identically on the
same tokens. The name of a rung lists its main changes: ``biases`` includes ``unscaled``, and all
``shared`` rungs include ``biases``. Mamba and Gated DeltaNet are included for comparison. The seeds
differ from those of the subsequent comparison: options are chosen here, and the choice is measured
there.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from kalman_attention._files import sha256
from kalman_attention._tables import Table
from kalman_attention.data.shards import INDEX
from kalman_attention.models.config import LanguageModelConfig
from kalman_attention.models.presets import preset
from kalman_attention.recipes.cell import Cell
from kalman_attention.recipes.experiment import Experiment, Scale, notes
from kalman_attention.recipes.pretrain import PretrainRecipe, recipe
from kalman_attention.recipes.pretrain_run import pretrain


@dataclass(frozen=True, kw_only=True)
class TextRun:
    """Pretraining as a cell.

    Attributes:
        recipe: what to train, and how.
        shards: folder written by ``kla data``; its content is part of the configuration, not its
            path.
    """

    recipe: PretrainRecipe
    shards: str = field(default="", metadata={"place": True})

    @property
    def updates(self) -> int:
        """Number of updates."""
        return self.recipe.steps

    def execute(self, folder: Path, *, show: bool) -> dict[str, Any]:
        """Pretrain, or resume pretraining; see ``cell.Run``."""
        if not self.shards:
            raise ValueError("this experiment trains on text: pass its folder with --shards.")
        result = pretrain(self.recipe, self.shards, folder, progress=show)
        curve = [r for r in result.history if r["kind"] == "eval"]
        return {
            "metrics": {name: curve[-1][name] for name in ("bits_per_byte", "loss")},
            "steps": result.step,
            "seconds": result.history[-1]["seconds"],
            "parameters": self.recipe.parameters,
            "data": sha256(Path(self.shards) / INDEX),
            "curve": [{k: v for k, v in record.items() if k != "kind"} for record in curve],
        }


_SPREAD: dict[str, Any] = {"decay_rate": (1.0, 16.0), "dt_max": 0.1}
_NORM: dict[str, Any] = {"readout_norm": True}
_STEP: dict[str, Any] = {"step_rank": 11, **_SPREAD}
_BIASES: dict[str, Any] = {"evidence_bias": True, "gate_bias": 0.0, "prior": "learned"}


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One model of the ladder.

    Attributes:
        model: a preset of size micro.
        d_model: its width; None keeps that of the preset. All rungs have as many parameters as
            ``kla-micro`` within 1.3 %.
        wide: channels of the filter per channel of the stream; the precision then has rank 8.
        options: options of the mixer that differ.
        depth_scaled_start: as in ``LanguageModelConfig``.
    """

    model: str = "kla"
    d_model: int | None = None
    wide: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    depth_scaled_start: bool = True

    def config(self) -> LanguageModelConfig:
        """The whole model."""
        base = preset(f"{self.model}-micro")
        (mixer,) = set(base.layers)
        width = self.d_model or base.d_model
        options: dict[str, Any] = {"d_model": width, **self.options}
        if self.wide is not None:
            options |= {"d_inner": round(self.wide * width), "precision_rank": 8}
        layer = dataclasses.replace(base.mixer_options(mixer), **options)
        return dataclasses.replace(
            base,
            d_model=width,
            depth_scaled_start=self.depth_scaled_start,
            **{mixer: layer},
        )


def _shared(
    slots: int, *, d_model: int | None = None, wide: float | None = None, **more: Any
) -> Rung:
    options = {"shared_slots": slots, **_BIASES, **more}
    return Rung(d_model=d_model, wide=wide, options=options, depth_scaled_start=False)


LADDER: dict[str, Rung] = {
    "kla": Rung(),
    "spread": Rung(options=_SPREAD),
    "norm": Rung(options=_NORM),
    "unscaled": Rung(depth_scaled_start=False),
    "biases": Rung(options=_BIASES, depth_scaled_start=False),
    "shared 4": _shared(4),
    "shared 4, rotating": _shared(4, num_reflections=2),
    "shared 16": _shared(16),
    "spread, norm": Rung(options=_SPREAD | _NORM),
    "spread, steps": Rung(options=_STEP),
    "spread, norm, steps": Rung(options=_STEP | _NORM),
    "wide, spread, norm, steps": Rung(d_model=160, wide=1.85, options=_STEP | _NORM),
    "shared 16, steps": _shared(16, step_rank=11, dt_max=0.1),
    "shared 16, norm, steps": _shared(16, step_rank=11, dt_max=0.1, **_NORM),
    "wide, shared 16, norm, steps": _shared(
        16, d_model=160, wide=1.85, step_rank=11, dt_max=0.1, **_NORM
    ),
    "mamba": Rung(model="mamba"),
    "mamba, norm": Rung(model="mamba", options=_NORM),
    "gdn": Rung(model="gdn"),
}
"""All models, by their name in the table."""


@dataclass(frozen=True, kw_only=True)
class LadderScale:
    """Settings of the experiment at one scale.

    Attributes:
        training: fields of the recipe that differ from those of size micro.
        seeds: seeds of initial weights and samples.
        changes: differences from the full experiment, for the table.
    """

    training: Mapping[str, Any]
    seeds: tuple[int, ...] = (100, 101)
    changes: tuple[str, ...] = ()


SCALES: dict[Scale, LadderScale] = {
    "smoke": LadderScale(
        training={
            "tokens": 4 * 64,
            "batch_tokens": 64,
            "seq_len": 16,
            "micro_batch": 2,
            "eval_every": 2,
        },
        seeds=(100,),
        changes=("four updates of 64 tokens: only shows that it runs",),
    ),
    "cpu": LadderScale(
        # bfloat16 takes two thirds of the time where the processor has instructions for it.
        training={"tokens": 2_000_000, "eval_every": 60, "dtype": "bfloat16"},
        changes=("2 M tokens in rows of 256, matrix products in bfloat16",),
    ),
    "paper": LadderScale(training={}, changes=("20 M tokens in rows of 256; not in the paper",)),
}
"""The experiment at each scale."""


def cells(scale: Scale) -> list[Cell]:
    """Every rung at every seed."""
    setting = SCALES[scale]
    found = []
    for seed in setting.seeds:
        for name, rung in LADDER.items():
            run = recipe(
                f"{rung.model}-micro", architecture=rung.config(), seed=seed, **setting.training
            )
            labels = {"model": name, "seed": f"seed{seed}"}
            found.append(Cell(experiment="text-ladder", labels=labels, run=TextRun(recipe=run)))
    return found


def tables(scale: Scale, results: Sequence[dict[str, Any]]) -> list[Table]:
    """Bits per byte of every rung with each seed and on average, and its parameters."""
    setting = SCALES[scale]
    seeds = [f"seed{seed}" for seed in setting.seeds]
    found = {
        (r["labels"]["model"], r["labels"]["seed"]): r["metrics"]["bits_per_byte"] for r in results
    }

    def row(name: str, rung: Rung) -> list[str]:
        parameters = recipe(f"{rung.model}-micro", architecture=rung.config()).parameters
        bits = [found.get((name, seed)) for seed in seeds]
        known = [x for x in bits if x is not None]
        average = fmean(known) if len(known) == len(seeds) else None
        shown = ["-" if x is None else f"{x:.3f}" for x in (*bits, average)]
        return [name, f"{parameters:,}", *shown]

    rows = [row(name, rung) for name, rung in LADDER.items()]
    title = "Options of the layer on text, validation bits per byte"
    header = ["model", "parameters", *(f"seed {seed}" for seed in setting.seeds), "mean"]
    return [Table(title, header, rows, notes(scale, setting.changes))]


EXPERIMENT = Experiment(
    name="text-ladder",
    source=None,
    cells=cells,
    tables=tables,
    metric="bits_per_byte",
)
