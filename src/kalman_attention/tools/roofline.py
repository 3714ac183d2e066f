"""An analytic roofline of the Triton engine: bytes and operations per pass, and the implied time.

Plain arithmetic on sizes; no GPU and no compiler is involved. Traffic is counted in two ways:
``requested`` is the total of the load and store instructions of all warps (a test counts them in
the interpreter), ``memory`` is what device memory moves if the caches work as intended, that is, if
a chunk of tokens and the scratch array of a warp stay cached. Float32 throughout.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from kalman_attention._tables import markdown_rows, render
from kalman_attention.ops.contract import CHUNK
from kalman_attention.ops.triton.schedule import BACKWARD_LANES, FORWARD_LANES, WINDOW, ceil, cut

# Counts are of the source: one for every multiply-add, product, sum or comparison.

DIVISION = 9
"""Instructions of a division rounded to nearest: estimate, refinements, range check."""

STEP = 9 + DIVISION
"""Instructions of ``filter_step`` with its evidence, a multiply-add counting as one."""

SUMMARY = STEP + 6
"""Instructions of one token in the five-number summary, with its evidence."""

ADJOINT = 16
"""Instructions of ``filter_adjoint``."""

COLLECT = 10
"""Instructions around it: sources, sums over slots and channels, da_bar, dp_bar; no shuffles."""

SUMMARY_BACK = 9
"""Instructions of the four-number summary of the adjoint beyond the replayed step."""

EXPANDED_FORWARD = 17
"""``[B, T, N, D]`` tensors that the paper's forward pass writes or reads, one pass per scan.

Moebius maps: 4 written, 4 read; lam: 1 written, 2 read; affine maps: 2 written, 2 read; eta: 1
written, 1 read. Tree scans in several kernels move more.
"""

EXPANDED_BACKWARD = 2 * EXPANDED_FORWARD
"""The same for its backward pass: the adjoint of a scan is a scan over maps and adjoints."""


class Sizes(NamedTuple):
    """Sizes of a call; rows are batch rows."""

    B: int
    T: int
    D: int
    N: int


class Tiling(NamedTuple):
    """The division of a call: channel blocks, padded lanes per row, time segments, window."""

    blocks: int
    lanes: int
    segments: int
    window: int = WINDOW

    @classmethod
    def of(cls, sizes: Sizes, lanes: int) -> "Tiling":
        """The division that the engine chooses for programs of about ``lanes`` lanes."""
        plan = cut(sizes.B, sizes.T, sizes.N, sizes.D, lanes)
        return cls(plan.blocks, plan.blocks * math.prod(plan.tile), plan.segments)


class Device(NamedTuple):
    """Peak rates: bytes per second, and float32 instructions per second over all lanes."""

    name: str
    bandwidth: float
    instructions: float


DEVICES = (
    Device("A100 (SXM, 40 GB)", 1.555e12, 108 * 64 * 1.41e9),
    Device("H100 (SXM)", 3.35e12, 132 * 128 * 1.83e9),
)


class Traffic(NamedTuple):
    """Elements of one array that a pass reads and writes."""

    requested: int
    memory: int
    bytes: int = 4


class Work(NamedTuple):
    """One pass: traffic by array, and float32 instructions."""

    traffic: dict[str, Traffic]
    instructions: int

    @property
    def requested_bytes(self) -> int:
        """Bytes that instructions request."""
        return sum(x.requested * x.bytes for x in self.traffic.values())

    @property
    def memory_bytes(self) -> int:
        """Bytes that device memory moves."""
        return sum(x.memory * x.bytes for x in self.traffic.values())

    def seconds(self, device: Device) -> float:
        """The maximum of the time for the bytes and the time for the instructions."""
        memory = self.memory_bytes / device.bandwidth
        return max(memory, self.instructions / device.instructions)


def forward_work(sizes: Sizes, tiling: Tiling, *, save: bool) -> Work:
    """Work of the forward pass, which reads the tokens twice if time is split."""
    B, T, D, N = sizes
    tokens, state, S, blocks = B * T, B * N * D, tiling.segments, tiling.blocks
    walks = 1 if S == 1 else 2
    traffic = {
        "v, lam_v": Traffic(walks * 2 * tokens * D, walks * 2 * tokens * D),
        "k, q": Traffic((walks + 1) * tokens * N * blocks, (walks + 1) * tokens * N),
        "y": Traffic(tokens * D, tokens * D),
        "a_bar, p_bar": Traffic(walks * 2 * state * S, walks * 2 * N * D),
        "first and last belief": Traffic(4 * state, 4 * state),
    }
    if save:
        chunks = B * ceil(T, CHUNK)
        traffic["checkpoints"] = Traffic(2 * chunks * N * D, 2 * chunks * N * D)
    if S > 1:
        traffic["summaries"] = Traffic(10 * state * S, 10 * state * S)
        traffic["starts of segments"] = Traffic(4 * state * S, 4 * state * S)
    lanes = tokens * N * D
    return Work(traffic, lanes * (STEP + 1) + (lanes * SUMMARY if S > 1 else 0))


def backward_work(sizes: Sizes, tiling: Tiling) -> Work:
    """Work of the backward pass from dy alone: two replays and the adjoint, plus a summary."""
    B, T, D, N = sizes
    tokens, state, S, blocks = B * T, B * N * D, tiling.segments, tiling.blocks
    chunks, padded = B * ceil(T, CHUNK), tiling.lanes
    walks = 1 if S == 1 else 2
    windows = B * ceil(T, tiling.window)
    per_slot = tokens * N * blocks
    traffic = {
        "v, lam_v": Traffic((4 + 2 * walks) * tokens * D, walks * 2 * tokens * D),
        "k, q": Traffic((2 + 2 * walks) * per_slot, walks * 2 * tokens * N),
        "dy": Traffic(walks * tokens * D, walks * tokens * D),
        "dv, dlam_v": Traffic(2 * tokens * D, 2 * tokens * D),
        "dk, dq": Traffic(2 * tokens * N, 2 * tokens * N),
        "dk, dq per block": Traffic(4 * per_slot, 4 * per_slot),
        "scratch": Traffic(4 * padded * (B * T + windows), 0),
        "checkpoints": Traffic(walks * 2 * chunks * N * D, walks * 2 * chunks * N * D),
        "a_bar, p_bar": Traffic(walks * 2 * state * S, walks * 2 * N * D),
        "da_bar, dp_bar": Traffic(4 * chunks * N * D + 2 * state * S, 4 * state * S, 8),
        "da_bar, dp_bar summed": Traffic(2 * N * D, 2 * N * D),
        "adjoints of first and last belief": Traffic(4 * state, 4 * state),
    }
    if S > 1:
        traffic["summaries"] = Traffic(8 * state * S, 8 * state * S)
        traffic["ends of segments"] = Traffic(4 * state * S, 4 * state * S)
    lanes = tokens * N * D
    summary = STEP + SUMMARY_BACK if S > 1 else 0
    return Work(traffic, lanes * (3 * STEP + ADJOINT + COLLECT + summary))


def least_bytes(sizes: Sizes, *, backward: bool) -> int:
    """Lower bound: every input read once and every output written once, in float32."""
    B, T, D, N = sizes
    return 4 * B * T * (5 * D + 4 * N if backward else 3 * D + 2 * N)


def expanded_bytes(sizes: Sizes, *, backward: bool) -> int:
    """The paper's approach: states expanded to ``[B, T, N, D]``, plus inputs and outputs."""
    B, T, D, N = sizes
    count = EXPANDED_BACKWARD if backward else EXPANDED_FORWARD
    return least_bytes(sizes, backward=backward) + 4 * B * T * N * D * count


