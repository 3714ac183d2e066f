"""Folders as a crash, a bad disk or a stranger may leave them: each is to be refused, by name."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from kalman_attention.models.storage import CONFIG, WEIGHTS

Spoil = Callable[[Path], None]


class Case(NamedTuple):
    """One way to spoil a good folder.

    Attributes:
        name: of the case.
        file: which the message must name.
        spoil: changes the folder.
        also: words that the message must hold besides.
    """

    name: str
    file: str
    spoil: Spoil
    also: tuple[str, ...] = ()


def merged(data: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Data with some fields changed, inner ones by a dotted name."""
    for name, value in changes.items():
        *outer, last = name.split(".")
        place = data
        for key in outer:
            if not isinstance(place.get(key), dict):
                place[key] = {}
            place = place[key]
        place[last] = value
    return data


def fields(file: str, **changes: Any) -> Spoil:
    """Set fields of a JSON file; a double underscore stands for a dot."""
    dotted = {name.replace("__", "."): value for name, value in changes.items()}

    def spoil(folder: Path) -> None:
        data = merged(json.loads((folder / file).read_text()), dotted)
        (folder / file).write_text(json.dumps(data))

    return spoil


def without(file: str, *names: str) -> Spoil:
    """Remove fields of a JSON file."""

    def spoil(folder: Path) -> None:
        data = json.loads((folder / file).read_text())
        for name in names:
            del data[name]
        (folder / file).write_text(json.dumps(data))

    return spoil


def shard_field(name: str, value: Any) -> Spoil:
    """Set a field of the first shard of an index."""

    def spoil(folder: Path) -> None:
        data = json.loads((folder / "index.json").read_text())
        data["shards"][0][name] = value
        (folder / "index.json").write_text(json.dumps(data))

    return spoil


def content(file: str, data: bytes) -> Spoil:
    """Replace a file."""
    return lambda folder: (folder / file).write_bytes(data) and None


def changed(file: str, old: str, new: str) -> Spoil:
    """Replace a piece of a text file."""

    def spoil(folder: Path) -> None:
        text = (folder / file).read_text()
        assert old in text
        (folder / file).write_text(text.replace(old, new, 1))

    return spoil


def cut(file: str, keep: float) -> Spoil:
    """Keep only the first part of a file."""

    def spoil(folder: Path) -> None:
        os.truncate(folder / file, int((folder / file).stat().st_size * keep))

    return spoil


def flip(file: str, place: float, bit: int = 6) -> Spoil:
    """Change one bit."""

    def spoil(folder: Path) -> None:
        data = bytearray((folder / file).read_bytes())
        data[int((len(data) - 1) * place)] ^= 1 << bit
        (folder / file).write_bytes(data)

    return spoil


def replaced(file: str, make: Callable[[Path], object]) -> Spoil:
    """Put something else in place of a file."""

    def spoil(folder: Path) -> None:
        (folder / file).unlink()
        make(folder / file)

    return spoil


def a_folder(path: Path) -> None:
    path.mkdir()


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_loop(path: Path) -> None:
    path.symlink_to(path.name)


def nothing(path: Path) -> None:
    """The file is missing."""


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Spoil:
    """Change tensors of the model."""

    def spoil(folder: Path) -> None:
        tensors = {name: x.clone() for name, x in load_file(folder / WEIGHTS).items()}
        change(tensors)
        save_file(tensors, folder / WEIGHTS)

    return spoil


def header(data: bytes, length: int | None = None) -> Spoil:
    """Give the weights another header, and the length that it claims to have."""
    size = len(data) if length is None else length
    return content(WEIGHTS, struct.pack("<Q", size) + data + bytes(64))


def deep(levels: int) -> bytes:
    return b'{"a":' * levels + b"1" + b"}" * levels


def set_value(name: str, value: float) -> Spoil:
    return weights(lambda tensors: tensors[name].view(-1)[3:4].fill_(value))


def replace_tensor(name: str, tensor: torch.Tensor) -> Spoil:
    return weights(lambda tensors: tensors.update({name: tensor}))


def removed(names: str) -> Spoil:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if names in name]:
            del tensors[name]

    return weights(change)


def copied(source: Path, target: Path) -> Path:
    """A copy of a folder, to be spoilt."""
    shutil.copytree(source, target, symlinks=True)
    return target


