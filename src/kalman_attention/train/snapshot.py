"""The state of a run: from model and optimiser to files, and back."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kalman_attention.models.checksums import MANIFEST, check_folder
from kalman_attention.models.storage import distinct_tensors, model_files
from kalman_attention.models.weights import WEIGHTS, check_header, read_header, read_tensors
from kalman_attention.parallel.ranks import Parallel
from kalman_attention.parallel.sharding import copy_weights, like
from kalman_attention.train.checkpoint import read_checkpoint
from kalman_attention.train.config import TrainConfig

OPTIMISER = "optimiser.safetensors"

_SHOWN = 12  # names in an error, which stays readable


def snapshot_files(
    model: nn.Module, optimiser: torch.optim.Optimizer, parallel: Parallel
) -> dict[str, bytes]:
    """Contents of all files of a checkpoint, by name; moments are keyed by parameter name.

    They do not depend on the number of processes, all of which must call this; only the main one
    gets a result.
    """
    from safetensors.torch import save  # here, so that importing the library needs only torch

    moments = {
        f"{key}/{name}": value.detach().contiguous()
        for name, parameter in model.named_parameters()
        for key, value in optimiser.state.get(parameter, {}).items()
    }
    weights, moments = parallel.collect(distinct_tensors(model)), parallel.collect(moments)
    if not parallel.main:
        return {}
    return {**model_files(model, weights), OPTIMISER: save(moments)}


def load_weights(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Load the weights of a checkpoint into a model, for example the best: ``run/best``.

    Args:
        model: a model of the same architecture, modified in place.
        folder: a folder with ``model.safetensors``.
    """
    folder = Path(folder)
    if (folder / MANIFEST).exists():
        read_checkpoint(folder)  # raises if it is damaged
    else:
        check_folder(folder, [WEIGHTS])
    # Shared weights are stored once; their other names are not in the file.
    own = distinct_tensors(model)
    shared = set(model.state_dict()) - set(own)
    check_header(read_header(folder / WEIGHTS), model, folder / WEIGHTS, shared)
    copy_weights(model, read_tensors(folder / WEIGHTS))


def load_optimiser(model: nn.Module, optimiser: torch.optim.Optimizer, folder: Path) -> None:
    """Load the moments of a checkpoint into an optimiser."""
    optimiser.state.clear()
    parameters = dict(model.named_parameters())
    for key_and_name, value in read_tensors(folder / OPTIMISER).items():
        key, _, name = key_and_name.partition("/")
        parameter = parameters.get(name)
        if parameter is None or (key != "step" and value.shape != parameter.shape):
            raise ValueError(
                f"{key_and_name} in {folder / OPTIMISER} does not match this model: there is no "
                "such parameter, or it has another shape."
            )
        # Adam counts steps in a scalar that stays on the CPU unless the update is fused.
        fused = bool(optimiser.defaults.get("fused"))
        device = "cpu" if key == "step" and not fused else parameter.device
        value = value.to(device, copy=True)  # a copy, not a view of the mapped file
        optimiser.state[parameter][key] = value if key == "step" else like(value, parameter)


def identity(
    config: TrainConfig,
    model: nn.Module,
    groups: Sequence[Mapping[str, Any]],
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """What must be equal in a run and in the checkpoint that it continues from."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    described = {
        str(group.get("name", i)): {
            **{key: group[key] for key in ("lr", "weight_decay", "betas", "eps")},
            "parameters": [names[id(parameter)] for parameter in group["params"]],
        }
        for i, group in enumerate(groups)
    }
    weights = {name: _describe(tensor) for name, tensor in distinct_tensors(model).items()}
    found = {"config": config.fixed(), "model": weights, "groups": described, "about": about}
    plain: dict[str, Any] = json.loads(json.dumps(found))
    return plain


def check_identity(stored: Mapping[str, Any], own: Mapping[str, Any], where: Path) -> None:
    """Raise an error that lists the differences if a checkpoint belongs to another run."""
    before, now = _flatten(stored), _flatten(own)
    missing = "nothing"
    lines = [
        f"  {key}: {_short(before.get(key, missing))} there, {_short(now.get(key, missing))} here"
        for key in sorted(before.keys() | now.keys())
        if before.get(key, missing) != now.get(key, missing)
    ]
    if lines:
        more = [f"  and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        listed = "\n".join(lines[:_SHOWN] + more)
        raise ValueError(
            f"{where} is a checkpoint of another run:\n{listed}\nTo continue it, use its settings; "
            "to train with these, choose another folder."
        )


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