SHAPES = (Sizes(B=1, T=65_536, D=960, N=16), Sizes(B=32, T=2048, D=960, N=16))
"""The paper's longest prefill, which is split in time, and a training batch, which is not."""

HEADER = (
    *("shape", "pass", "schedule", "device", "bytes/token", "instructions/token"),
    *("ns/token", "bound by", "expanded states", "least traffic"),
)


def predict(*, markdown: bool = False) -> str:
    """The predicted times as a table, for ``kla bench roofline``. Nothing is measured.

    Args:
        markdown: a Markdown table instead of aligned columns.
    """
    rows = list(table())
    return (markdown_rows if markdown else render)(HEADER, rows) + (
        "\n\nPredictions, nothing measured. Last columns: predicted time of the paper's expanded "
        "states, and of moving inputs and outputs once, as multiples of ours."
    )


def table() -> Iterator[list[str]]:
    """Rows of the table as text, in the order of ``HEADER``."""
    for sizes in SHAPES:
        forward = Tiling.of(sizes, FORWARD_LANES)
        backward = Tiling.of(sizes, BACKWARD_LANES)
        for device in DEVICES:
            work = forward_work(sizes, forward, save=False)
            yield _row(sizes, "forward", forward, work, device)
        for device in DEVICES:
            work = backward_work(sizes, backward)
            yield _row(sizes, "backward", backward, work, device)


def _row(sizes: Sizes, kind: str, tiling: Tiling, work: Work, device: Device) -> list[str]:
    tokens, seconds, backward = sizes.B * sizes.T, work.seconds(device), kind == "backward"
    memory = work.memory_bytes / device.bandwidth
    expanded = expanded_bytes(sizes, backward=backward) / device.bandwidth
    least = least_bytes(sizes, backward=backward) / device.bandwidth
    schedule = "lane-serial" if tiling.segments == 1 else f"{tiling.segments} segments"
    return [
        f"B={sizes.B} T={sizes.T} D={sizes.D} N={sizes.N}",
        kind,
        schedule,
        device.name,
        f"{work.memory_bytes / tokens:.0f}",
        f"{work.instructions / tokens:.0f}",
        f"{1e9 * seconds / tokens:.1f}",
        "memory" if seconds == memory else "arithmetic",
        f"{expanded / seconds:.1f} x",
        f"{least / seconds:.2f} x",
    ]