CONFIGS = [
    Case("empty", CONFIG, content(CONFIG, b"")),
    Case("no JSON", CONFIG, content(CONFIG, b"plan: kla")),
    Case("cut", CONFIG, cut(CONFIG, 0.5)),
    Case("a list", CONFIG, content(CONFIG, b"[1, 2]")),
    Case("a word", CONFIG, content(CONFIG, b'"kla"')),
    Case("no UTF-8", CONFIG, content(CONFIG, b'{"plan": "\xff\xfe"}')),
    Case("UTF-16", CONFIG, content(CONFIG, '{"vocab_size": 3}'.encode("utf-16"))),
    Case("deep nesting", CONFIG, content(CONFIG, deep(200_000))),
    Case("no fields", CONFIG, content(CONFIG, b"{}"), ("vocab_size",)),
    Case(
        "a key twice",
        CONFIG,
        changed(CONFIG, '"d_model"', '"vocab_size": 7, "d_model"'),
        ("vocab_size",),
    ),
    Case("NaN", CONFIG, changed(CONFIG, '"norm_eps": 1e-05', '"norm_eps": NaN')),
    Case("overflow", CONFIG, changed(CONFIG, '"norm_eps": 1e-05', '"norm_eps": 1e999')),
    Case("digits", CONFIG, changed(CONFIG, '"vocab_size": 300', '"vocab_size": ' + "9" * 9_000)),
    Case("missing", CONFIG, replaced(CONFIG, nothing)),
    Case("a folder", CONFIG, replaced(CONFIG, a_folder)),
    Case("a pipe", CONFIG, replaced(CONFIG, a_pipe)),
    Case("a device", CONFIG, replaced(CONFIG, a_device)),
    Case("a loop of links", CONFIG, replaced(CONFIG, a_loop)),
    Case("a misspelt field", CONFIG, fields(CONFIG, d_modle=16), ("d_modle", "d_model")),
    Case("a misspelt option", CONFIG, fields(CONFIG, kla__d_stat=4), ("kla.d_stat", "d_state")),
    Case("width as text", CONFIG, fields(CONFIG, d_model="16"), ("d_model",)),
    Case("width with a fraction", CONFIG, fields(CONFIG, d_model=16.5), ("d_model",)),
    Case("width as truth", CONFIG, fields(CONFIG, d_model=True), ("d_model",)),
    Case("negative vocabulary", CONFIG, fields(CONFIG, vocab_size=-300), ("vocab_size",)),
    Case("no vocabulary", CONFIG, fields(CONFIG, vocab_size=0), ("vocab_size",)),
    Case("negative width of the MLP", CONFIG, fields(CONFIG, mlp="relu2", mlp_width=-8)),
    Case("beyond 64 bits", CONFIG, fields(CONFIG, vocab_size=10**30), ("vocab_size",)),
    Case("plan as a number", CONFIG, fields(CONFIG, plan=2), ("plan",)),
    Case("plan as an object", CONFIG, fields(CONFIG, plan={"kla": 2}), ("plan",)),
    Case("plan of lists", CONFIG, fields(CONFIG, plan=[["kla"], ["kla"]]), ("plan",)),
    Case("plan of nothing", CONFIG, fields(CONFIG, plan=[]), ("plan",)),
    Case("unknown mixer", CONFIG, fields(CONFIG, plan=["kla", "rnn"]), ("rnn",)),
    Case("options as a list", CONFIG, fields(CONFIG, kla=[16, 4]), ("kla",)),
    Case("negative slots", CONFIG, fields(CONFIG, kla__d_state=-4), ("d_state",)),
    Case("options in an option", CONFIG, fields(CONFIG, kla__qk_norm={"a": 1}), ("kla.qk_norm",)),
    Case("rates of three", CONFIG, fields(CONFIG, kla__decay_rate=[1.0, 2.0, 3.0])),
    Case("an unknown word", CONFIG, fields(CONFIG, kla__prior="flat"), ("kla.prior", "unit")),
    Case("heads of nothing", CONFIG, fields(CONFIG, attention__num_heads=0), ("num_heads",)),
    Case("another width", CONFIG, fields(CONFIG, d_model=32, kla=None, attention=None)),
    Case("one block more", WEIGHTS, fields(CONFIG, plan="kla*3")),
    Case("other mixers", WEIGHTS, fields(CONFIG, plan="mamba*2")),
    Case("more slots", WEIGHTS, fields(CONFIG, kla__d_state=8)),
    Case("blocks of blocks", CONFIG, fields(CONFIG, plan="((kla*99)*99)*99"), ("4,096 blocks",)),
    Case("blocks without end", CONFIG, fields(CONFIG, plan="kla*" + "9" * 99), ("4,096 blocks",)),
    Case("parentheses", CONFIG, fields(CONFIG, plan="(" * 5000 + "kla"), ("parentheses",)),
    Case("many blocks", WEIGHTS, fields(CONFIG, plan="kla*4000"), ("number of blocks is 2",)),
    Case("channels beyond 64 bits", CONFIG, fields(CONFIG, kla__d_inner=2**61)),
    Case("slots without end", WEIGHTS, fields(CONFIG, kla__d_state=10**13)),
    Case("an autoencoder", CONFIG, fields(CONFIG, encoder={}), ("autoencoder",)),
]

