"""Atomic files: complete or absent, even if the process is killed or the power fails."""

import errno
import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_PART = ".part"


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing that gets its name only when it is completely on disk.

    Args:
        path: the file; an existing one is kept until the new one is complete.

    Yields:
        The file to write to.
    """
    # A random name, so that two processes never write into the same temporary file.
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}{_PART}")
    try:
        try:
            with os.fdopen(_create(part), "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
        sync_folder(path.parent)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(
            error.errno,
            f"the disk is full: {path} was not written. Files finished before are intact; free "
            "some space and run the same command again to continue from there",
        ) from error


def write_atomically(path: Path, data: bytes) -> None:
    """Write to a temporary file, flush it to disk, and rename it."""
    with whole_file(path) as file:
        file.write(data)


def write_file(path: Path, data: bytes) -> None:
    """Write a new file and flush it to disk."""
    handle = _create(path)
    try:
        rest = memoryview(data)
        while rest:
            # In pieces: a single write is limited to 2 GiB on Linux, and may be partial.
            rest = rest[os.write(handle, rest[: 1 << 30]) :]
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """Flush a folder to disk, so that new and renamed entries survive a crash."""
    if os.name == "nt":
        return  # Windows cannot open folders, and does not need it
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, data: object) -> None:
    """Write JSON; equal data gives equal bytes."""
    write_atomically(path, (json.dumps(data, indent=1) + "\n").encode())


def sweep(folder: Path) -> None:
    """Remove partially written files of a run that was killed."""
    for part in folder.glob(f".*{_PART}"):
        part.unlink(missing_ok=True)


def sha256(path: Path) -> str:
    """Checksum of a file, as hexadecimal digits."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def _create(path: Path) -> int:
    """Open a new file with the permissions of the umask; an existing name is an error."""
    # O_NOFOLLOW: in a folder that others can write to, a link of this name could lead elsewhere.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    return os.open(path, flags, 0o666)
