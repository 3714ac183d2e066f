"""``kla bench roofline``: predicted speed of the Triton engine on two GPUs."""

from collections.abc import Iterator

from kalman_attention._tables import markdown_rows, render
from kalman_attention.ops.triton.schedule import BACKWARD_LANES, FORWARD_LANES
from kalman_attention.tools.roofline import (
    DEVICES,
    Device,
    Sizes,
    Tiling,
    Work,
    backward_work,
    expanded_bytes,
    forward_work,
    least_bytes,
)

SHAPES = (Sizes(B=1, T=65_536, D=960, N=16), Sizes(B=32, T=2048, D=960, N=16))
"""The paper's longest prefill, which is split in time, and a training batch, which is not."""

HEADER = (
    *("shape", "pass", "schedule", "device", "bytes/token", "instructions/token"),
    *("ns/token", "bound by", "expanded states", "least traffic"),
)


def predict(*, markdown: bool = False) -> str:
    """The predicted times as a table. Nothing is measured.

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
