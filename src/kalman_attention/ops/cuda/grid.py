"""How a call is cut into blocks of threads: a function of its shape alone.

A lane is one slot of one channel. ``group`` threads of a warp share a channel, so that a block of
threads serves ``channels`` channels and up to ``slots`` slots; more slots take further launches.

**The schedule.** A block walks the tokens of a segment. With one segment per row the schedule is
lane-serial: right when rows and channels fill the device. Otherwise time is split: a segment has

    span = max(2 chunks, tokens * threads of a row / 65,536)

tokens, rounded up to whole chunks, if a row has at least four of them. 65,536 threads are four
warps for each scheduler of a large device. A split call does some 2.3 times the work: with fewer
than four segments it would not pay.
"""

import os
from typing import NamedTuple

import torch

from kalman_attention.ops.contract import CHUNK, ScanInputs

ENOUGH_THREADS = 65_536
"""Threads that keep a large device busy."""

MIN_SPAN = 2 * CHUNK
"""Tokens of the shortest segment."""

MIN_SEGMENTS = 4
"""Segments per row below which splitting time does not pay."""

FORWARD_SLOTS, BACKWARD_SLOTS, SHARED_SLOTS = 4, 2, 4
"""Slots per thread: ``kForwardSlots`` and ``kBackwardSlots`` of the sources, the last where slots
share a variance and the arithmetic is float32."""

LARGEST_BLOCK = 64
"""Slots that can share a variance: those of a block of threads in the backward pass."""

LINK_THREADS = SUM_THREADS = 128
"""Threads per block of the small kernels."""

SCHEDULE = os.environ.get("KLA_CUDA_SCHEDULE", "auto")
"""``auto`` is the rule above; ``serial`` and ``split`` (one chunk per segment) are for tests."""


class Grid(NamedTuple):
    """The cut of one pass.

    Attributes:
        group: threads per channel.
        threads: per block.
        slots: slots per launch.
        channels: channels per block.
        blocks: blocks that cover all channels.
        span: tokens per segment.
        segments: segments of the call, numbered as ``csrc/cuda/params.h`` says.
        places: slots of a block of slots as threads own them; 1 where none share a variance.
    """

    group: int
    threads: int
    slots: int
    channels: int
    blocks: int
    span: int
    segments: int
    places: int = 1

    def split(self, rows: int) -> bool:
        """Whether any row may have more than one segment."""
        return self.segments > rows


STEP = Grid(group=1, threads=128, slots=0, channels=32, blocks=0, span=1, segments=0)
"""The cut of a single step, as far as it is the same for all shapes."""


def forward_grid(inputs: ScanInputs) -> Grid:
    """The cut of a forward pass."""
    return _grid(inputs, 128, FORWARD_SLOTS, 32)


def backward_grid(inputs: ScanInputs, dtype: torch.dtype) -> Grid:
    """The cut of a backward pass in the arithmetic of ``dtype``."""
    if dtype == torch.float64:
        return _grid(inputs, 64, BACKWARD_SLOTS, 32)
    slots = SHARED_SLOTS if inputs.slots > 1 else BACKWARD_SLOTS
    return _grid(inputs, 128, slots, LARGEST_BLOCK // slots)


def _grid(inputs: ScanInputs, threads: int, slots: int, most: int) -> Grid:
    (B, T, D), (R, N, _), m = inputs.v.shape, inputs.mean_0.shape, inputs.slots
    places = slots * _power_of_two(-(-m // slots)) if m > 1 else 1
    group = min(most, _power_of_two(-(-N // m * places // slots)))
    channels = threads // group
    blocks = -(-D // channels)
    span = _span(B * T, T, blocks * threads)
    packed = inputs.cu_seqlens is not None
    segments = T // span + R if packed else R * max(1, -(-T // span))
    return Grid(group, threads, group * slots, channels, blocks, span, segments, places)


def _power_of_two(x: int) -> int:
    """The least that is at least x."""
    return 1 << max(0, x - 1).bit_length()


def _span(tokens: int, T: int, row_threads: int) -> int:
    whole = (T // CHUNK + 1) * CHUNK
    if SCHEDULE != "auto":
        return CHUNK if SCHEDULE == "split" else whole
    span = max(MIN_SPAN, -(-tokens * row_threads // (ENOUGH_THREADS * CHUNK)) * CHUNK)
    return span if MIN_SEGMENTS * span <= T else whole
