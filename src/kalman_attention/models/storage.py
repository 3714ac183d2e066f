"""A model on disk: a folder with ``config.json`` and ``model.safetensors``."""

import json
import os
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from kalman_attention._files import write_atomically
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
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in model_files(model).items():
        write_atomically(folder / name, data)


def model_files(model: nn.Module, tensors: dict[str, Tensor] | None = None) -> dict[str, bytes]:
    """The files of any model, by name: its weights, and its configuration if it is one of ours.

    Args:
        model: what to save.
        tensors: its weights, where they are not to be had from ``distinct_tensors``.
    """
    from safetensors.torch import save  # here: importing the library brings nothing but torch

    weights = distinct_tensors(model) if tensors is None else tensors
    files = {WEIGHTS: save(weights, metadata={"format": "pt"})}
    if isinstance(model, LanguageModel | Autoencoder):
        config = json.dumps(model.config.to_dict(), indent=2) + "\n"
        files[CONFIG] = config.encode()
    return files


def distinct_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; what is shared appears once, under its first name."""
    found: dict[str, Tensor] = {}
    seen: set[tuple[object, ...]] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        memory: tuple[object, ...] = (
            tensor.device,
            tensor.data_ptr() or id(tensor),  # one that is spread over processes has no address
            tensor.shape,
            tensor.stride(),
        )
        if tensor.numel() == 0 or memory not in seen:  # safetensors refuses two names for one
            seen.add(memory)
            found[name] = tensor.detach().contiguous()
    return found


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
