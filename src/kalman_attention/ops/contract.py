"""What passes between user, op and engines: the tensors of one call, and where beliefs are saved.

An engine is a module with two functions, ``forward`` and ``backward``, typed by ``EngineModule``.
Its arguments are already validated; an engine neither checks nor dispatches.
"""

import contextlib
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from kalman_attention._typing import Belief, Dynamics, Keys, Mask, Precisions, Values
from kalman_attention.filtering.moment import KLAState
from kalman_attention.filtering.segment import AdjointMap, FilterMap

Fields = TypeVar("Fields", bound=tuple[Any, ...])  # a NamedTuple of tensors

# 64 keeps the saved beliefs to 1/64 of [B, T, N, D], and what the native backward pass replays at a
# time (64 tokens of 16 slots of a tile, 266 KB in float32) within L2. Shorter chunks were slower.
CHUNK = 64
"""Tokens between two saved beliefs. The backward pass replays a chunk from its initial belief."""


class ScanInputs(NamedTuple):
    """The validated arguments of one scan.

    q, k, v, lam_v may be half, bfloat16 or float32 in any mix, or all float64; the dynamics and
    the belief are in the compute dtype. With ``cu_seqlens`` B is 1 and a row is a document. The
    dtype of the arithmetic is decided once, by the checks, and passed along in ``acc_dtype``. The
    time before every token, ``dt``, is ``[B, T, D]`` or ``[B, T, 1]``; None means 1.
    """

    q: Keys
    k: Keys
    v: Values
    lam_v: Precisions
    a_bar: Dynamics
    p_bar: Dynamics
    mean_0: Belief
    variance_0: Belief
    mask: Mask | None
    cu_seqlens: Tensor | None
    acc_dtype: torch.dtype | None = None
    dt: Tensor | None = None

    @property
    def compute_dtype(self) -> torch.dtype:
        """float64 for float64 inputs, float32 for everything else."""
        return compute_dtype(self.v.dtype)

    @property
    def arithmetic_dtype(self) -> torch.dtype:
        """Dtype that engines calculate in: ``acc_dtype``, or the compute dtype if none is set."""
        return self.compute_dtype if self.acc_dtype is None else self.acc_dtype

    @property
    def slots(self) -> int:
        """Number of slots that share a precision; 1 if every slot has its own."""
        return self.k.shape[-1] // self.a_bar.shape[0]

    @property
    def chunks(self) -> int:
        """Number of saved beliefs; depends on shapes only, so that compilers can trace it.

        Chunk c of row b is number ``b * ceil(T / CHUNK) + c``. Packed documents start anywhere,
        so chunk c of document i is number ``cu_seqlens[i] // CHUNK + i + c`` out of
        ``T // CHUNK + R``: no two collide, and unused entries are 0.
        """
        B, T = self.v.shape[:2]
        if self.cu_seqlens is None:
            return B * -(-T // CHUNK)
        return T // CHUNK + self.mean_0.shape[0]

    def dense(self, dtype: torch.dtype) -> "ScanInputs":
        """The same call in the layout that kernels read; copies only where necessary.

        Tokens get a contiguous last axis; dynamics and beliefs become contiguous and ``dtype``, the
        document boundaries int64 and on the device of the tokens.
        """
        bounds = self.cu_seqlens
        return self._replace(
            q=rows(self.q),
            k=rows(self.k),
            v=rows(self.v),
            lam_v=rows(self.lam_v),
            a_bar=dense(self.a_bar, dtype),
            p_bar=dense(self.p_bar, dtype),
            mean_0=dense(self.mean_0, dtype),
            variance_0=dense(self.variance_0, dtype),
            cu_seqlens=None if bounds is None else dense(bounds.to(self.v.device), torch.int64),
            dt=None if self.dt is None else rows(self.dt),
        )

    def new_checkpoints(self, dtype: torch.dtype, fields: int = 2) -> Tensor:
        """Memory for mean and variance before each chunk; entries of no document are 0."""
        # Without packing every entry is written, so it need not be initialised.
        new = torch.empty if self.cu_seqlens is None else torch.zeros
        shape = (fields, self.chunks, *self.mean_0.shape[1:])
        return new(shape, dtype=dtype, device=self.v.device)


class ScanResult(NamedTuple):
    """What a forward pass returns.

    Attributes:
        y: output means, ``[B, T, D]`` in v's dtype.
        y_var: output variances, like y, or None if not requested.
        mean: mean of every row after its last token, ``[R, N, D]`` in the compute dtype.
        variance: the corresponding variance, ``[R, G, D]``.
        checkpoints: mean and variance before each chunk, ``[2, chunks, N, D]``, or None.
    """

    y: Values
    y_var: Values | None
    mean: Belief
    variance: Belief
    checkpoints: Tensor | None


class ScanGrads(NamedTuple):
    """Gradients with respect to the floating inputs, in their shapes; dt is None if it was."""

    q: Keys
    k: Keys
    v: Values
    lam_v: Precisions
    a_bar: Dynamics
    p_bar: Dynamics
    mean_0: Belief
    variance_0: Belief
    dt: Tensor | None = None


class ScanOutput(NamedTuple):
    """Outputs and the state after the last token.

    Attributes:
        y: posterior mean of the read-out, sum_n q mu, ``[B, T, D]`` (``[B, D]`` for a step).
        y_var: its posterior variance, sum_n q^2 / lam, or None if not requested.
        state: mean and variance after each row's last real token, ``[R, N, D]`` each.
    """

    y: Values
    y_var: Values | None
    state: KLAState


class LinearScanInputs(NamedTuple):
    """The arguments of a first-order scan, h' = exp(dt A) h + dt B x and y = sum_n C h'.

    Letters are Mamba's; B here is the input operator. Dtypes mix as in ``ScanInputs``.

    Attributes:
        x: inputs, ``[B, T, D]``.
        dt: step sizes, ``[B, T, D]``.
        A: decay rates, negative, ``[N, D]``.
        B: input operators, ``[B, T, N]``.
        C: read-out operators, ``[B, T, N]``.
        h_0: initial state, ``[R, N, D]``.
        mask: True for real tokens, ``[B, T]`` bool, or None.
        cu_seqlens: document boundaries, ``[R + 1]``, which require a batch of 1; or None.
    """

    x: Values
    dt: Values
    A: Dynamics
    B: Keys
    C: Keys
    h_0: Belief
    mask: Mask | None
    cu_seqlens: Tensor | None


class LinearScanResult(NamedTuple):
    """Outputs ``[B, T, D]``, final states ``[R, N, D]``, saved states ``[1, chunks, N, D]``."""

    y: Values
    h: Belief
    checkpoints: Tensor | None


class LinearScanGrads(NamedTuple):
    """Gradients with respect to the six floating inputs, in their shapes and dtypes."""

    x: Values
    dt: Values
    A: Dynamics
    B: Keys
    C: Keys
    h_0: Belief


class FrameInputs(NamedTuple):
    """Keys and queries, and the reflections that rotate the latent; all of one floating dtype.

    Attributes:
        q: queries, ``[B, T, N]``.
        k: keys, ``[B, T, N]``.
        u_h: directions of the reflections, of any length, ``[B, T, n_h, G, m]`` with N = G m.
        mask: True for real tokens, ``[B, T]`` bool, or None; padding rotates nothing.
        cu_seqlens: document boundaries, ``[R + 1]``, which require a batch of 1; or None.
    """

    q: Keys
    k: Keys
    u_h: Tensor
    mask: Mask | None
    cu_seqlens: Tensor | None

    @property
    def frame_shape(self) -> tuple[int, int, int, int]:
        """One frame per row and block, ``[R, G, m, m]``."""
        B, _, _, G, m = self.u_h.shape
        return (B if self.cu_seqlens is None else len(self.cu_seqlens) - 1, G, m, m)


class EngineModule(Protocol):
    """The two functions of an engine."""

    def forward(self, inputs: ScanInputs, *, return_variance: bool, save: bool) -> ScanResult:
        """Filter every row; save a belief per chunk if ``save``."""
        ...

    def backward(
        self,
        inputs: ScanInputs,
        checkpoints: Tensor,
        dy: Tensor | None,
        dy_var: Tensor | None,
        dmean: Tensor | None,
        dvariance: Tensor | None,
    ) -> ScanGrads:
        """Exact gradients, given those of y, y_var and the final belief (None means 0)."""
        ...


class StepFunction(Protocol):
    """A single token per row: ``forward`` for inputs without the T axis."""

    def __call__(self, inputs: ScanInputs, *, return_variance: bool) -> ScanResult:
        """Filter q, k ``[B, N]``, v, lam_v ``[B, D]`` with mask ``[B]``; no checkpoints."""
        ...


class StepEngineModule(EngineModule, Protocol):
    """An engine with a single-token kernel."""

    step: StepFunction


class MapEngineModule(EngineModule, Protocol):
    """A module that summarises rows: an engine, or ``ops/torch/segments.py``."""

    def filter_map(self, inputs: ScanInputs) -> FilterMap:
        """The map from the belief before every row to the belief after it."""
        ...

    def adjoint_map(
        self, inputs: ScanInputs, checkpoints: Tensor, dy: Tensor | None, dy_var: Tensor | None
    ) -> AdjointMap:
        """The map from gradients with respect to the belief after a row to those before it."""
        ...


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the arithmetic and of the belief, for inputs of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def own_types(x: Tensor) -> contextlib.AbstractContextManager[None]:
    """A context without autocast."""
    # Autocast would compute products of float32 tensors in bfloat16 and break the accuracy
    # contract.
    if torch.is_autocast_enabled(x.device.type):
        return torch.autocast(x.device.type, enabled=False)
    return contextlib.nullcontext()


def where(real: Tensor, new: Fields, old: Fields) -> Fields:
    """Select field by field: ``new`` at real tokens, ``old`` at padding."""
    return type(new)(*(torch.where(real, x, y) for x, y in zip(new, old, strict=True)))


# Tensors as engines behind a C interface see them: addresses, strides and type codes.

DTYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
"""Type codes of ``csrc/kla_scan.h`` and ``csrc/cuda/params.h``."""

NO_ARRAY = (0, 0, 0, 0)
"""An absent ``[B, T, *]`` array: address, two strides, type."""


def rows(x: Tensor) -> Tensor:
    """The same values with a contiguous last axis."""
    return x if x.stride(-1) == 1 else x.contiguous()


def dense(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The same values, contiguous and in ``dtype``."""
    # Comparing dtypes first is ten times cheaper than a Tensor.to that has nothing to do.
    return x.contiguous() if x.dtype is dtype else x.to(dtype).contiguous()


def at(x: Tensor | None) -> int:
    """Address of x; 0 for None."""
    return 0 if x is None else x.data_ptr()


def array(x: Tensor | None) -> tuple[int, int, int, int]:
    """A ``[B, T, *]`` array as its address, two strides and type."""
    if x is None:
        return NO_ARRAY
    return (x.data_ptr(), x.stride(0), x.stride(1), DTYPES[x.dtype])
