"""Files that appear whole or not at all, and their checksums."""

import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

_PART = ".part"


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing that takes its name only when all of it is on the disk.

    Args:
        path: the file; an older one of this name stays until the new one is whole.

    Yields:
        What to write to.
    """
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=_PART)
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, 0o644)
            os.replace(name, path)
        finally:
            Path(name).unlink(missing_ok=True)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(
            error.errno,
            f"the disk is full: {path} was not written. What was finished before is whole; make "
            "room and run the same command again, it goes on from there",
        ) from error


def write_json(path: Path, data: object) -> None:
    """Write JSON that is the same for the same data."""
    with whole_file(path) as file:
        file.write((json.dumps(data, indent=1) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """Read an object from a JSON file, or say that the file is damaged."""
    try:
        data = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: it is not JSON ({error}).") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} is damaged: it holds no JSON object.")
    return data


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
