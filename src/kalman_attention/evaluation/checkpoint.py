"""A checkpoint: a folder with a model and the tokenizer it was trained with.

The model is ``config.json`` and ``model.safetensors``, as ``save_model`` or HuggingFace's
``save_pretrained`` write them; the tokenizer is written next to them by ``Tokenizer.save``. The
folder of a finished pretraining run is a checkpoint; of an unfinished one, the newest is used.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from kalman_attention._reading import checked, read_json
from kalman_attention.data.tokenizer import Tokenizer
from kalman_attention.models.language_model import LanguageModel
from kalman_attention.models.storage import (
    CONFIG,
    load_language_model,
    load_model,
    save_model,
)

RUN = "pretrain.json"
"""The file in a run folder that describes the run."""


class Checkpoint(NamedTuple):
    """A model and its tokenizer."""

    model: LanguageModel
    tokenizer: Tokenizer


def save_checkpoint(
    model: LanguageModel, tokenizer: Tokenizer, folder: str | os.PathLike[str]
) -> None:
    """Save a model and its tokenizer in one folder."""
    save_model(model, folder)
    tokenizer.save(folder)


def load_checkpoint(
    folder: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    device: str = "cpu",
) -> Checkpoint:
    """Load a checkpoint, native or HuggingFace's, in evaluation mode.

    Args:
        folder: folder written by ``save_checkpoint`` or ``save_pretrained``, or a pretraining run.
        tokenizer: folder of the tokenizer, if it is a different one.
        device: device of the model.
    """
    where = Path(folder)
    folder = _model_folder(where)
    found = Tokenizer.load(where if tokenizer is None else tokenizer)
    if read_json(folder / CONFIG).get("model_type") == "kla":
        model = _from_hf(folder, device)
    else:
        model = load_model(folder, device=device)
    if found.vocab_size > model.config.vocab_size:
        raise ValueError(
            f"the tokenizer has {found.vocab_size:,} tokens but the model in {folder} has "
            f"{model.config.vocab_size:,}: it was trained with another tokenizer."
        )
    return Checkpoint(model.eval(), found)


@contextmanager
def naming(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Add the name of the checkpoint to errors about results that are not finite."""
    try:
        yield
    except FloatingPointError as error:
        raise ValueError(f"{folder}: {error}") from error


def newest_run(runs: Path) -> Path:
    """The most recently written pretraining run."""
    found = [path.parent for path in runs.glob(f"*/{RUN}")]
    if not found:
        raise ValueError(
            f"there is no pretraining run in {runs}: pass a checkpoint, or train one with `kla "
            "pretrain nano`."
        )
    return max(found, key=lambda run: max(file.lstat().st_mtime for file in run.iterdir()))


def trained_on(folder: Path) -> Path | None:
    """The folder of shards that a pretraining run was trained on; None if it is not a run."""
    if not (folder / RUN).exists():
        return None
    return data_of(read_json(folder / RUN), folder / RUN)[0]


def data_of(origin: dict[str, Any], source: Path) -> tuple[Path, str]:
    """The folder of shards that a run was trained on, and the checksum of its index.

    Args:
        origin: the description of the run.
        source: the file it was read from, for error messages.
    """
    data = checked(dict[str, Any], origin.get("data"), "data", str(source))
    folder, index = (
        checked(str, data.get(name), f"data.{name}", str(source)) for name in ("folder", "index")
    )
    return Path(folder), index


def _model_folder(folder: Path) -> Path:
    """The folder of the model: the folder itself, or the newest checkpoint of a run."""
    stored = sorted(folder.glob("checkpoints/step-*"))
    for place in (folder, *stored[-1:]):
        if (place / CONFIG).exists() or (place / CONFIG).is_symlink():
            return place
    raise ValueError(
        f"{folder} is not a checkpoint: it has no {CONFIG} and is not a pretraining run."
    )


def _from_hf(folder: Path, device: str) -> LanguageModel:
    """Load a model saved by ``save_pretrained``, with the same checks as native models."""
    try:
        from kalman_attention.models.hf.configuration_kla import native_name, read_config
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{folder} holds a HuggingFace model: pip install 'kalman_attention[hf]'"
        ) from error
    config = read_config(folder / CONFIG).to_native()
    return load_language_model(config, folder, device=device, rename=native_name)
