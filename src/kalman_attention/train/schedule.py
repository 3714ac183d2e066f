"""Learning-rate schedules: factors on the rate of every group, as pure functions of the step.

``step`` counts the updates already made, so the first update is step 0 and the last is step
``total - 1``. A schedule can start with a linear warm-up, (step + 1) / warmup.
"""

import math


def constant(step: int, total: int, *, warmup: int = 0) -> float:
    """1 after the warm-up."""
    return (step + 1) / warmup if step < warmup else 1.0


def cosine(step: int, total: int, *, warmup: int = 0, final: float = 0.0) -> float:
    """Half a cosine, from 1 after the warm-up down to ``final`` at step ``total``."""
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / (total - warmup)
    return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * done))


def trapezoidal(
    step: int, total: int, *, warmup: int = 0, final: float = 0.0, decay_fraction: float = 0.4
) -> float:
    """The paper's schedule: 1 up to step N - W, then (N - step) / W, with W = round(0.4 N).

    Args:
        step: updates already made.
        total: N, number of updates.
        warmup: updates of the warm-up; the paper has none.
        final: value of the linear part at step N, one step after the last update.
        decay_fraction: W / N.
    """
    if step < warmup:
        return (step + 1) / warmup
    length = round(decay_fraction * total)
    if step <= total - length:
        return 1.0
    left = (total - step) / length
    return left + (1.0 - left) * final
