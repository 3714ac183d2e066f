"""Numbers on the command line: every option has a range, which is checked here.

Integers may have a suffix: k, M and B are 10^3, 10^6 and 10^9, Ki and Mi are 2^10 and 2^20.
"""

import argparse
import math
from collections.abc import Callable
from decimal import Decimal

UNITS = {"Ki": 2**10, "Mi": 2**20, "k": 10**3, "M": 10**6, "B": 10**9}
"""Suffixes of integers."""

_LARGEST = 2**63 - 1  # of a signed 64-bit integer, as in torch and numpy


def whole(least: int, most: int = _LARGEST) -> Callable[[str], int]:
    """A reader of integers from ``least`` to ``most``.

    >>> read = whole(1)
    >>> read("16k"), read("16Ki"), read("1.8B"), read("131_072")
    (16000, 16384, 1800000000, 131072)
    """
    rule = f"a whole number, {least} or more"
    if most != _LARGEST:
        rule = f"a whole number from {least} to {most:,}"

    def read(text: str) -> int:
        value = _scaled(text)
        if value is None or value != value.to_integral_value() or not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not {rule} ({_units()})")
        return int(value)

    return read


def real(
    least: float, most: float = math.inf, *, open_below: bool = False
) -> Callable[[str], float]:
    """A reader of finite numbers from ``least`` to ``most``; ``open_below`` excludes ``least``.

    >>> real(0.0, 1.0, open_below=True)("0.9")
    0.9
    """
    rule = f"a number above {least:g}" if open_below else f"a number, {least:g} or more"
    if most != math.inf:
        rule = f"a number {'above' if open_below else 'from'} {least:g} up to {most:g}"

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        inside = least < value if open_below else least <= value
        if not (math.isfinite(value) and inside and value <= most):
            raise argparse.ArgumentTypeError(f"{text!r} is not {rule}")
        return value

    return read


def _scaled(text: str) -> Decimal | None:
    """The exact value of a number with a suffix; None if the text is not a number."""
    unit = next((u for u in UNITS if text.endswith(u)), "")
    try:
        value = Decimal(text.removesuffix(unit)) * UNITS.get(unit, 1)
    except ArithmeticError:  # not a number, or one that Decimal cannot hold
        return None
    # Outside of every range: writing out the digits of 1e999999999 would take forever.
    return value if value.is_finite() and abs(value) <= 2 * _LARGEST else None


def _units() -> str:
    return "16k is 16,000 and 16Ki is 16,384"


positive_int = whole(1)
nonnegative_int = whole(0)
workers = whole(1, 1024)
"""Threads or processes."""
seed = whole(0)
positive_float = real(0.0, open_below=True)
nonnegative_float = real(0.0)
fraction = real(0.0, 1.0)
probability = real(0.0, 1.0, open_below=True)
