"""Export of a language model to ONNX: one program that reads a prompt, one that reads a token.

``prefill.onnx`` takes tokens ``[B, T]`` and a mask of the same shape, False for padding, and
returns logits ``[B, T, vocab_size]`` and the states after each row's last token. ``step.onnx``
takes one token per row, ``[B]``, and those states, and returns logits ``[B, vocab_size]`` and new
states. States are tensors named by block and field, such as ``0.belief.mean``; the output that
replaces an input has the same name with the suffix ``.next``. B and T are dynamic. Running the
programs does not need this package.
"""

import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kalman_attention.baselines.attention import AttentionState
from kalman_attention.models.language_model import LanguageModel
from kalman_attention.nn.mixer import map_state, state_tensors
from kalman_attention.ops.exported import scan_in_steps

PREFILL, STEP = "prefill.onnx", "step.onnx"

MIXERS = ("kla", "attention")
"""The mixers that can be exported; the loops of the others have no translation to ONNX here."""


class _Prefill(nn.Module):
    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        found = self.model(tokens, mask=mask)
        return found.logits, *_flat(found.states)


class _Step(nn.Module):
    def __init__(self, model: LanguageModel, like: tuple[Any, ...]) -> None:
        super().__init__()
        self.model, self.like = model, like

    def forward(self, token: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        rest = iter(states)
        found = self.model.step(token, tuple(_filled(state, rest) for state in self.like))
        return found.logits, *_flat(found.states)


@torch.no_grad()
def export_onnx(model: LanguageModel, folder: str | Path) -> tuple[Path, Path]:
    """Write ``prefill.onnx`` and ``step.onnx``; needs ``pip install 'kalman_attention[onnx]'``.

    Args:
        model: a float32 model of KLA and attention blocks.
        folder: output folder; created if it does not exist.

    Returns:
        The two files.
    """
    _check(model)
    if find_spec("onnxscript") is None:
        raise ValueError(
            "torch exports ONNX through onnxscript, which is not installed: "
            "pip install 'kalman_attention[onnx]'."
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    was_training = model.training
    model.eval()
    tokens = torch.zeros(2, 3, dtype=torch.int64, device=model.norm.weight.device)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    states = model(tokens, mask=mask).states
    names = [f"{i}.{name}" for i, state in enumerate(states) for name, _ in state_tensors(state)]
    later = [f"{name}.next" for name in names]
    batch, time, past = (torch.export.Dim(name) for name in ("batch", "time", "past"))
    both = {0: batch, 1: time}
    args, inputs = (tokens, mask), ["tokens", "mask"]
    _write(_Prefill(model), args, (both, both), inputs, later, folder / PREFILL)
    grows = {"keys": 2, "values": 2, "real": 1}  # the time axis in the fields of attention states
    axes = [{0: batch} for _ in names]
    for name, axis in zip(names, axes, strict=True):
        if (field := name.split(".")[-1]) in grows:
            axis[grows[field]] = past
    _write(
        _Step(model, states),
        (tokens[:, 0], *_flat(states)),
        ({0: batch}, tuple(axes)),
        ["token", *names],
        later,
        folder / STEP,
    )
    model.train(was_training)
    return folder / PREFILL, folder / STEP


def _write(
    program: nn.Module,
    args: tuple[Tensor, ...],
    shapes: tuple[Any, ...],
    inputs: list[str],
    states: list[str],
    path: Path,
) -> None:
    op = torch.ops.kalman_attention.scan.default
    table = {**torch.export.default_decompositions(), op: scan_in_steps}
    names: dict[str, Any] = {"input_names": inputs, "output_names": ["logits", *states]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about its own internals
        plain = torch.export.export(program, args, dynamic_shapes=shapes).run_decompositions(table)
        found = torch.onnx.export(plain, dynamo=True, verbose=False, **names)
    assert found is not None
    found.save(path)


def _flat(states: tuple[Any, ...]) -> list[Tensor]:
    return [tensor for state in states for _, tensor in state_tensors(state)]


def _filled(like: Any, rest: Iterator[Tensor]) -> Any:
    """A state of the same structure, filled with the next tensors."""
    state = map_state(lambda _: next(rest), like)
    if isinstance(state, AttentionState):
        return state._replace(length=state.keys.shape[2])
    return state


def _check(model: LanguageModel) -> None:
    others = sorted(set(model.config.layers) - set(MIXERS))
    if others:
        raise ValueError(
            f"blocks of {', '.join(others)} cannot be written as ONNX, only those of "
            f"{' and '.join(MIXERS)}. Export a model that has only these."
        )
    if model.norm.weight.dtype != torch.float32:
        raise ValueError(
            f"ONNX programs are written in float32, but this model is {model.norm.weight.dtype}. "
            "Convert a copy with .float()."
        )
