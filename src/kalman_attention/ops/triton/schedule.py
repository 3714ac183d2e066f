"""The schedule of the Triton engine: how a call is divided into programs, by its shape alone.

Nothing here imports triton, so that the roofline works without it.

A program is one warp. It owns the slots of a block of channels of one row and processes a segment
of time. With one segment per row the schedule is lane-serial; with more it is time-split: summarise
the segments in parallel, pass over the summaries, replay every segment from its true start.

The rule does not depend on the size of the device, so that the same shapes give the same bits on
every GPU.
"""

from typing import NamedTuple

import torch

from kalman_attention.ops.contract import CHUNK, ScanInputs

# One warp for each of the four schedulers of 108 (A100) to 148 (B200) multiprocessors.
FILL = 512
"""Programs that keep a large GPU busy."""

# Summary and replay are 2.3 times the work of a single pass forward, 1.3 times backward.
LEAST_SEGMENTS = 4
"""Fewest segments per row for which time is split."""

# Sixteen per thread: with N = 16 a thread has all slots of its channel, and the sum over slots
# needs no exchange between threads.
FORWARD_LANES = 512
"""Lanes (slot, channel) of a forward program."""

# Four per thread: the adjoint keeps more values per lane, and more lanes would spill registers.
BACKWARD_LANES = 128
"""Lanes of a backward program."""

# The square root of a chunk: windows plus tokens of one window are fewest then, 8 + 8 beliefs.
WINDOW = 8
"""Tokens whose beliefs a backward program stores at a time."""

# Each launch reuses one scratch array: 4,096 programs of 16 KiB are 64 MiB.
WAVE = 8 * FILL
"""Backward programs per launch."""


class Schedule(NamedTuple):
    """The division of one pass.

    Attributes:
        block_m: slots of a block of slots, N / G rounded up to a power of two.
        block_g: blocks of slots of a tile, G rounded up to a power of two.
        block_d: channels of a tile.
        blocks: channel blocks per row.
        segments: time segments per row; 1 is the lane-serial schedule.
        per_segment: chunks of ``CHUNK`` tokens per segment.
    """

    block_m: int
    block_g: int
    block_d: int
    blocks: int
    segments: int
    per_segment: int

    @property
    def tile(self) -> tuple[int, int, int]:
        """Sizes of a tile: slots of a block, blocks, channels."""
        return self.block_m, self.block_g, self.block_d


def schedule(inputs: ScanInputs, lanes: int, dtype: torch.dtype) -> Schedule:
    """Divide a call with arithmetic in ``dtype`` into programs of about ``lanes`` lanes."""
    T, (R, N, D), share = inputs.v.shape[1], inputs.mean_0.shape, inputs.slots
    plain = share == 1 and inputs.dt is None
    return cut(R, T, N, D, lanes_for(dtype, lanes, plain=plain), share)


def lanes_for(dtype: torch.dtype, lanes: int, *, plain: bool = True) -> int:
    """Lanes of a program: fewer where each lane needs more registers."""
    # Half in a backward program that sums over slots with a shared variance, or has gaps in time; a
    # quarter in float64, which takes two registers per number and more temporaries.
    lanes = lanes if plain or lanes != BACKWARD_LANES else lanes // 2
    return lanes // 4 if dtype == torch.float64 else lanes


def cut(rows: int, T: int, N: int, D: int, lanes: int, share: int = 1) -> Schedule:
    """``schedule``, given sizes.

    Args:
        rows: rows of the call, or documents if packed.
        T: tokens of a row, or of all documents if packed.
        N: slots.
        D: channels.
        lanes: lanes of a program, approximately.
        share: slots that share a variance.
    """
    block_m, block_g = power_of_two(share), power_of_two(N // share)
    block_d = min(max(1, lanes // (block_m * block_g)), power_of_two(D))
    tile = (block_m, block_g, block_d)
    blocks, chunks = ceil(D, block_d), ceil(T, CHUNK)
    segments = min(FILL // max(1, rows * blocks), chunks)
    if segments < LEAST_SEGMENTS:
        return Schedule(*tile, blocks, 1, chunks)
    per_segment = ceil(chunks, segments)
    return Schedule(*tile, blocks, ceil(chunks, per_segment), per_segment)


def wave_rows(cut: Schedule) -> int:
    """Rows whose backward programs run in one launch."""
    return max(1, WAVE // (cut.blocks * cut.segments))


def ceil(x: int, y: int) -> int:
    """X / y, rounded up."""
    return -(-x // y)


def power_of_two(x: int) -> int:
    """The smallest power of two that is at least x."""
    return 1 << max(0, x - 1).bit_length()
