"""Checksums of the files in a folder, so that a flipped bit is an error and not a worse result.

``save_model`` and ``save_pretrained`` remove an old ``checksums.json`` first and write the new one
last, so that a crash leaves a folder without one, which is read unchecked. A training checkpoint
lists its files in ``checkpoint.json`` in the same format. To edit a model by hand, remove the file.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kalman_attention._files import sync_folder, write_atomically
from kalman_attention._reading import checked, from_dict, open_file, read_json

CHECKSUMS, MANIFEST = "checksums.json", "checkpoint.json"

_PIECE = 1 << 20  # bytes read at once, so that large files are never in memory as a whole


@dataclass(frozen=True, kw_only=True)
class FileSum:
    """Expected size and checksum of a file.

    Attributes:
        bytes: its size.
        sha256: its checksum, as hexadecimal digits.
    """

    bytes: int
    sha256: str


def digest(data: bytes) -> str:
    """SHA-256 as hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def describe(files: Mapping[str, bytes]) -> dict[str, dict[str, Any]]:
    """Size and checksum of file contents, by file name."""
    return {name: {"bytes": len(data), "sha256": digest(data)} for name, data in files.items()}


def forget_checksums(folder: Path) -> None:
    """Remove the checksums of a folder, before its files are overwritten."""
    (folder / CHECKSUMS).unlink(missing_ok=True)
    sync_folder(folder)


def write_checksums(folder: Path, listed: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the checksums of a folder, after its files were written."""
    write_atomically(folder / CHECKSUMS, (json.dumps({"files": listed}, indent=1) + "\n").encode())


def measure(path: Path) -> dict[str, Any]:
    """Size and checksum of a file."""
    size, found = 0, hashlib.sha256()
    with open_file(path) as file:
        while piece := file.read(_PIECE):
            found.update(piece)
            size += len(piece)
    return {"bytes": size, "sha256": found.hexdigest()}


def check_files(folder: Path, listed: object, source: Path) -> None:
    """Compare files with their sizes and checksums.

    Args:
        folder: where they are.
        listed: the output of ``describe`` for them, read back from JSON.
        source: the file that lists them, for errors.
    """
    entries = checked(dict[str, Any], listed, "files", str(source))
    for name, data in entries.items():
        if Path(name).name != name or name in (".", ".."):
            raise ValueError(f"{source} is damaged: {name!r} is not the name of a file next to it.")
        wanted = from_dict(FileSum, data, f"{source}, files.{name}")
        _check_file(folder / name, wanted, source)


def check_folder(folder: Path, names: Iterable[str]) -> None:
    """Compare the given files of a folder with its checksums, if it has any."""
    for source in (folder / CHECKSUMS, folder / MANIFEST):
        if source.exists():
            listed = checked(dict[str, Any], read_json(source).get("files"), "files", str(source))
            own = {name: listed[name] for name in names if name in listed}
            return check_files(folder, own, source)
    return None


def listed_size(path: Path) -> int | None:
    """The size of a file according to the checksums of its folder; None if not listed."""
    source = path.parent / CHECKSUMS
    listed = read_json(source).get("files") if source.exists() else None
    if not isinstance(listed, dict) or path.name not in listed:
        return None
    return from_dict(FileSum, listed[path.name], f"{source}, files.{path.name}").bytes


def _check_file(path: Path, wanted: FileSum, source: Path) -> None:
    way = "Restore it from a copy."
    if source.name == CHECKSUMS:
        way = f"Restore it from a copy; if you changed it on purpose, remove {source}."
    with open_file(path) as file:
        size = file.seek(0, 2)
    if size != wanted.bytes:
        raise ValueError(f"{path} is damaged: {size} bytes instead of {wanted.bytes}. {way}")
    if measure(path)["sha256"] != wanted.sha256:
        raise ValueError(
            f"{path} is damaged: its contents have changed since it was written (SHA-256). {way}"
        )
