"""A model on disk: ``config.json``, ``model.safetensors``, and the checksums of the two."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from kalman_attention._files import write_atomically
from kalman_attention._reading import read_json
from kalman_attention.models.autoencoder import Autoencoder, AutoencoderConfig
from kalman_attention.models.checksums import (
    check_folder,
    describe,
    forget_checksums,
    write_checksums,
)
from kalman_attention.models.config import LanguageModelConfig
from kalman_attention.models.language_model import LanguageModel
from kalman_attention.models.series import SeriesModel
from kalman_attention.models.series_config import SeriesConfig
from kalman_attention.models.weights import (
    WEIGHTS,
    Header,
    check_header,
    read_header,
    read_tensors,
    weight_files,
)

CONFIG = "config.json"

Built = TypeVar("Built", bound=nn.Module)


def save_model(
    model: LanguageModel | Autoencoder | SeriesModel, folder: str | os.PathLike[str]
) -> None:
    """Save a model. Files are written atomically, so that a crash leaves no partial file.

    Args:
        model: the model; weights keep their dtypes.
        folder: output folder; created if it does not exist, overwritten if it does.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files = model_files(model)
    forget_checksums(folder)
    for name, data in files.items():
        write_atomically(folder / name, data)
    write_checksums(folder, describe(files))


def model_files(model: nn.Module, tensors: dict[str, Tensor] | None = None) -> dict[str, bytes]:
    """The files of any model, by name: its weights, and its configuration if it is one of ours.

    Args:
        model: the model.
        tensors: its weights, if ``distinct_tensors`` cannot provide them.
    """
    from safetensors.torch import save  # here, so that importing this package imports only torch

    weights = distinct_tensors(model) if tensors is None else tensors
    files = {WEIGHTS: save(weights, metadata={"format": "pt"})}
    if isinstance(model, LanguageModel | Autoencoder | SeriesModel):
        config = json.dumps(model.config.to_dict(), indent=2) + "\n"
        files[CONFIG] = config.encode()
    return files


def distinct_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; shared tensors appear once, under their first name."""
    found: dict[str, Tensor] = {}
    seen: set[tuple[object, ...]] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        memory: tuple[object, ...] = (
            tensor.device,
            tensor.data_ptr() or id(tensor),  # a tensor sharded over processes has no address
            tensor.shape,
            tensor.stride(),
        )
        if tensor.numel() == 0 or memory not in seen:  # safetensors rejects two names for one
            seen.add(memory)
            found[name] = tensor.detach().contiguous()
    return found


def load_model(folder: str | os.PathLike[str], *, device: str = "cpu") -> LanguageModel:
    """Load a language model saved by ``save_model``, with the dtypes it was saved in.

    Checksums, names, shapes and values are checked; mismatches are rejected before memory is
    allocated.
    """
    folder = Path(folder)
    data = _read_config(folder)
    if "encoder" in data:
        raise ValueError(
            f"{folder / CONFIG} describes an autoencoder: read it with load_autoencoder."
        )
    if data.get("model_type") == "kla":
        raise ValueError(
            f"{folder} holds a transformers model: read it with "
            "kalman_attention.hf.KLAForCausalLM.from_pretrained, whose native() is this model."
        )
    config = LanguageModelConfig.from_dict(data, str(folder / CONFIG))
    return load_language_model(config, folder, device=device)


def load_language_model(
    config: LanguageModelConfig,
    folder: Path,
    *,
    device: str = "cpu",
    rename: Callable[[str], str] = str,
) -> LanguageModel:
    """A language model from a configuration, and a folder of weights.

    Args:
        config: options of the model, not yet checked against the weights.
        folder: folder with ``model.safetensors``, or the shards that transformers writes.
        device: device of the model.
        rename: maps the name of a tensor in the folder to its name in the native model.
    """
    files = weight_files(folder)
    check_folder(folder, [CONFIG, *(path.name for path in files)])
    headers = {rename(name): found for path in files for name, found in read_header(path).items()}
    _check_sizes(headers, config, files[0])
    model = _on_meta(LanguageModel, config, folder)
    shared = {"head.weight"} if config.tie_embeddings else set()
    check_header(headers, model, files[0], shared)
    tensors = {rename(n): x for path in files for n, x in read_tensors(path, device).items()}
    if config.tie_embeddings:
        tensors["head.weight"] = tensors["embedding.weight"]
    model.load_state_dict(tensors, assign=True)
    if config.tie_embeddings:
        model.head.weight = model.embedding.weight
    return model


def load_autoencoder(folder: str | os.PathLike[str], *, device: str = "cpu") -> Autoencoder:
    """Load an autoencoder saved by ``save_model``, with the dtypes it was saved in."""
    folder = Path(folder)
    data = _read_config(folder)
    if "encoder" not in data:
        raise ValueError(f"{folder / CONFIG} describes a language model: read it with load_model.")
    config = AutoencoderConfig.from_dict(data, str(folder / CONFIG))
    check_folder(folder, [CONFIG, WEIGHTS])
    headers = read_header(folder / WEIGHTS)
    _check_sizes(headers, config.encoder, folder / WEIGHTS)
    model = _on_meta(Autoencoder, config, folder)
    check_header(headers, model, folder / WEIGHTS)
    model.load_state_dict(read_tensors(folder / WEIGHTS, device), assign=True)
    return model


def load_series_model(folder: str | os.PathLike[str], *, device: str = "cpu") -> SeriesModel:
    """Load a series model saved by ``save_model``, with the dtypes it was saved in."""
    folder = Path(folder)
    config = SeriesConfig.from_dict(_read_config(folder), str(folder / CONFIG))
    check_folder(folder, [CONFIG, WEIGHTS])
    model = _on_meta(SeriesModel, config, folder)
    check_header(read_header(folder / WEIGHTS), model, folder / WEIGHTS)
    model.load_state_dict(read_tensors(folder / WEIGHTS, device), assign=True)
    return model


def _read_config(folder: Path) -> dict[str, Any]:
    if not (folder / CONFIG).exists():
        raise ValueError(f"{folder} holds no {CONFIG}: it is not a folder that save_model wrote.")
    return read_json(folder / CONFIG)


def _on_meta(cls: type[Built], config: Any, folder: Path) -> Built:
    """A model on the meta device; options that no tensor can have are an error."""
    try:
        with torch.device("meta"):
            return cls(config)
    except (RuntimeError, TypeError, OverflowError, ZeroDivisionError) as error:
        raise ValueError(f"{folder / CONFIG} does not describe a model: {error}") from error


def _check_sizes(headers: Mapping[str, Header], config: LanguageModelConfig, file: Path) -> None:
    """Cheap checks, before even the modules of a model are built."""
    blocks = {name.split(".")[1] for name in headers if name.startswith("blocks.")}
    if len(blocks) != len(config.layers):
        raise ValueError(
            f"{file} holds the weights of another model: its number of blocks is {len(blocks)}, "
            f"but the plan in {CONFIG} has {len(config.layers)}."
        )
    found = headers.get("embedding.weight")
    wanted = (config.vocab_size, config.d_model)
    if found is not None and found.shape != wanted:
        raise ValueError(
            f"embedding.weight in {file} has the shape {list(found.shape)}, but vocab_size and "
            f"d_model in {CONFIG} make it {list(wanted)}."
        )
