"""A model on disk: a folder with ``config.json`` and ``model.safetensors``."""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from kalman_attention.models.autoencoder import Autoencoder, AutoencoderConfig
from kalman_attention.models.config import LanguageModelConfig
from kalman_attention.models.language_model import LanguageModel

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def save_model(model: LanguageModel | Autoencoder, folder: str | os.PathLike[str]) -> None:
    """Write a model. Each file appears whole or not at all, also after a crash.

    Args:
        model: what to save; weights keep their dtypes.
        folder: where; made if missing, overwritten if not.
    """
    from safetensors.torch import save  # here: importing the library brings nothing but torch

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {k: v.detach().contiguous() for k, v in model.state_dict().items()}
    if isinstance(model, LanguageModel) and model.config.tie_embeddings:
        del tensors["head.weight"]  # safetensors refuses two names for one memory
    weights = save(tensors, metadata={"format": "pt"})
    config = json.dumps(model.config.to_dict(), indent=2) + "\n"
    _write_atomically(folder / WEIGHTS, lambda path: path.write_bytes(weights))
    _write_atomically(folder / CONFIG, lambda path: path.write_text(config, encoding="utf-8"))


def load_model(folder: str | os.PathLike[str], *, device: str = "cpu") -> LanguageModel:
    """Read a language model that ``save_model`` wrote, with the dtypes it had then."""
    data, tensors = _read(folder, device)
    if "encoder" in data:
        raise ValueError(f"{folder} holds an autoencoder: read it with load_autoencoder.")
    model = LanguageModel(LanguageModelConfig.from_dict(data))
    if model.config.tie_embeddings:
        tensors["head.weight"] = tensors["embedding.weight"]
    model.load_state_dict(tensors, assign=True)
    if model.config.tie_embeddings:
        model.head.weight = model.embedding.weight
    return model


def load_autoencoder(folder: str | os.PathLike[str], *, device: str = "cpu") -> Autoencoder:
    """Read an autoencoder that ``save_model`` wrote, with the dtypes it had then."""
    data, tensors = _read(folder, device)
    if "encoder" not in data:
        raise ValueError(f"{folder} holds a language model: read it with load_model.")
    model = Autoencoder(AutoencoderConfig.from_dict(data))
    model.load_state_dict(tensors, assign=True)
    return model


def _read(folder: str | os.PathLike[str], device: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Configuration and tensors of a folder."""
    from safetensors.torch import load_file

    folder = Path(folder)
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} holds no {CONFIG}: it is not a folder that save_model wrote.")
    data = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    return data, load_file(folder / WEIGHTS, device=device)


def _write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write beside the target, flush to the disk, and put it in place in one move."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    part = Path(name)
    try:
        write(part)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.chmod(0o644)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
