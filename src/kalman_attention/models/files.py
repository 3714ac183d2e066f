"""Files that appear whole or not at all, also when the process is killed or the power fails."""

import os
from pathlib import Path


def write_file(path: Path, data: bytes) -> None:
    """Write a new file and wait until it is on the disk."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(handle, rest[: 1 << 30]) :]
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: Path, data: bytes) -> None:
    """Write beside the target, flush to the disk, and put it in place in one move."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write_file(part, data)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Wait until names that were added to a folder, or moved in it, are on the disk."""
    if os.name == "nt":
        return  # Windows cannot open folders, and needs no flush for a rename
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
