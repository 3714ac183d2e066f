"""How a call is divided into blocks of threads: a function of its shape alone.

A lane is one slot of one channel. ``group`` threads of a warp share a channel, so that a block of
threads serves ``channels`` channels and up to ``slots`` slots; more slots take further launches.

**The schedule.** A block processes the tokens of a segment in order. With one segment per row the
schedule is lane-serial, which is best when rows and channels fill the device. Otherwise time is
split: a segment has

    span = max(2 chunks, tokens * threads of a row / 65,536)

tokens, rounded up to whole chunks, provided that a row has at least four segments.
"""

import os
from typing import NamedTuple

import torch

from kalman_attention.ops.contract import CHUNK, ScanInputs

# Four warps for each of the four schedulers of 128 multiprocessors: 4 * 4 * 32 * 128.
ENOUGH_THREADS = 65_536
"""Threads that keep a large device busy."""

# Checkpoints are per chunk, so segments are whole chunks.
MIN_SPAN = 2 * CHUNK
"""Tokens of the shortest segment."""

# Summary and replay together are about 2.3 times the work of a single pass, so two or three
# segments would gain little or nothing.
MIN_SEGMENTS = 4
"""Fewest segments per row for which time is split."""

# As many as the registers hold without spills: the adjoint keeps more values per slot than the
# filter, and slots that share a variance keep fewer.
FORWARD_SLOTS, BACKWARD_SLOTS, SHARED_SLOTS = 4, 2, 4
"""Slots per thread: ``kForwardSlots`` and ``kBackwardSlots`` of the sources; the last one is for
slots that share a variance in float32."""

# What a block of threads sums over channels must fit into its shared memory.
LARGEST_BLOCK = 64
"""Most slots that can share a variance: the slots of a block of threads in the backward pass."""

# Their work per thread is small and needs no cooperation, so any usual size would do.
LINK_THREADS = SUM_THREADS = 128
"""Threads per block of the small kernels."""

SCHEDULE = os.environ.get("KLA_CUDA_SCHEDULE", "auto")
"""``auto`` is the rule above; ``serial`` and ``split`` (one chunk per segment) are for tests."""


class Grid(NamedTuple):
    """The launch geometry of one pass.

    Attributes:
        group: threads per channel.
        threads: per block.
        slots: slots per launch.
        channels: channels per block.
        blocks: blocks that cover all channels.
        span: tokens per segment.
        segments: segments of the call, numbered as ``csrc/cuda/params.h`` says.
        places: slots of a block of slots, rounded up to whole threads; 1 if none are shared.
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
"""The geometry of a single step, as far as it does not depend on the shape."""


def forward_grid(inputs: ScanInputs) -> Grid:
    """The geometry of a forward pass."""
    # The threads of a channel exchange values within a warp: at most 32 of them.
    return _grid(inputs, 128, FORWARD_SLOTS, 32)


def backward_grid(inputs: ScanInputs, dtype: torch.dtype) -> Grid:
    """The geometry of a backward pass in the arithmetic of ``dtype``."""
    # Doubles take twice the registers and shared memory: half the threads.
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
    """The smallest power of two that is at least x."""
    return 1 << max(0, x - 1).bit_length()


def _span(tokens: int, T: int, row_threads: int) -> int:
    whole = (T // CHUNK + 1) * CHUNK  # longer than any row: one segment each
    if SCHEDULE != "auto":
        return CHUNK if SCHEDULE == "split" else whole
    span = max(MIN_SPAN, -(-tokens * row_threads // (ENOUGH_THREADS * CHUNK)) * CHUNK)
    return span if MIN_SEGMENTS * span <= T else whole
