"""``uncertainty``: which signal of a language model detects foreign text, and which mistakes.

Small models of equal size are trained in the same way on one kind of text. Every score of
``evaluation.scores`` is then evaluated on two questions: is it higher for windows of other texts
than for held-out windows of the same kind (AUROC, FPR95), and is it higher for wrong predictions
than for right ones? The scores, and that higher means more foreign, are fixed in the code before
any of the other texts is read. Each row below ``kla`` changes one thing that might make its
variance more informative.
"""

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kalman_attention._files import sha256, write_atomically
from kalman_attention._tables import Table
from kalman_attention.data.build import BuildOptions, build
from kalman_attention.data.shards import INDEX, VALIDATION, ShardedTokens
from kalman_attention.data.sources import Corpus
from kalman_attention.data.tokenizer import Tokenizer
from kalman_attention.evaluation.checkpoint import load_checkpoint
from kalman_attention.evaluation.detection import Reference, calibrate, detect
from kalman_attention.evaluation.scores import Scores, score_windows
from kalman_attention.models.language_model import LanguageModel
from kalman_attention.models.presets import preset
from kalman_attention.recipes.cell import Cell
from kalman_attention.recipes.experiment import Experiment, Scale, notes
from kalman_attention.recipes.pretrain import PretrainRecipe, recipe
from kalman_attention.recipes.pretrain_run import pretrain
from kalman_attention.train.optim import Rates

SCORES = (
    "perplexity",
    "entropy",
    "max_prob",
    "mahalanobis",
    "log_variance",
    "scaled_variance",
    "gain",
    "epistemic",
)
"""The scores to compare; ``max_prob`` with its sign reversed, all others as they are."""
_OF_TOKENS = ("entropy", "max_prob", "log_variance", "scaled_variance", "gain", "epistemic")
"""The scores that are known when a token is predicted."""


@dataclass(frozen=True, kw_only=True)
class UncertaintyRun:
    """One model, trained on one text and evaluated on others.

    Attributes:
        recipe: model and training.
        window: number of tokens in a window.
        windows: maximum number of windows of each text; of the held-out text twice as many, half of
            which fit the distance between hidden states.
        num_samples: posterior samples for ``epistemic``, and for the predictions of KLA+.
        shards: the training text, as written by ``kla data``.
        domains: a folder with one file for each of the other texts.
    """

    recipe: PretrainRecipe
    window: int = 256
    windows: int = 64
    num_samples: int = 10
    shards: str = field(default="", metadata={"place": True})
    domains: str = field(default="", metadata={"place": True})

    @property
    def updates(self) -> int:
        """Number of updates."""
        return self.recipe.steps

    def execute(self, folder: Path, *, show: bool) -> dict[str, Any]:
        """Train, or resume training, then score; see ``cell.Run``."""
        if not (self.shards and self.domains):
            raise ValueError(
                "pass both the training text and the other texts: --shards, --domains."
            )
        files = domain_files(Path(self.domains))
        result = pretrain(self.recipe, self.shards, folder, progress=show)
        model, tokenizer = load_checkpoint(folder)
        known = self.score(model, self._held_out())
        reference = Reference(known)
        found: dict[str, Any] = {}
        for path in files:
            foreign = self.score(model, self._windows(path, tokenizer))
            verdicts = reference.detect(reference.windows(foreign))
            found[path.stem] = {name: verdict._asdict() for name, verdict in verdicts.items()}
        curve = [r for r in result.history if r["kind"] == "eval"]
        calibration = calibrate(known.max_prob, known.correct)
        return {
            "metrics": {
                "bits_per_byte": curve[-1]["bits_per_byte"],
                "ece": calibration.ece,
                "aurc": calibration.aurc,
                "accuracy": calibration.accuracy,
            },
            "domains": found,
            "mistakes": _mistakes(known),
            "steps": result.step,
            "seconds": result.history[-1]["seconds"],
            "parameters": self.recipe.parameters,
            "data": sha256(Path(self.shards) / INDEX),
            "texts": {path.stem: sha256(path) for path in files},
            "curve": [{k: v for k, v in record.items() if k != "kind"} for record in curve],
        }

    def score(self, model: LanguageModel, windows: Tensor) -> Scores:
        """All scores of some windows, for predictions of the kind the model was trained to make."""
        marginal = self.recipe.loss == "marginal"
        samples = self.num_samples if marginal else 0
        found = score_windows(model, windows, num_samples=samples, noise_scale=True)
        if marginal or model.stack()[-1].kind != "kla":
            return found
        sampled = score_windows(model, windows, num_samples=self.num_samples)
        return dataclasses.replace(found, epistemic=sampled.epistemic)

    def _held_out(self) -> Tensor:
        """Windows spread over the validation split."""
        shards = ShardedTokens(self.shards)
        tokens = np.concatenate([shards.tokens(s) for s in shards.shards(VALIDATION)])
        return _spread(torch.from_numpy(tokens.astype(np.int64)), self.window, 2 * self.windows)

    def _windows(self, path: Path, tokenizer: Tokenizer) -> Tensor:
        tokens = tokenizer.encode(path.read_text(encoding="utf-8", errors="replace"))
        if len(tokens) <= 2 * self.window:
            raise ValueError(
                f"{path} has {len(tokens):,} tokens, fewer than two windows of {self.window}."
            )
        return _spread(torch.tensor(tokens), self.window, self.windows)


