"""Files and folders that are named on the command line: checked before any work, told in words."""

import argparse
import errno
import os
from collections.abc import Callable
from pathlib import Path

from kalman_attention._text import unknown

DATA = Path("runs/data")
"""Where ``kla data`` writes unless told otherwise."""
RUNS = Path("runs/pretrain")
"""Where ``kla pretrain`` writes unless told otherwise."""
BENCH = "runs/bench"
"""Where ``kla bench`` writes unless told otherwise."""

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
    """What went wrong with a file, for people."""
    if error.filename is None or error.errno not in _WORDS:
        return str(error) if error.filename or not error.strerror else error.strerror
    return _WORDS[error.errno].format(error.filename) + "."


def check_folder(path: Path) -> Path:
    """Refuse a folder that could not be written to; nothing is made yet."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file, where a folder is needed.")
    _check_place(path)
    return path


def check_file(path: Path) -> Path:
    """Refuse a file that could not be written; nothing is made yet."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name a file in it.")
    if path.exists() and not os.access(path, os.W_OK):
        raise ValueError(f"you have no permission to write {path}.")
    _check_place(path.parent)
    return path


def _check_place(folder: Path) -> None:
    """The nearest folder that exists must take new entries."""
    found = folder.absolute()
    while not found.exists():
        found = found.parent
    if not found.is_dir():
        raise ValueError(f"{folder} cannot be made: {found} is a file.")
    # Nothing can be made in /proc and /sys, not even by root, whom access() lets through.
    virtual = found.parts[:2] in (("/", "proc"), ("/", "sys"))
    if virtual or not os.access(found, os.W_OK | os.X_OK):
        raise ValueError(f"nothing can be written to {found}: choose another place.")


def out_folder(text: str) -> Path:
    """A folder to write to, as the type of an option."""
    return _as_type(check_folder, text)


def out_file(text: str) -> Path:
    """A file to write, as the type of an option."""
    return _as_type(check_file, text)


def _as_type(check: Callable[[Path], Path], text: str) -> Path:
    try:
        return check(Path(text))
    except (ValueError, OSError) as error:
        raise argparse.ArgumentTypeError(str(error).rstrip(".")) from error


def check_device(name: str) -> None:
    """Refuse a device that torch does not have here."""
    import torch

    devices = ["cpu"]
    devices += [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    devices += ["mps"] if torch.backends.mps.is_available() else []
    short = {each.partition(":")[0] for each in devices}
    if name not in (*devices, *short):
        why = " torch sees no GPU here." if devices == ["cpu"] else ""
        raise ValueError(unknown("device", name, devices) + why)
