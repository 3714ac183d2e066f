"""A short notation for stacks: ``"attention*11 + kla"``, ``"(attention*3 + kla)*3"``."""

import itertools
import re

MOST_BLOCKS = 4096
"""A longer plan is a mistake, or an attempt to exhaust the memory."""

_MOST_PARENTHESES = 32  # the parser recurses once per parenthesis
_TOKEN = re.compile(r"\s*(?:(\d+)|(\w+)|(.))")


def parse_plan(plan: str | tuple[str, ...]) -> tuple[str, ...]:
    """Mixer names in order, from a plan; a tuple of names is returned unchanged.

    Args:
        plan: names joined by ``+`` and repeated by ``*``, with parentheses.

    Returns:
        One name per block.
    """
    if not isinstance(plan, str):
        if len(plan) > MOST_BLOCKS:
            raise ValueError(f"a plan has at most {MOST_BLOCKS:,} blocks, not {len(plan):,}.")
        return tuple(plan)
    if len(plan) > 16 * MOST_BLOCKS or plan.count("(") > _MOST_PARENTHESES:
        raise _error(f"{plan[:40]}...", "it is too long, or has too many parentheses")
    tokens = ["".join(found) for found in _TOKEN.findall(plan.strip())]
    names, rest = _sum(tokens, plan)
    if rest:
        raise _error(plan, f"{rest[0]!r} was not expected")
    return names


def format_plan(names: tuple[str, ...]) -> str:
    """A short plan for mixer names, as ``"attention*11 + kla"``: runs are counted."""
    runs = [(name, len(list(run))) for name, run in itertools.groupby(names)]
    return " + ".join(name if count == 1 else f"{name}*{count}" for name, count in runs)


def _sum(tokens: list[str], plan: str) -> tuple[tuple[str, ...], list[str]]:
    names, rest = _product(tokens, plan)
    while rest and rest[0] == "+":
        more, rest = _product(rest[1:], plan)
        names += more
        _check_length(len(names), plan)
    return names, rest


def _product(tokens: list[str], plan: str) -> tuple[tuple[str, ...], list[str]]:
    if not tokens or not (tokens[0] == "(" or tokens[0].isidentifier()):
        raise _error(
            plan, f"a name is missing before {tokens[0]!r}" if tokens else "a name is missing"
        )
    if tokens[0] == "(":
        names, rest = _sum(tokens[1:], plan)
        if not rest or rest[0] != ")":
            raise _error(plan, "a parenthesis is not closed")
        rest = rest[1:]
    else:
        names, rest = (tokens[0],), tokens[1:]
    if rest and rest[0] == "*":
        if len(rest) < 2 or not rest[1].isdigit():
            raise _error(plan, "a number must follow *")
        if len(rest[1]) > 6:  # too long anyway: do not convert a number of any length
            _check_length(10**6, plan)
        _check_length(len(names) * int(rest[1]), plan)
        names, rest = names * int(rest[1]), rest[2:]
    return names, rest


def _check_length(blocks: int, plan: str) -> None:
    if blocks > MOST_BLOCKS:
        raise _error(plan, f"it has more than {MOST_BLOCKS:,} blocks")


def _error(plan: str, what: str) -> ValueError:
    return ValueError(
        f"cannot read the plan {plan!r}: {what}. Write it as in 'attention*11 + kla'."
    )