def _spread(tokens: Tensor, size: int, count: int) -> Tensor:
    """Up to ``count`` whole windows of a text, evenly spaced."""
    windows = tokens.unfold(0, size + 1, size)
    chosen = torch.linspace(0, len(windows) - 1, min(count, len(windows)))
    return windows[chosen.round().long()]


def _mistakes(scores: Scores) -> dict[str, float]:
    """AUROC of each score for separating wrong predictions from right ones."""
    of_tokens = scores.of_tokens()
    found = {}
    for name in _OF_TOKENS:
        if name in of_tokens:
            values = -of_tokens[name] if name == "max_prob" else of_tokens[name]
            if name in ("log_variance", "scaled_variance", "gain"):
                # They describe the state after a token, from which the next one is predicted.
                values = np.roll(values, 1, axis=1)
                values[:, 0] = np.nan
            right, wrong = (values[(scores.correct == x) & np.isfinite(values)] for x in (1.0, 0.0))
            if len(right) and len(wrong):
                found[name] = detect(right, wrong).auroc
    return found


def domain_files(folder: Path) -> list[Path]:
    """The files of a folder of other texts, by name."""
    found = sorted(path for path in folder.glob("*") if path.is_file())
    if not found:
        raise ValueError(f"{folder} contains no text to compare with: add one file per domain.")
    return found


def machine_texts(folder: Path) -> dict[str, str]:
    """Texts that every machine has: the standard library's code, and three kinds of other text.

    Args:
        folder: folder of the experiment, to which both are written unless they exist.

    Returns:
        Values of the fields ``shards`` and ``domains`` of ``UncertaintyRun``.
    """
    shards, domains = folder / "runs" / "corpus", folder / "runs" / "domains"
    if not (shards / INDEX).exists():
        build(shards, BuildOptions(corpus=Corpus(), vocab_size=1024, validation=20))
    domains.mkdir(parents=True, exist_ok=True)
    for name, texts in _others().items():
        text = "\n".join(_limited(texts, 400_000))
        write_atomically(domains / f"{name}.txt", text.encode())
    return {"shards": str(shards), "domains": str(domains)}


def _others() -> dict[str, Iterator[str]]:
    from pydoc_data import topics

    root = Path(torch.__file__).parent
    return {
        "python documentation": iter(topics.topics.values()),
        "python of other authors": _read(root / "_inductor", "*.py"),
        "c++": _read(root / "include" / "ATen", "*.h"),
    }


def _read(folder: Path, pattern: str) -> Iterator[str]:
    for path in sorted(folder.glob(pattern)):
        if path.is_file():
            yield path.read_text(encoding="utf-8", errors="replace")


