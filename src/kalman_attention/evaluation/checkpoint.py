"""A checkpoint: a folder with a model and the tokenizer it was trained with.

The model is ``config.json`` and ``model.safetensors``, as ``save_model`` or HuggingFace's
``save_pretrained`` write them; the tokenizer is what ``Tokenizer.save`` writes beside them.
"""

import json
import os
from pathlib import Path
from typing import NamedTuple

from kalman_attention.data.tokenizer import Tokenizer
from kalman_attention.models.language_model import LanguageModel
from kalman_attention.models.storage import CONFIG, load_model, save_model


class Checkpoint(NamedTuple):
    """A model and its tokenizer."""

    model: LanguageModel
    tokenizer: Tokenizer


def save_checkpoint(
    model: LanguageModel, tokenizer: Tokenizer, folder: str | os.PathLike[str]
) -> None:
    """Write a model and its tokenizer into one folder."""
    save_model(model, folder)
    tokenizer.save(folder)


def load_checkpoint(
    folder: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    device: str = "cpu",
) -> Checkpoint:
    """Read a checkpoint, native or HuggingFace's, ready to predict.

    Args:
        folder: what ``save_checkpoint`` or ``save_pretrained`` wrote.
        tokenizer: where the tokenizer is, if not in the same folder.
        device: where the model goes.
    """
    folder = Path(folder)
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} is no checkpoint: it holds no {CONFIG}.")
    found = Tokenizer.load(folder if tokenizer is None else tokenizer)
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    if config.get("model_type") == "kla":
        model = _from_hf(folder).to(device)
    else:
        model = load_model(folder, device=device)
    if found.vocab_size > model.config.vocab_size:
        raise ValueError(
            f"the tokenizer has {found.vocab_size:,} tokens but the model in {folder} knows "
            f"{model.config.vocab_size:,}: it was trained with another tokenizer."
        )
    return Checkpoint(model.eval(), found)


def _from_hf(folder: Path) -> LanguageModel:
    try:
        from kalman_attention.models.hf import KLAForCausalLM
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{folder} holds a HuggingFace model: pip install 'kalman_attention[hf]'"
        ) from error
    model: LanguageModel = KLAForCausalLM.from_pretrained(folder).native()
    return model
