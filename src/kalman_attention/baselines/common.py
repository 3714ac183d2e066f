"""What the baselines share: sizes of heads, the frame of a mixer, chunks, and other kernels.

Letters of the chunked forms, per head: L tokens per chunk, n chunks, keys of K and values of V
channels, a state of K x V numbers. Heads come before time: ``[B, H, n, L, ...]``.
"""

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from kalman_attention._typing import Mask
from kalman_attention.nn.mixer import LayerOutput, Mixer
from kalman_attention.ops.matrix_scan import can_scan


@dataclass(frozen=True, kw_only=True)
class HeadSizes:
    """Sizes of a mixer whose heads have keys of K and values of V channels.

    Attributes:
        d_model: width of input and output.
        num_heads: number of heads.
        expand_k: width of all keys together, in units of d_model.
        expand_v: width of all values together, in units of d_model.
    """

    d_model: int
    num_heads: int = 4
    expand_k: float = 0.5
    expand_v: float = 1.0

    def __post_init__(self) -> None:
        if self.num_heads < 1:
            raise ValueError(f"num_heads must be at least 1, got {self.num_heads}.")
        for name in ("expand_k", "expand_v"):
            size = self.d_model * getattr(self, name) / self.num_heads
            if size < 1 or abs(size - round(size)) > 1e-6:
                raise ValueError(
                    f"{name} = {getattr(self, name)} of d_model = {self.d_model} does not split "
                    f"into {self.num_heads} heads of whole channels: {size} each. Choose another "
                    f"{name} or num_heads."
                )

    @property
    def key_dim(self) -> int:
        """Key channels per head."""
        return round(self.d_model * self.expand_k / self.num_heads)

    @property
    def value_dim(self) -> int:
        """Value channels per head."""
        return round(self.d_model * self.expand_v / self.num_heads)

    @property
    def state_size(self) -> int:
        """Numbers in the recurrent matrices of one layer."""
        return self.num_heads * self.key_dim * self.value_dim


class MatrixMixer(Mixer):
    """A mixer defined on padded rows; packing and single steps are derived from it."""

    picks = True

    def mix(
        self,
        x: Tensor,
        state: Any = None,
        mask: Mask | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        return_variance: bool = False,
        ids: Tensor | None = None,
        keep: Mask | None = None,
    ) -> LayerOutput:
        """Mix a piece of sequences, continuing from ``state``; see ``Mixer``. No variance.

        Without mask and packing, ``ids`` and ``keep`` are as in ``Block.forward``: x is a table,
        and only some outputs are needed.
        """
        if ids is not None or keep is not None:
            if state is None:
                state = self.init_state(len(x if ids is None else ids), like=x)
                if "conv" in state._fields:  # None: nothing is before the first token
                    state = state._replace(conv=None)
            y, state = self._mix(x, state, None, parallel=True, ids=ids, keep=keep)
            return LayerOutput(y, None, state)
        self._check(x, mask, cu_seqlens)
        if cu_seqlens is not None:
            return mix_documents(self.mix, x, state, cu_seqlens)
        return self._rows(x, state, mask, parallel=True)

    def step(
        self, x: Tensor, state: Any, *, mask: Mask | None = None, return_variance: bool = False
    ) -> LayerOutput:
        """One token ``[B, d_model]`` (mask ``[B]``); equal to ``mix`` on sequences of one."""
        self._check(x, mask, axes=2)
        mask = None if mask is None else mask.unsqueeze(1)
        found = self._rows(x.unsqueeze(1), state, mask, parallel=False)
        return LayerOutput(found.y.squeeze(1), None, found.state)

    def _rows(self, x: Tensor, state: Any, mask: Mask | None, *, parallel: bool) -> LayerOutput:
        state = self.init_state(x.shape[0], like=x) if state is None else state
        blank = None if mask is None else ~mask.unsqueeze(-1)
        if blank is not None:
            x = x.masked_fill(blank, 0.0)  # padding may hold anything, even NaN
        y, state = self._mix(x, state, mask, parallel=parallel)
        return LayerOutput(y if blank is None else y.masked_fill(blank, 0.0), None, state)

    def _mix(
        self,
        x: Tensor,
        state: Any,
        mask: Mask | None,
        *,
        parallel: bool,
        ids: Tensor | None = None,
        keep: Mask | None = None,
    ) -> tuple[Tensor, Any]:
        """Output and new state for rows whose padding is 0; its output there is ignored."""
        raise NotImplementedError


def mix_documents(
    mix: Callable[[Tensor, Any, Mask], LayerOutput],
    x: Tensor,
    state: Any,
    cu_seqlens: Tensor,
) -> LayerOutput:
    """Unpack documents into padded rows, mix, and pack them again.

    For mixers that support padding but not packing.

    Args:
        mix: function of tokens ``[n, longest, d_model]``, states and mask.
        x: concatenated documents, ``[1, T, d_model]``.
        state: one row per document, or None.
        cu_seqlens: boundaries of the n documents, ``[n + 1]`` int.

    Returns:
        The output in the layout of x, with one state per document.
    """
    bounds = cu_seqlens.to(device=x.device, dtype=torch.int64)
    lengths = bounds.diff()
    offset = torch.arange(int(lengths.max()), device=x.device)
    real = offset < lengths.unsqueeze(1)  # [n, longest]
    place = torch.where(real, bounds[:-1].unsqueeze(1) + offset, 0)
    rows = x[0][place] if x.shape[1] else x.new_zeros(*place.shape, x.shape[2])
    found = mix(rows, state, real)
    return LayerOutput(found.y[real].unsqueeze(0), None, found.state)