def _limited(texts: Iterator[str], most: int) -> Iterator[str]:
    for text in texts:
        yield text
        most -= len(text)
        if most <= 0:
            return


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the table.

    Attributes:
        model: a preset, without its size.
        loss: as in ``PretrainRecipe``.
        layer: options of the KLA layer that differ from the preset.
        state_space_ratio: learning rate of the prior, relative to that of the other parameters.
    """

    model: str = "kla"
    loss: str = "mean"
    layer: Mapping[str, Any] = field(default_factory=dict)
    state_space_ratio: float = 0.1


ROWS = {
    "kla": Row(),
    "kla+": Row(loss="marginal"),
    "kla, prior at full rate": Row(state_space_ratio=1.0),
    "kla, learned initial state": Row(layer={"prior": "learned"}),
    "kla, stationary initial state": Row(layer={"prior": "stationary"}),
    "gpt": Row(model="gpt"),
    "mamba": Row(model="mamba"),
}
"""All models, by their name in the table."""


@dataclass(frozen=True, kw_only=True)
class UncertaintyScale:
    """Settings of the experiment at one scale.

    Attributes:
        size: size of the presets.
        training: fields of the recipe that differ from the default.
        run: fields of the run that differ from the default.
        seeds: random seeds of initial weights and samples.
        changes: settings in words, for the table.
    """

    size: str = "nano"
    training: Mapping[str, Any] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0, 1, 2)
    changes: tuple[str, ...] = ()


SCALES: dict[Scale, UncertaintyScale] = {
    "smoke": UncertaintyScale(
        training={"tokens": 256, "batch_tokens": 64, "seq_len": 16, "micro_batch": 2},
        run={"window": 16, "windows": 4, "num_samples": 2},
        seeds=(0,),
        changes=("four updates of 64 tokens: shows only that it runs",),
    ),
    "cpu": UncertaintyScale(changes=("1.35 M parameters, 2 M tokens, windows of 256 tokens",)),
    "paper": UncertaintyScale(
        size="micro",
        changes=("2.0 M parameters, 20 M tokens; the paper leaves the variance to future work",),
    ),
}
"""The experiment at each scale."""


def cells(scale: Scale) -> list[Cell]:
    """Every model with every random seed, seed by seed."""
    setting = SCALES[scale]
    found = []
    for seed in setting.seeds:
        for name, row in ROWS.items():
            model = f"{row.model}-{setting.size}"
            config = preset(model)
            if row.layer:
                layer = dataclasses.replace(config.mixer_options("kla"), **row.layer)
                config = dataclasses.replace(config, kla=layer)
            run = recipe(
                model,
                architecture=config if row.layer else None,
                loss=row.loss,
                rates=Rates(state_space_ratio=row.state_space_ratio),
                seed=seed,
                **setting.training,
            )
            labels = {"model": name, "seed": f"seed{seed}"}
            uncertainty = UncertaintyRun(recipe=run, **setting.run)
            found.append(Cell(experiment="uncertainty", labels=labels, run=uncertainty))
    return found


def tables(scale: Scale, results: Sequence[dict[str, Any]]) -> list[Table]:
    """Detection of foreign text and of mistakes by each score, and calibration."""
    below = notes(scale, SCALES[scale].changes)
    below.append("means over seeds, their standard deviations in brackets; 0.5 is chance")
    by_model = {name: [r for r in results if r["labels"]["model"] == name] for name in ROWS}
    header = ["model", *(name.replace("_", " ") for name in SCORES)]
    foreign = [
        [name, *(_over_seeds([_mean_auroc(r, score) for r in found]) for score in SCORES)]
        for name, found in by_model.items()
    ]
    wrong = [
        [name, *(_over_seeds([r["mistakes"].get(score) for r in found]) for score in _OF_TOKENS)]
        for name, found in by_model.items()
    ]
    quality = ("bits_per_byte", "accuracy", "ece", "aurc")
    calibrated = [
        [name, *(_over_seeds([r["metrics"][metric] for r in found]) for metric in quality)]
        for name, found in by_model.items()
    ]
    title = "Foreign text: AUROC over windows, mean over domains"
    return [
        Table(title, header, foreign, below),
        *_by_domain(results, below),
        Table("Mistakes: AUROC over tokens", ["model", *_columns(_OF_TOKENS)], wrong, below),
        Table("Calibration", ["model", *_columns(quality)], calibrated, below),
    ]


def _columns(names: Sequence[str]) -> list[str]:
    return [name.replace("_", " ") for name in names]


def _by_domain(results: Sequence[dict[str, Any]], below: list[str]) -> list[Table]:
    """Detection of each foreign text by KLA."""
    kla = [r for r in results if r["labels"]["model"] == "kla"]
    domains = sorted({domain for r in kla for domain in r["domains"]})

    def cell(domain: str, score: str) -> str:
        return _over_seeds([r["domains"][domain][score]["auroc"] for r in kla])

    rows = [[domain, *(cell(domain, score) for score in SCORES)] for domain in domains]
    title = "Foreign text by domain: AUROC over windows, kla"
    return [Table(title, ["domain", *_columns(SCORES)], rows, below)] if rows else []


def _mean_auroc(result: dict[str, Any], score: str) -> float | None:
    found = [domain[score]["auroc"] for domain in result["domains"].values() if score in domain]
    return statistics.mean(found) if found else None


def _over_seeds(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    spread = f" ({statistics.stdev(known):.3f})" if len(known) > 1 else ""
    return f"{statistics.mean(known):.3f}{spread}"


EXPERIMENT = Experiment(
    name="uncertainty",
    source=None,
    cells=cells,
    tables=tables,
    metric="bits_per_byte",
    prepare=machine_texts,
)
