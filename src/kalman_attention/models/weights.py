"""Weights in safetensors files: headers are compared with the model before tensors are read."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kalman_attention._reading import checked, open_file, read_json
from kalman_attention.nn.float32 import KeepsFloat32

WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_SHOWN = 4  # names listed in an error


class Header(NamedTuple):
    """Shape and dtype of a tensor in a file.

    Attributes:
        shape: shape of the tensor.
        dtype: dtype as safetensors names it, such as ``"F32"``.
    """

    shape: tuple[int, ...]
    dtype: str


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a folder: one, or the several that transformers may write."""
    if not (folder / WEIGHTS_INDEX).exists():
        return [folder / WEIGHTS]
    source = folder / WEIGHTS_INDEX
    listed = checked(dict[str, str], read_json(source).get("weight_map"), "weight_map", str(source))
    names = sorted(set(listed.values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ValueError(f"{source} is damaged: {name!r} is not a weight file next to it.")
    if not names:
        raise ValueError(f"{source} is damaged: it names no file.")
    return [folder / name for name in names]


def read_header(path: Path) -> dict[str, Header]:
    """Shapes and dtypes of all tensors in a file, by name; reads nothing but the header."""
    with _opened(path) as file:
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {n: Header(tuple(x.get_shape()), x.get_dtype()) for n, x in parts.items()}


def read_tensors(path: Path, device: str = "cpu") -> dict[str, Tensor]:
    """All tensors of a file, by name; values that are not finite are an error."""
    with _opened(path, device) as file:
        tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.numel():
            least, most = (bound.item() for bound in tensor.aminmax())  # NaN makes both NaN
            if not (least > -torch.inf and most < torch.inf):
                raise ValueError(
                    f"{name} in {path} has values that are not finite: {least} to {most}. The file "
                    "is damaged, or the training has diverged; use an earlier checkpoint."
                )
    return tensors


@contextmanager
def _opened(path: Path, device: str = "cpu") -> Iterator[Any]:
    """Open a safetensors file; every problem with it is a ValueError."""
    from safetensors import SafetensorError, safe_open  # here: see storage.model_files

    open_file(path).close()  # rejects pipes, where the library would wait, and devices
    try:
        with safe_open(path, "pt", device) as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged: not a safetensors file ({error}).") from error


def check_header(
    found: Mapping[str, Header], model: nn.Module, file: Path, shared: Collection[str] = ()
) -> None:
    """Reject weights that do not belong to a model.

    Args:
        found: the header of the file.
        model: the model, possibly on the meta device.
        file: the file, for error messages.
        shared: tensors of the model that share memory with another one and are not stored.
    """
    wanted = {n: x for n, x in model.state_dict().items() if n not in shared}
    missing, more = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    if missing or more:
        told = [
            f"{what} {_few(names)}" for what, names in (("no", missing), ("also", more)) if names
        ]
        raise ValueError(f"{file} holds the weights of another model: {' and '.join(told)}.")
    for name, tensor in wanted.items():
        if found[name].shape != tuple(tensor.shape):
            raise ValueError(
                f"{name} in {file} has the shape {list(found[name].shape)}, but the configuration "
                f"makes it {list(tensor.shape)}."
            )
    _check_types(found, model, file)


def _check_types(found: Mapping[str, Header], model: nn.Module, file: Path) -> None:
    """Require one floating dtype, except float32 dynamics and the embedding table, of any dtype."""
    kept = {
        f"{prefix}.{name}"
        for prefix, module in model.named_modules()
        if isinstance(module, KeepsFloat32)
        for name, _ in module.named_parameters()
    }
    own = found["norm.weight"].dtype if "norm.weight" in found else "F32"
    for name, (_, dtype) in found.items():
        allowed = set(_FLOATS) if name == "embedding.weight" else {own}
        if name in kept and own in ("F16", "BF16"):
            allowed = {own, "F32"}
        if dtype not in allowed or dtype not in _FLOATS:
            raise ValueError(
                f"{name} in {file} is of type {dtype}, which does not fit: it must be "
                f"{' or '.join(sorted(allowed & set(_FLOATS)) or _FLOATS)}."
            )


def _few(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