def split_heads(x: Tensor, widths: list[int], heads: int) -> list[Tensor]:
    """Split the last axis into parts of the given widths, and each part into heads."""
    parts = torch.split(x, widths, -1)
    return [part.reshape(*x.shape[:-1], heads, part.shape[-1] // heads) for part in parts]


def chunk_size(T: int, K: int, V: int) -> int:
    """Tokens per chunk: a power of 2, no larger than needed for T tokens."""
    # Per token, the weights inside a chunk of length L cost O(L) and the states between chunks
    # O(K V / L). Half of sqrt(K V), within 16 to 64, was fastest for all mixers and head sizes.
    balanced = 1 << max(math.isqrt(K * V) // 2, 1).bit_length() - 1
    return min(max(16, min(balanced, 64)), 1 << max(T - 1, 0).bit_length())


def to_chunks(x: Tensor, size: int, fill: float = 0.0) -> Tensor:
    """Tokens ``[B, T, H, ...]`` to ``[B, H, n, size, ...]``, padded with ``fill``."""
    T = x.shape[1]
    # At least one chunk, so that T = 0 needs no special case.
    n = max(1, -(-T // size))
    padding = [0, 0] * (x.dim() - 2) + [0, n * size - T]
    x = nn.functional.pad(x, padding, value=fill) if n * size > T else x
    return x.reshape(x.shape[0], n, size, *x.shape[2:]).movedim(3, 1)


def from_chunks(x: Tensor, T: int) -> Tensor:
    """The inverse of ``to_chunks``: ``[B, H, n, L, V]`` to ``[B, T, H, V]``."""
    return x.flatten(2, 3)[:, :, :T].transpose(1, 2)


def segment_sums(x: Tensor) -> Tensor:
    """Sums over segments, ``[..., L]`` to ``[..., L, L]``: x_{j + 1} + ... + x_i at (i, j).

    0 on the diagonal and -inf above it, so that exp gives 1 and 0 there.
    """
    # Each segment is summed separately: the difference of two long sums would lose digits.
    L = x.shape[-1]
    later = torch.ones(L, L, dtype=torch.bool, device=x.device)
    rows = x.unsqueeze(-1).expand(*x.shape, L).masked_fill(~later.tril(-1), 0.0)
    return rows.cumsum(-2).masked_fill(~later.tril(), -torch.inf)


def carry(
    factor: Tensor,
    update: Tensor,
    state: Tensor,
    times: Callable[[Tensor, Tensor], Tensor] = torch.mul,
) -> tuple[Tensor, Tensor]:
    """Run state <- factor times state + update over the chunks.

    Args:
        factor: first argument of ``times``, ``[B, H, n, ...]``.
        update: ``[B, H, n, K, V]``.
        state: initial state, ``[B, H, K, V]``.
        times: the product of a factor and a state.

    Returns:
        The states before each chunk ``[B, H, n, K, V]``, and the final one.
    """
    before = []
    for one, term in zip(factor.unbind(2), update.unbind(2), strict=True):
        before.append(state)
        state = term + times(one, state)
    return torch.stack(before, 2), state


Rule = Callable[..., tuple[Tensor, Tensor]]
"""From queries, keys, values, gates and state to outputs ``[B, T, H, V]`` and the final state."""

Form = TypeVar("Form", bound=Callable[..., tuple[Tensor, ...]])


# One thread, float32, forward and backward, B = 1, T = 2048, 4 heads, chunks / native: mLSTM 1.6 at
# 64 x 64, 1.1 at 128 x 128, 0.7 at 256 x 256; GLA 3.9, 2.3, 1.1, and 0.9 at 512 x 512; Gated
# DeltaNet 4.7, 3.2, 2.3, 2.2.
LARGEST_NATIVE = {"gla": 256 * 256, "delta": math.inf, "mlstm": 128 * 128}
"""Numbers K V in the state of a head up to which native code is faster than chunks."""


def form_for(name: str, k: Tensor, v: Tensor, *, native: Form, chunked: Form) -> Form:
    """The form of a recurrence that runs over whole sequences of keys k and values v.

    The native library on CPU tensors, if it is there and for heads of up to ``LARGEST_NATIVE``;
    otherwise chunks of torch operations.
    """
    small = k.shape[-1] * v.shape[-1] <= LARGEST_NATIVE[name]
    return native if small and can_scan(v) else chunked


def fla_kernel(family: str, name: str, k: Tensor, v: Tensor) -> Rule | None:
    """The kernel ``fla.ops.<family>.<name>`` of flash-linear-attention, or None.

    None if it is not installed or cannot serve the call. It serves at least one token on a GPU, in
    float32 or shorter, with keys of up to 256 channels. Never run on a GPU here: a test compares
    the arguments with the signatures of the installed version, and checks results only with a
    substitute on a CPU.
    """
    if not v.is_cuda or v.dtype == torch.float64 or v.shape[1] == 0 or k.shape[-1] > 256:
        return None
    kernel = _load(family, name)
    return None if kernel is None else partial(_call, kernel)


def _call(
    kernel: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, *gates_and_state: Tensor
) -> tuple[Tensor, Tensor]:
    *gates, state = gates_and_state
    y, last = kernel(
        *(x.to(v.dtype) for x in (q, k, v)),
        *gates,
        scale=1.0,
        initial_state=state.float(),
        output_final_state=True,
    )
    return y, last


@cache
def _load(family: str, name: str) -> Callable[..., Any] | None:
    try:
        kernel: Callable[..., Any] = getattr(importlib.import_module(f"fla.ops.{family}"), name)
    except ImportError:
        return None
    return kernel