MODELS = [
    Case("empty", WEIGHTS, content(WEIGHTS, b"")),
    Case("seven bytes", WEIGHTS, content(WEIGHTS, bytes(7))),
    Case("noise", WEIGHTS, content(WEIGHTS, bytes(range(256)) * 8)),
    Case("cut", WEIGHTS, cut(WEIGHTS, 0.7)),
    Case("cut in the header", WEIGHTS, cut(WEIGHTS, 0.01)),
    Case("header beyond the end", WEIGHTS, header(b"{}", 1 << 40)),
    Case("header of all memory", WEIGHTS, header(b"{}", (1 << 64) - 1)),
    Case("header of nothing", WEIGHTS, header(b"{}")),
    Case("header of noise", WEIGHTS, header(b"\xff\xfe{}")),
    Case("deep header", WEIGHTS, header(deep(100_000))),
    Case(
        "shape of all memory",
        WEIGHTS,
        header(b'{"head.weight":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,64]}}'),
    ),
    Case("missing", WEIGHTS, replaced(WEIGHTS, nothing)),
    Case("a folder", WEIGHTS, replaced(WEIGHTS, a_folder)),
    Case("a pipe", WEIGHTS, replaced(WEIGHTS, a_pipe)),
    Case("a device", WEIGHTS, replaced(WEIGHTS, a_device)),
    Case("a loop of links", WEIGHTS, replaced(WEIGHTS, a_loop)),
    Case("not a number", WEIGHTS, set_value("head.weight", torch.nan), ("head.weight",)),
    Case("infinity", WEIGHTS, set_value("norm.weight", torch.inf), ("norm.weight",)),
    Case("a tensor less", WEIGHTS, removed("head"), ("head.weight",)),
    Case("a block less", WEIGHTS, removed("blocks.1."), ("number of blocks is 1",)),
    Case("a tensor more", WEIGHTS, replace_tensor("extra", torch.ones(2)), ("extra",)),
    Case("another shape", WEIGHTS, replace_tensor("norm.weight", torch.ones(17)), ("norm.weight",)),
    Case("integers", WEIGHTS, replace_tensor("norm.weight", torch.ones(16, dtype=torch.int64))),
    Case("one of 64 bits", WEIGHTS, replace_tensor("head.weight", torch.ones(300, 16).double())),
]

_TOKENS, _SIDE = "tokenizer.json", "tokenizer_config.json"
TOKENIZERS = [
    Case("empty", _TOKENS, content(_TOKENS, b"")),
    Case("cut", _TOKENS, cut(_TOKENS, 0.5)),
    Case("another object", _TOKENS, content(_TOKENS, b'{"a": 1}')),
    Case("no UTF-8", _TOKENS, content(_TOKENS, b'{"version": "\xff"}')),
    Case("deep nesting", _TOKENS, content(_TOKENS, deep(100_000))),
    Case("missing", _TOKENS, replaced(_TOKENS, nothing)),
    Case("a folder", _TOKENS, replaced(_TOKENS, a_folder)),
    Case("a pipe", _TOKENS, replaced(_TOKENS, a_pipe)),
    Case("a device", _TOKENS, replaced(_TOKENS, a_device)),
    Case("an id of 32 bits", _TOKENS, changed(_TOKENS, '"!":0', '"!":4294967290')),
    Case("an empty vocabulary", _TOKENS, fields(_TOKENS, model__vocab={}, model__merges=[])),
    Case("a merge of nothing", _TOKENS, fields(_TOKENS, model__merges=[["x", "yz"]])),
    Case("side file cut", _SIDE, cut(_SIDE, 0.5)),
    Case("side file a list", _SIDE, content(_SIDE, b"[]")),
    Case("side file deep", _SIDE, content(_SIDE, deep(200_000))),
    Case("side file a pipe", _SIDE, replaced(_SIDE, a_pipe)),
    Case("start of text as a number", _SIDE, fields(_SIDE, bos_token=7), ("bos_token",)),
    Case("unknown start of text", _SIDE, fields(_SIDE, bos_token="<none>"), ("<none>",)),
]

_INDEX, _RUN = "index.json", "pretrain.json"
INDICES = [
    Case("cut", _INDEX, cut(_INDEX, 0.5)),
    Case("a list", _INDEX, content(_INDEX, b"[]")),
    Case("deep nesting", _INDEX, content(_INDEX, deep(200_000))),
    Case("shards as a number", _INDEX, fields(_INDEX, shards=3), ("shards",)),
    Case("a shard as text", _INDEX, fields(_INDEX, shards=["train_00000"]), ("shards",)),
    Case("negative tokens", _INDEX, shard_field("tokens", -5), ("tokens",)),
    Case("ids as objects", _INDEX, fields(_INDEX, dtype="O"), ("dtype",)),
    Case("ids as nothing", _INDEX, fields(_INDEX, dtype=[1]), ("dtype",)),
    Case("vocabulary as text", _INDEX, fields(_INDEX, vocab_size="x"), ("vocab_size",)),
    Case("a key twice", _INDEX, changed(_INDEX, '"bos"', '"bos": 1, "bos"'), ("bos",)),
    Case("a pipe", _INDEX, replaced(_INDEX, a_pipe)),
]

