"""Files that appear whole or not at all, also when the process is killed or the power fails."""

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
    """Open a file for writing that takes its name only when all of it is on the disk.

    Args:
        path: the file; an older one of this name stays until the new one is whole.

    Yields:
        What to write to.
    """
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
            f"the disk is full: {path} was not written. What was finished before is whole; make "
            "room and run the same command again, it goes on from there",
        ) from error


def write_atomically(path: Path, data: bytes) -> None:
    """Write beside the target, flush to the disk, and put it in place in one move."""
    with whole_file(path) as file:
        file.write(data)


def write_file(path: Path, data: bytes) -> None:
    """Write a file that is not there yet and wait until it is on the disk."""
    handle = _create(path)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(handle, rest[: 1 << 30]) :]
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """Wait until names that were added to a folder, or moved in it, are on the disk."""
    if os.name == "nt":
        return  # Windows cannot open folders, and needs no flush for a rename
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, data: object) -> None:
    """Write JSON that is the same for the same data."""
    write_atomically(path, (json.dumps(data, indent=1) + "\n").encode())


def sweep(folder: Path) -> None:
    """Remove what a run that was killed left half-written."""
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
    """Open a new file with the permissions of the umask; an existing name is an error.

    In a folder that others may write to, a link laid under the name would lead elsewhere.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    return os.open(path, flags, 0o666)
