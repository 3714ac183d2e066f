"""Depthwise causal convolution over a few tokens, with its window as a state.

The layout is ``[B, T, D]`` throughout: a few shifted multiply-adds in place are faster on a CPU
than transposing for ``conv1d``.
"""

import math
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from kalman_attention._typing import Mask
from kalman_attention.nn.float32 import at_least_float32
from kalman_attention.nn.mixer import from_table
from kalman_attention.ops.cpu import can_convolve, conv_backward, conv_forward


class Convolved(NamedTuple):
    """What ``ShortConv.along`` returns.

    Attributes:
        u: the convolved channels, ``[B, T, D]``; or a table ``[U, D]`` of the distinct ones.
        x: the input at the same positions, all channels of it.
        ids: ``[B, T]`` int, which row of these tables is at which position; None without tables.
        window: the new window, ``[R, K - 1, D]``.
    """

    u: Tensor
    x: Tensor
    ids: Tensor | None
    window: Tensor


class ShortConv(nn.Module):
    """y_t = bias + sum_j weight[j] x_{t - K + 1 + j}, one filter per channel.

    Args:
        channels: number of channels D.
        kernel_size: number of taps K, the last of which is the current token.
        bias: whether to add one.
    """

    parameter_group: ClassVar[str] = "vector"

    def __init__(self, channels: int, kernel_size: int = 4, *, bias: bool = True) -> None:
        super().__init__()
        if kernel_size < 1:
            raise ValueError(f"kernel_size must be at least 1 (the current token), {kernel_size=}.")
        self.channels, self.kernel_size = channels, kernel_size
        self.weight = nn.Parameter(torch.empty(kernel_size, channels))  # [K, D]
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None  # [D]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform within 1 / sqrt(K), as ``nn.Conv1d`` initialises a depthwise filter."""
        bound = 1.0 / math.sqrt(self.kernel_size)
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def init_window(self, rows: int, like: Tensor) -> Tensor:
        """The window before the first token: zeros, ``[rows, K - 1, D]``."""
        return like.new_zeros(rows, self.kernel_size - 1, self.channels)

    def forward(
        self,
        x: Tensor,
        window: Tensor | None = None,
        mask: Mask | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Convolve a sequence.

        Args:
            x: ``[B, T, D]``, T may be 0; or one token per row, ``[B, D]``.
            window: the last K - 1 tokens before x, ``[R, K - 1, D]``; zeros if None.
            mask: ``[B, T]`` (``[B]``) bool, False for padding, which the convolution skips.
            cu_seqlens: document boundaries in one packed row, ``[n + 1]``.

        Returns:
            The output, of the shape of x (0 at padding), and the new window ``[R, K - 1, D]``.
        """
        rows = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
        if window is None:
            window = self.init_window(rows, x)
        elif window.shape != (rows, self.kernel_size - 1, self.channels):
            raise ValueError(
                f"the convolution window is {list(window.shape)} but must be "
                f"{[rows, self.kernel_size - 1, self.channels]}: [R, K - 1, D], one row per "
                "sequence. Pass the state that the previous call on the same rows returned."
            )
        window = window.to(x.dtype)
        if x.dim() == 2:
            return self._token(x, window, mask)
        if cu_seqlens is not None:
            return self._packed(x, window, cu_seqlens)
        if mask is not None:
            return self._masked(x, window, mask)
        return self._convolve(x, window), _last(window, x)

    def along(
        self,
        x: Tensor,
        ids: Tensor | None = None,
        window: Tensor | None = None,
        mask: Mask | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Convolved:
        """Convolve the first D channels of x, and return the others beside them.

        Args:
            x: ``[B, T, D + more]``, or with ``ids`` a table ``[V, D + more]``.
            ids: ``[B, T]`` int, the row of the table at every position; None without a table.
            window: as for ``forward``.
            mask: as for ``forward``.
            cu_seqlens: as for ``forward``.
        """
        found = None
        if ids is not None and window is None and mask is None and cu_seqlens is None:
            found = distinct_windows(ids, len(x), self.kernel_size)
        if ids is None or found is None:
            x = from_table(x, ids)
            u, window = self(x[..., : self.channels], window, mask, cu_seqlens)
            return Convolved(u, x, None, window)
        stream = nn.functional.pad(x[:, : self.channels], (0, 0, 0, 1))  # 0 before the first token
        dtype, before = at_least_float32(x.dtype), self.kernel_size - 1
        taps = from_table(stream, found.windows).to(dtype)  # [U, K, D]
        u = (self._offset().to(dtype) + (taps * self.weight.to(dtype)).sum(1)).to(x.dtype)
        last = nn.functional.pad(ids, (before, 0), value=len(x))[:, ids.shape[1] :]
        here = from_table(x, found.windows[:, -1])
        return Convolved(u, here, found.ids, from_table(stream, last))

    def _token(self, x: Tensor, window: Tensor, mask: Mask | None) -> tuple[Tensor, Tensor]:
        """One token ``[B, D]``; the same arithmetic without the T axis."""
        taps = torch.cat([window, x.unsqueeze(1)], 1)  # [B, K, D]
        dtype = at_least_float32(x.dtype)
        y = (self._offset().to(dtype) + (taps * self.weight.to(dtype)).sum(1)).to(x.dtype)
        new = taps[:, 1:]
        if mask is not None:
            y = y.masked_fill(~mask.unsqueeze(-1), 0.0)
            new = torch.where(mask[:, None, None], new, taps[:, :-1])
        return y, new

    def _offset(self) -> Tensor:
        return self.weight.new_zeros(self.channels) if self.bias is None else self.bias

    def _convolve(self, x: Tensor, window: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return _plain_conv(x, window, self.weight, self._offset())
        y: Tensor = _CausalConv.apply(x, window, self.weight, self._offset())  # type: ignore[no-untyped-call]
        return y

    def _masked(self, x: Tensor, window: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        """Move the real tokens of each row together, convolve, and put them back."""
        T, D = x.shape[1:]
        rank = mask.cumsum(1) - 1  # index among the real tokens of the row
        blank = ~mask.unsqueeze(-1)
        slot = torch.where(mask, rank, T).unsqueeze(-1).expand_as(x)  # slot T takes the padding
        dense = x.new_zeros(x.shape[0], T + 1, D).scatter(1, slot, x.masked_fill(blank, 0.0))
        found = self._convolve(dense, window)
        y = found.gather(1, slot).masked_fill(blank, 0.0)
        # The new window is the last K - 1 of the old window and the real tokens.
        both = torch.cat([window, dense], 1)
        place = mask.sum(1, keepdim=True) + torch.arange(window.shape[1], device=x.device)
        return y, both.gather(1, place.unsqueeze(-1).expand_as(window))

    def _packed(self, x: Tensor, window: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        """Insert every document's window before it, convolve the whole row, select the tokens."""
        (_, T, D), (n, W, _) = x.shape, window.shape
        bounds = cu_seqlens.to(device=x.device, dtype=torch.int64)
        token = torch.arange(T, device=x.device)
        document = torch.bucketize(token, bounds[1:], right=True)
        place = token + (document + 1) * W  # position of every token in the longer row
        inside = torch.arange(W, device=x.device)
        starts = (bounds[:-1] + torch.arange(n, device=x.device) * W).unsqueeze(1) + inside
        row = x.new_zeros(T + n * W, D).index_copy(0, place, x[0])
        row = row.index_copy(0, starts.flatten(), window.reshape(n * W, D)).unsqueeze(0)
        found = self._convolve(row, self.init_window(1, x))
        ends = (bounds[1:] + torch.arange(n, device=x.device) * W).unsqueeze(1) + inside
        return found[:, place], row[0, ends]


class Windows(NamedTuple):
    """The distinct windows of a batch, ``[U, K]`` int, and which one ends where, ``[B, T]``."""

    windows: Tensor
    ids: Tensor


def distinct_windows(ids: Tensor, V: int, K: int) -> Windows | None:
    """The distinct sequences of K tokens, the last of which may be any token of ``ids``.

    V stands for what is before the first token. None if finding them does not pay: most positions
    have windows of their own, which is the rule in text, or the tokens are not on a CPU.
    """
    # Comparing windows looks at values, which would stall a device and end a compiled graph.
    if ids.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    if (V + 1) ** K >= 2**63 or ids.numel() == 0:
        return None
    padded = nn.functional.pad(ids.long(), (K - 1, 0), value=V).unfold(1, K, 1)  # [B, T, K]
    place = (V + 1) ** torch.arange(K - 1, -1, -1)
    codes, found = torch.unique((padded * place).sum(-1), return_inverse=True)
    if 4 * len(codes) > ids.numel():
        return None
    return Windows(codes.unsqueeze(1) // place % (V + 1), found)


def _last(window: Tensor, x: Tensor) -> Tensor:
    """The last K - 1 tokens of window and x, as a new tensor."""
    W, T = window.shape[1], x.shape[1]
    if torch.compiler.is_compiling():  # one program for every T, short or long
        return torch.cat([window, x], 1)[:, T:]
    return torch.cat([window[:, min(T, W) :], x[:, max(T - W, 0) :]], 1)


def _plain_conv(x: Tensor, window: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The convolution for compilers, which fuse and differentiate the taps themselves."""
    dtype, T = at_least_float32(x.dtype), x.shape[1]
    row, w = torch.cat([window, x], 1).to(dtype), weight.to(dtype)
    taps = [row[:, j : j + T] * w[j] for j in range(weight.shape[0])]
    return (bias.to(dtype) + sum(taps)).to(x.dtype)


class _CausalConv(torch.autograd.Function):
    """The convolution and its exact gradient, both as shifted multiply-adds in place.

    With autograd every tap would allocate and save a full-size tensor. On a CPU one
    native pass replaces one pass per tap, because long sequences do not fit into a cache.
    """

    @staticmethod
    def forward(x: Tensor, window: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if can_convolve(x, window, weight, bias):
            return conv_forward(*(z.float() for z in (x, window, weight, bias))).to(x.dtype)
        dtype, T, K = at_least_float32(x.dtype), x.shape[1], weight.shape[0]
        w = weight.to(dtype)
        y = torch.addcmul(bias.to(dtype), x.to(dtype), w[K - 1])  # the tap of the token itself
        for back in range(1, K):  # tokens ``back`` steps earlier: in x, or in the window
            tap, n = w[K - 1 - back], min(back, T)
            y[:, back:].addcmul_(x[:, : T - n], tap)
            y[:, :n].addcmul_(window[:, K - 1 - back : K - 1 - back + n], tap)
        return y.to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:3])
        ctx.bias_dtype = inputs[3].dtype

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        x, window, weight = ctx.saved_tensors
        if not torch.is_grad_enabled() and can_convolve(dy, x, window, weight):
            found = conv_backward(*(z.float() for z in (dy, x, window, weight)))
            dtypes = (x.dtype, window.dtype, weight.dtype, ctx.bias_dtype)
            return tuple(d.to(dtype) for d, dtype in zip(found, dtypes, strict=True))
        dtype, T, K = at_least_float32(x.dtype), x.shape[1], weight.shape[0]
        w, dy = weight.to(dtype), dy.to(dtype)
        dx = dy * w[K - 1]
        dwindow = torch.zeros_like(window, dtype=dtype)
        taps = [(dy * x).sum((0, 1))]
        for back in range(1, K):
            tap, n = w[K - 1 - back], min(back, T)
            seen = slice(K - 1 - back, K - 1 - back + n)
            dx[:, : T - n].addcmul_(dy[:, back:], tap)
            dwindow[:, seen].addcmul_(dy[:, :n], tap)
            inner = (dy[:, back:] * x[:, : T - n]).sum((0, 1))
            taps.append(inner + (dy[:, :n] * window[:, seen]).sum((0, 1)))
        dweight = torch.stack(taps[::-1]).to(weight.dtype)
        dbias = dy.sum((0, 1)).to(ctx.bias_dtype)
        return dx.to(x.dtype), dwindow.to(window.dtype), dweight, dbias