RUNS = [
    Case("cut", _RUN, cut(_RUN, 0.5)),
    Case("a list", _RUN, content(_RUN, b"[]")),
    Case("no data", _RUN, without(_RUN, "data"), ("data",)),
    Case("data as a word", _RUN, fields(_RUN, data="shards"), ("data",)),
    Case("folder as a number", _RUN, fields(_RUN, data__folder=3), ("data.folder",)),
    Case("a folder with a zero", _RUN, fields(_RUN, data__folder="a\0b"), ("data.folder",)),
    Case("deep nesting", _RUN, content(_RUN, deep(200_000))),
    Case("a pipe", _RUN, replaced(_RUN, a_pipe)),
]

_SUMMARY, _METRICS = "summary.json", "metrics.jsonl"
COMPARED = [
    Case("recipe missing", _RUN, without(_RUN, "recipe"), ("recipe",)),
    Case("recipe of text", _RUN, fields(_RUN, recipe="nano"), ("recipe",)),
    Case("rates of text", _RUN, fields(_RUN, recipe__rates__hidden="x"), ("recipe.rates.hidden",)),
    Case("a rate less", _RUN, fields(_RUN, recipe__rates__betas=[0.9]), ("recipe.rates.betas",)),
    Case("length as text", _RUN, fields(_RUN, recipe__seq_len="x"), ("recipe.seq_len",)),
    Case("rows of nothing", _RUN, fields(_RUN, recipe__micro_batch=0), ("micro_batch",)),
    Case("summary cut", _SUMMARY, cut(_SUMMARY, 0.5)),
    Case("summary a list", _SUMMARY, content(_SUMMARY, b"[]")),
    Case("summary of nothing", _SUMMARY, content(_SUMMARY, b"{}")),
    Case("summary of text", _SUMMARY, fields(_SUMMARY, parameters="x"), ("parameters",)),
    Case("metrics of noise", _METRICS, content(_METRICS, b"noise\n")),
    Case("metrics no UTF-8", _METRICS, content(_METRICS, b'{"kind": "\xff"}\n')),
    Case("metrics of lists", _METRICS, content(_METRICS, b"[1]\n")),
    Case("metrics without a step", _METRICS, content(_METRICS, b'{"kind": "eval"}\n')),
    Case("metrics deep", _METRICS, content(_METRICS, deep(200_000) + b"\n")),
    Case(
        "metrics of text",
        _METRICS,
        content(_METRICS, b'{"kind": "eval", "step": 1, "bits_per_byte": "x"}\n'),
    ),
    Case("metrics a pipe", _METRICS, replaced(_METRICS, a_pipe)),
]

CELL = "cell.json"
"""Stands for the file of the one cell in the results; see ``test_files``."""

CELLS = [
    Case("cut", CELL, cut(CELL, 0.5)),
    Case("a list", CELL, content(CELL, b"[]")),
    Case("deep nesting", CELL, content(CELL, deep(200_000))),
    Case("no UTF-8", CELL, content(CELL, b'{"labels": "\xff"}')),
    Case("nothing", CELL, content(CELL, b"{}"), ("config",)),
    Case("no labels", CELL, without(CELL, "labels"), ("labels",)),
    Case("labels of another", CELL, fields(CELL, labels__model="gpt"), ("labels",)),
    Case("labels as a list", CELL, fields(CELL, labels=["kla"]), ("labels",)),
    Case("no metrics", CELL, without(CELL, "metrics"), ("metrics",)),
    Case("metrics as text", CELL, fields(CELL, metrics="good"), ("metrics",)),
    Case("accuracy as text", CELL, fields(CELL, metrics__accuracy="1"), ("metrics.accuracy",)),
    Case("no accuracy", CELL, fields(CELL, metrics={"loss": 1.0}), ("accuracy",)),
    Case("curve as a number", CELL, fields(CELL, curve=3), ("curve",)),
    Case("points of text", CELL, fields(CELL, curve=["x"]), ("curve",)),
    Case("another configuration", CELL, fields(CELL, config={"task": 1}), ("configuration",)),
    Case("a pipe", CELL, replaced(CELL, a_pipe)),
    Case("a folder", CELL, replaced(CELL, a_folder)),
    Case("a loop of links", CELL, replaced(CELL, a_loop)),
]
