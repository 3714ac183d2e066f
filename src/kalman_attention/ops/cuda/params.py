"""Arguments of a launch: one struct of 64-bit words, ``Params`` of csrc/cuda/params.h."""

import struct
from typing import NamedTuple

import torch
from torch import Tensor

from kalman_attention.ops.contract import ScanInputs, array, at, rows
from kalman_attention.ops.cuda import device
from kalman_attention.ops.cuda.grid import Grid
from kalman_attention.ops.cuda.program import Program

ARRAYS = ("v", "lam_v", "k", "q", "mask", "dt", "dy", "dy_var")
"""Fields of four words: address, two strides, type."""


class Params(NamedTuple):
    """The struct, field by field; None is a null pointer."""

    B: int
    T: int
    N: int
    D: int
    G: int
    m: int
    places: int
    R: int
    span: int
    segments: int
    chunks: int
    n0: int
    block0: int
    blocks: int
    dt_width: int
    v: Tensor
    lam_v: Tensor
    k: Tensor
    q: Tensor
    mask: Tensor | None
    dt: Tensor | None
    a_bar: Tensor
    p_bar: Tensor
    mean_0: Tensor
    variance_0: Tensor
    cu_seqlens: Tensor | None
    y: Tensor | None = None
    y_var: Tensor | None = None
    mean: Tensor | None = None
    variance: Tensor | None = None
    checkpoints: Tensor | None = None
    summaries: Tensor | None = None
    borders: Tensor | None = None
    channel_sums: Tensor | None = None
    dy: Tensor | None = None
    dy_var: Tensor | None = None
    dmean: Tensor | None = None
    dvariance: Tensor | None = None
    dv: Tensor | None = None
    dlam_v: Tensor | None = None
    dk: Tensor | None = None
    dq: Tensor | None = None
    da_bar: Tensor | None = None
    dp_bar: Tensor | None = None
    dmean_0: Tensor | None = None
    dvariance_0: Tensor | None = None
    ddt: Tensor | None = None
    slot_parts: Tensor | None = None
    slot_sums: Tensor | None = None
    dynamics_parts: Tensor | None = None

    def pack(self) -> bytes:
        """The struct as the kernels read it."""
        words: list[int] = []
        for name, x in zip(self._fields, self, strict=True):
            if isinstance(x, int):
                words.append(x)
            elif name == "mask":
                words += (0, 0, 0, 0) if x is None else (x.data_ptr(), *x.stride(), 0)
            elif name in ARRAYS:
                words += array(x)
            else:
                words.append(at(x))
        return struct.pack(f"={len(words)}q", *words)


def prepare(inputs: ScanInputs, grid: Grid, dtype: torch.dtype) -> Params:
    """The inputs of a call, with dynamics and beliefs in the arithmetic dtype."""
    (B, T, D), (R, N, _), m = inputs.v.shape, inputs.mean_0.shape, inputs.slots
    call = inputs.dense(dtype)._asdict()
    if inputs.dt is not None:
        # Always in float64: it happens once per call, and decays near 1 need the digits.
        call["a_bar"] = inputs.a_bar.double().log().neg().to(dtype)
        call["dt"] = rows(inputs.dt)
    return Params(
        B=B, T=T, N=N, D=D, G=N // m, m=m, places=grid.places, R=R,
        span=grid.span, segments=grid.segments, chunks=inputs.chunks,
        n0=0, block0=0, blocks=grid.blocks,
        dt_width=0 if inputs.dt is None or inputs.dt.shape[-1] == 1 else 1,
        **{name: call[name] for name in call if name in Params._fields},
    )  # fmt: skip


def launch(program: Program, kernel: str, blocks: int, threads: int, params: Params) -> None:
    """Run a kernel on the device of the inputs, or in the emulation if they are on the CPU."""
    if blocks == 0:
        return
    run = device.emulate if params.v.device.type == "cpu" else device.launch
    run(program, kernel, blocks, threads, params.pack(), params.v.device)
