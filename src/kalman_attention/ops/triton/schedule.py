"""The schedule of the Triton engine: how a call is cut into programs. Shapes alone decide.

Nothing here imports triton, so that the roofline can ask without it.

A program is one warp. It owns the slots of a block of channels of one row and walks a segment of
time. With one segment per row the schedule is lane-serial; with more it is time-split: summarise
the segments side by side, walk over the summaries, replay every segment from its true beginning.

Splitting costs 2.3 times the work forward and 1.3 times backward, so it starts where it cuts time
into at least four. The rule does not ask the device how large it is: the same shapes give the same
bits on every GPU.
"""

from typing import NamedTuple

import torch

from kalman_attention.ops.contract import CHUNK, ScanInputs

FILL = 512
"""Programs that keep a large GPU busy: 108 to 148 multiprocessors with four schedulers each."""

LEAST_SEGMENTS = 4
"""Fewer segments than this do not pay for the second walk."""

FORWARD_LANES = 512
"""Lanes (slot, channel) of a forward program, sixteen per thread."""

BACKWARD_LANES = 128
"""Lanes of a backward program, four per thread: more do not fit into registers."""

WINDOW = 8
"""Tokens whose beliefs a backward program keeps at a time: the square root of a chunk."""

WAVE = 8 * FILL
"""Backward programs per launch, which share one scratch array with the next launch."""


class Schedule(NamedTuple):
    """How one pass is cut.

    Attributes:
        block_m: slots of a block of slots, a power of two that holds N / G.
        block_g: blocks of slots of a tile, a power of two that holds G.
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
    """Cut a call with arithmetic in ``dtype`` into programs of about ``lanes`` lanes."""
    T, (R, N, D), share = inputs.v.shape[1], inputs.mean_0.shape, inputs.slots
    plain = share == 1 and inputs.dt is None
    return cut(R, T, N, D, lanes_for(dtype, lanes, plain=plain), share)


def lanes_for(dtype: torch.dtype, lanes: int, *, plain: bool = True) -> int:
    """Lanes of a program: fewer where each takes more registers.

    A quarter in float64, which takes two and more temporaries. Half in a backward program that adds
    up over slots that share a variance, or goes back over gaps in time.
    """
    lanes = lanes if plain or lanes != BACKWARD_LANES else lanes // 2
    return lanes // 4 if dtype == torch.float64 else lanes


def cut(rows: int, T: int, N: int, D: int, lanes: int, share: int = 1) -> Schedule:
    """``schedule`` by sizes.

    Args:
        rows: of the call; documents when packed.
        T: tokens of a row, or of all documents when packed.
        N: slots.
        D: channels.
        lanes: of a program, about.
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
    """The least power of two that is at least x."""
    return 1 << max(0, x - 1).bit_length()
