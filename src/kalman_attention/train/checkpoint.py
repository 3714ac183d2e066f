"""Checkpoints on disk: folders ``step-00000040`` that are either complete or absent.

A checkpoint is written under a hidden name, flushed, and renamed: a process that is killed at any
moment leaves the previous one intact. Its ``checkpoint.json`` lists every file with size and
SHA-256, so that a truncated, modified or foreign file is detected. Nothing is pickled.
"""

import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kalman_attention._files import sync_folder, write_file
from kalman_attention._reading import checked, read_json
from kalman_attention.models.checksums import MANIFEST, check_files, describe, digest

# The newest one, and one to fall back on if it is damaged.
KEPT = 2
"""Number of newest checkpoints that are kept, besides the best."""

_FORMAT = 1


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read."""


@dataclass(frozen=True)
class TrainingState:
    """The state of a run, as read from a checkpoint whose files have been verified.

    Attributes:
        folder: folder of the checkpoint.
        step: number of updates made so far.
        state: what was written besides files.
    """

    folder: Path
    step: int
    state: dict[str, Any]


def write_checkpoint(
    folder: Path, step: int, files: Mapping[str, bytes], state: Mapping[str, Any]
) -> Path:
    """Add a checkpoint to a folder of checkpoints.

    Args:
        folder: folder of all checkpoints of a run.
        step: number of the checkpoint.
        files: contents of its files by name.
        state: plain values that JSON can represent.

    Returns:
        The folder of the checkpoint.
    """
    target = checkpoint_folder(folder, step)
    part = folder / f".part-{step}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        for name, data in files.items():
            write_file(part / name, data)
        write_file(part / MANIFEST, _manifest(step, files, state))
        sync_folder(part)
        if target.exists():
            _discard(target)
        os.rename(part, target)
        sync_folder(folder)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)  # frees space if the disk is full
        kept = checkpoints(folder)
        last = f"The previous one, {kept[0]}, is intact." if kept else "There is no earlier one."
        raise CheckpointError(
            f"cannot write checkpoint {target}: {error.strerror or error}. {last} Fix the problem "
            "and start again with the same folder to continue from there."
        ) from error
    return target


def read_checkpoint(folder: Path) -> TrainingState:
    """Read a checkpoint and verify all of its files."""
    source = folder / MANIFEST
    if not source.exists():
        raise CheckpointError(f"{folder} has no {MANIFEST}: it is not a checkpoint.")
    try:
        manifest = read_json(source)
        own = manifest.pop("digest", None)
        if own != digest(_canonical(manifest)) or manifest.get("format") != _FORMAT:
            raise ValueError(f"{source} is damaged, or of another format.")
        step = checked(int, manifest.get("step"), "step", str(source))
        state = checked(dict[str, Any], manifest.get("state"), "state", str(source))
        check_files(folder, manifest.get("files"), source)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    return TrainingState(folder, step, state)


def newest_checkpoint(folder: Path) -> TrainingState | None:
    """The newest intact checkpoint; damaged ones are moved aside, with a warning.

    Args:
        folder: folder of all checkpoints of a run.

    Returns:
        The checkpoint, or None if there is none. If all of them are damaged, an error is raised: a
        run never starts from scratch by itself.
    """
    problems: list[tuple[Path, str]] = []
    for path in checkpoints(folder):
        try:
            found = read_checkpoint(path)
        except CheckpointError as error:
            problems.append((path, str(error)))
            continue
        for damaged, problem in problems:
            aside = folder / f"damaged-{damaged.name}"
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(damaged, aside)
            text = f"{problem} Moved aside as {aside.name}; going back to step {found.step}."
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        return found
    if problems:
        listed = "\n".join(f"  {problem}" for _, problem in problems)
        raise CheckpointError(
            f"no checkpoint in {folder} can be read:\n{listed}\nRestore one of them from a backup, "
            "or remove the folder to train from the start."
        )
    return None


def checkpoints(folder: Path) -> list[Path]:
    """Folders of all checkpoints, newest first, including damaged ones."""
    return sorted(folder.glob("step-*"), key=lambda path: path.name, reverse=True)


def checkpoint_folder(folder: Path, step: int) -> Path:
    """Folder of the checkpoint of a step."""
    return folder / f"step-{step:08d}"


def prune_checkpoints(folder: Path, keep: set[int]) -> None:
    """Remove all checkpoints except the newest and those of the steps to keep."""
    kept = {checkpoint_folder(folder, step) for step in keep}
    for path in checkpoints(folder)[KEPT:]:
        if path not in kept:
            _discard(path)


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed process left partially written or removed."""
    for path in folder.glob(".*"):
        shutil.rmtree(path, ignore_errors=True)


def point_to(link: Path, target: Path) -> None:
    """Create or replace a relative symbolic link atomically, where links are supported."""
    part = link.with_name(f".{link.name}.part")
    with suppress(OSError, NotImplementedError):
        part.unlink(missing_ok=True)
        part.symlink_to(os.path.relpath(target, link.parent), target_is_directory=True)
        os.replace(part, link)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder against other training processes; the lock ends with the process."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    # Do not follow a link, which may point to another file, and do not truncate what is there.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    with os.fdopen(os.open(folder / ".lock", flags, 0o666), "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(
                f"another process is training in {folder}. Wait for it or stop it, or choose "
                "another folder."
            ) from None
        yield


def _discard(path: Path) -> None:
    """Remove a checkpoint without ever leaving part of it under its name."""
    aside = path.with_name(f".old-{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(path, aside)
    shutil.rmtree(aside, ignore_errors=True)


def _manifest(step: int, files: Mapping[str, bytes], state: Mapping[str, Any]) -> bytes:
    manifest = {"format": _FORMAT, "step": step, "files": describe(files), "state": state}
    return json.dumps({"digest": digest(_canonical(manifest)), **manifest}, indent=1).encode()


def _canonical(manifest: Mapping[str, Any]) -> bytes:
    return json.dumps(manifest, sort_keys=True).encode()
