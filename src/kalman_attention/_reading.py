"""Reading untrusted files: JSON, and dataclasses from it.

Every problem is a ``ValueError`` that names the file and the field in it.
"""

import dataclasses
import difflib
import json
import math
import os
import stat
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

# Our files have a few kilobytes, an index of many shards a few megabytes.
MOST_BYTES = 64 << 20
"""Size of the largest JSON file that is read."""

_LARGEST = 1 << 62  # larger sizes would overflow the 64-bit integers of torch and numpy

T = TypeVar("T")


def open_file(path: Path) -> BinaryIO:
    """Open a regular file for reading; anything else, such as a pipe, is an error."""
    try:
        # O_NONBLOCK: otherwise opening a pipe would wait for its writer.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing.") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ValueError(f"{path} is not a regular file but a folder, a pipe or a device.")
    return os.fdopen(handle, "rb")


def read_bytes(path: Path, most: int) -> bytes:
    """The contents of a regular file of limited size."""
    with open_file(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"{path} is too large: more than {most:,} bytes.")
    return data


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file: UTF-8, without duplicate names, NaN or infinity."""
    return parse_json(read_bytes(path, MOST_BYTES), str(path))


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object.

    Args:
        data: the bytes that were read.
        where: name of the source, for error messages.
    """
    try:
        found = json.loads(
            data.decode(),
            object_pairs_hook=_distinct,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is damaged: it is not UTF-8 ({error.reason}).") from error
    except RecursionError:
        raise ValueError(f"{where} is damaged: it is nested too deeply.") from None
    except ValueError as error:
        raise ValueError(f"{where} is damaged: it is not JSON ({error}).") from error
    if not isinstance(found, dict):
        raise ValueError(f"{where} is damaged: it is not a JSON object.")
    return found


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} occurs twice")
    return found


def _refuse_constant(word: str) -> Any:
    raise ValueError(f"{word} is not a number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not finite")
    return value


def from_dict(cls: type[T], data: object, where: str) -> T:
    """Build a dataclass from plain data, checked against its annotations, recursively.

    Args:
        cls: the dataclass.
        data: plain data from JSON; lists become tuples where the annotation says so.
        where: name of the source, for error messages.
    """
    return _dataclass(cls, data, "", where)  # type: ignore[no-any-return]


def checked(kind: Any, value: object, name: str, where: str) -> Any:
    """One plain value, checked against a type such as ``int`` or ``dict[str, float]``.

    Args:
        kind: the type.
        value: the value from JSON.
        name: name of the field, for error messages.
        where: name of the source, for error messages.
    """
    return _convert(kind, value, name, where)


def _dataclass(cls: Any, data: object, path: str, where: str) -> Any:
    if not isinstance(data, Mapping):
        raise _wrong(path or "the root", "an object", data, where)
    hints = get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    _refuse_unknown(data, fields, path, where)
    missing = [name for name, field in fields.items() if _required(field) and name not in data]
    if missing:
        listed = ", ".join(_join(path, name) for name in missing)
        raise ValueError(f"{where} is incomplete: {listed} is missing.")
    found = {k: _convert(hints[k], v, _join(path, k), where) for k, v in data.items()}
    try:
        return cls(**found)
    except (ValueError, ArithmeticError) as error:  # values that do not fit together
        place = f"{where}, {path}" if path else where
        raise ValueError(f"{place}: {error}") from error


def _required(field: "dataclasses.Field[Any]") -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _refuse_unknown(
    data: Mapping[str, Any], known: Mapping[str, Any], path: str, where: str
) -> None:
    unknown = sorted(str(name) for name in data if name not in known)
    if not unknown:
        return
    listed = ", ".join(_join(path, name) for name in unknown)
    near = difflib.get_close_matches(unknown[0], known, 1)
    hint = f" Did you mean {_join(path, near[0])}?" if near else ""
    raise ValueError(
        f"{where} has unknown fields: {listed}.{hint} Known fields: {', '.join(known)}. It may "
        "have been written by another version of the library."
    )


def _convert(kind: Any, value: object, path: str, where: str) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        return _one_of(inner, value, path, where)
    if origin is Literal:
        if isinstance(value, str) and value in inner:
            return value
        raise _wrong(path, f"one of {', '.join(inner)}", value, where)
    if dataclasses.is_dataclass(kind):
        return value if isinstance(value, kind) else _dataclass(kind, value, path, where)  # type: ignore[arg-type]
    if origin in (list, tuple):
        return _sequence(origin, inner, value, path, where)
    if origin is dict:
        if not isinstance(value, dict):
            raise _wrong(path, "an object", value, where)
        return {k: _convert(inner[1], v, _join(path, k), where) for k, v in value.items()}
    name, fits = _PLAIN[kind]
    if not fits(value):
        raise _wrong(path, name, value, where)
    return value


def _one_of(kinds: tuple[Any, ...], value: object, path: str, where: str) -> Any:
    """Convert to the first alternative that fits; if none does, raise the error of the first."""
    if value is None and types.NoneType in kinds:
        return None
    given = [kind for kind in kinds if kind is not types.NoneType]
    is_list = isinstance(value, list | tuple)
    likely = [kind for kind in given if (get_origin(kind) in (list, tuple)) == is_list] or given
    problems = []
    for kind in likely:
        try:
            return _convert(kind, value, path, where)
        except ValueError as error:
            problems.append(error)
    raise problems[0]


def _sequence(
    origin: Any, inner: tuple[Any, ...], value: object, path: str, where: str
) -> list[Any] | tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise _wrong(path, "a list", value, where)
    kinds = inner
    if origin is list or inner[-1] is Ellipsis:
        kinds = (inner[0],) * len(value)
    if len(kinds) != len(value):
        raise _wrong(path, f"a list of {len(kinds)}", value, where)
    items = [
        _convert(kind, item, f"{path}[{i}]", where)
        for i, (kind, item) in enumerate(zip(kinds, value, strict=True))
    ]
    return tuple(items) if origin is tuple else items


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LARGEST


def _is_number(value: object) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))


_PLAIN: dict[Any, tuple[str, Callable[[object], bool]]] = {
    int: ("a whole number", _is_int),
    float: ("a number", _is_number),
    bool: ("true or false", lambda value: isinstance(value, bool)),
    str: ("text", lambda value: isinstance(value, str) and "\0" not in value),
}
"""Kinds of JSON values: their name in error messages, and how they are recognised."""


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _wrong(path: str, wanted: str, value: object, where: str) -> ValueError:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return ValueError(f"{path} in {where} must be {wanted}, got {shown}.")
