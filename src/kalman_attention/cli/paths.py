"""Files and folders of the command line: checked before any work, with errors in plain words."""

import argparse
import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from kalman_attention._text import unknown

DATA = Path("runs/data")
"""Default output folder of ``kla data``."""
RUNS = Path("runs/pretrain")
"""Default output folder of ``kla pretrain``."""
BENCH = "runs/bench"
"""Default output folder of ``kla bench``."""

_WORDS = {
    errno.ENOENT: "{} does not exist",
    errno.EISDIR: "{} is a folder, where a file is needed",
    errno.ENOTDIR: "{} goes through a file as if that were a folder",
    errno.EEXIST: "{} exists already, and is no folder",
    errno.EACCES: "you have no permission for {}",
    errno.EPERM: "you have no permission for {}",
    errno.EROFS: "{} is on a file system that cannot be written to",
    errno.ENOSPC: "the disk is full: {} could not be written",
    errno.ENAMETOOLONG: "the name {} is too long",
}


def in_words(error: OSError) -> str:
    """Describe an error about a file in plain words."""
    if error.filename is None or error.errno not in _WORDS:
        return str(error) if error.filename or not error.strerror else error.strerror
    return _WORDS[error.errno].format(error.filename) + "."


def writable_folder(path: Path) -> Path:
    """Raise an error if a folder cannot be written to; nothing is created."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file, where a folder is needed.")
    _check_place(path)
    return path


def writable_file(path: Path) -> Path:
    """Raise an error if a file cannot be written; nothing is created."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name a file in it.")
    if path.exists() and not os.access(path, os.W_OK):
        raise ValueError(f"you have no permission to write {path}.")
    _check_place(path.parent)
    return path


def _check_place(folder: Path) -> None:
    """Raise an error unless the closest existing folder is writable."""
    found = folder.absolute()
    while not found.exists():
        found = found.parent
    if not found.is_dir():
        raise ValueError(f"{folder} cannot be made: {found} is a file.")
    # Nothing can be created in /proc and /sys, not even by root, for whom access() says yes.
    virtual = found.parts[:2] in (("/", "proc"), ("/", "sys"))
    if virtual or not os.access(found, os.W_OK | os.X_OK):
        raise ValueError(f"nothing can be written to {found}: choose another place.")


def out_folder(text: str) -> Path:
    """The type of an option that names a folder to write to."""
    return _as_type(writable_folder, text)


def out_file(text: str) -> Path:
    """The type of an option that names a file to write."""
    return _as_type(writable_file, text)


def read_texts(paths: Sequence[Path]) -> dict[str, str]:
    """Read texts, by the names of their files; an empty one is an error."""
    texts = {str(path): path.read_bytes().decode("utf-8-sig", "replace") for path in paths}
    for name, text in texts.items():
        if not text:
            raise ValueError(f"{name} is empty: there is nothing to score.")
    return texts


def _as_type(check: Callable[[Path], Path], text: str) -> Path:
    try:
        return check(Path(text))
    except (ValueError, OSError) as error:
        raise argparse.ArgumentTypeError(str(error).rstrip(".")) from error


def check_device(name: str) -> None:
    """Raise an error if torch has no such device here."""
    import torch

    devices = ["cpu"]
    devices += [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    devices += ["mps"] if torch.backends.mps.is_available() else []
    short = {each.partition(":")[0] for each in devices}
    if name not in (*devices, *short):
        why = " torch sees no GPU here." if devices == ["cpu"] else ""
        raise ValueError(unknown("device", name, devices) + why)
