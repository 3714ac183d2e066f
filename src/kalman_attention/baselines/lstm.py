"""The LSTM (Hochreiter and Schmidhuber, 1997) as a mixer: the upper bound in state tracking.

::

    i, f, o = sigmoid(W x + U h)      c' = f c + i tanh(W x + U h)      h' = o tanh(c')

Its state passes through a nonlinearity at every token. That is why it can count and permute, and
why no scan can compute it: time is sequential.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from kalman_attention._typing import Mask
from kalman_attention.baselines.common import MatrixMixer
from kalman_attention.nn.float32 import KeepsFloat32, at_least_float32, parameter_dtype, widened
from kalman_attention.nn.mixer import from_table, kept


@dataclass(frozen=True, kw_only=True)
class LSTMConfig:
    """Options of the LSTM mixer.

    Attributes:
        d_model: width of input and output.
        d_inner: hidden units; None means d_model.
        forget_bias: initial bias of the forget gate; 1 makes it remember initially.
    """

    d_model: int
    d_inner: int | None = None
    forget_bias: float = 1.0

    def __post_init__(self) -> None:
        for name in ("d_model", "d_inner"):
            given = getattr(self, name)
            if given is not None and given < 1:
                raise ValueError(f"{name} must be at least 1, got {given}.")

    @property
    def width(self) -> int:
        """Hidden units."""
        return self.d_model if self.d_inner is None else self.d_inner


class LSTMState(NamedTuple):
    """The recurrent state of the layer.

    Attributes:
        hidden: the output h of the last token, ``[R, D]``, at least float32.
        cell: the memory c, ``[R, D]``, at least float32.
    """

    hidden: Tensor
    cell: Tensor


class Recurrence(KeepsFloat32, nn.LSTM):
    """torch's LSTM with one layer and an initial forget bias, at least float32.

    Args:
        config: options of the mixer.
    """

    def __init__(self, config: LSTMConfig) -> None:
        self.config = config
        super().__init__(config.d_model, config.width, batch_first=True, dtype=parameter_dtype())

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Like ``nn.LSTM``, but with biases of 0, and of ``forget_bias`` for the forget gate."""
        super().reset_parameters()
        first, second = (getattr(self, name) for name in ("bias_ih_l0", "bias_hh_l0"))
        if first.is_meta:
            return  # nothing to initialise, and torch would import its compiler for it
        first.zero_()
        second.zero_()
        # torch's order is input, forget, cell, output.
        first[self.config.width : 2 * self.config.width] = self.config.forget_bias


class LSTM(MatrixMixer):
    """An LSTM with an output projection, with the interface of ``nn.KLA``.

    Args:
        config: options.
        **fields: the same options by name, as in ``LSTM(d_model=64)``.
    """

    options: ClassVar[type[Any]] = LSTMConfig
    config: LSTMConfig

    def __init__(self, config: LSTMConfig | None = None, **fields: Any) -> None:
        super().__init__(config, **fields)
        self.recurrence = Recurrence(self.config)
        self.out_proj = nn.Linear(self.config.width, self.config.d_model, bias=False)

    def init_state(
        self, batch_size: int, *, capacity: int = 0, like: Tensor | None = None
    ) -> LSTMState:
        """Zeros; the size does not depend on ``capacity``."""
        like = self._like(like)
        zeros = like.new_zeros(batch_size, self.config.width, dtype=at_least_float32(like.dtype))
        return LSTMState(zeros, torch.zeros_like(zeros))

    def _mix(
        self,
        x: Tensor,
        state: LSTMState,
        mask: Mask | None,
        *,
        parallel: bool,
        ids: Tensor | None = None,
        keep: Mask | None = None,
    ) -> tuple[Tensor, LSTMState]:
        dtype, rows = x.dtype, []
        x, *widest = widened(from_table(x, ids), *state)
        state = LSTMState(*widest)
        if x.shape[1] == 0:
            nothing = x.new_zeros(len(x), 0, self.config.width, dtype=dtype)
            return self.out_proj(kept(nothing, keep)), state
        if mask is None:
            h, state = self._run(x, state)
            return self.out_proj(kept(h.to(dtype), keep)), state
        # torch's LSTM knows no mask: with padding, take single steps and keep the old state there.
        for t in range(x.shape[1]):
            h, after = self._run(x[:, t : t + 1], state)
            real = mask[:, t].unsqueeze(-1)
            pairs = zip(after, state, strict=True)
            state = LSTMState(*(torch.where(real, new, old) for new, old in pairs))
            rows.append(h)
        return self.out_proj(torch.cat(rows, 1).to(dtype)), state

    def _run(self, x: Tensor, state: LSTMState) -> tuple[Tensor, LSTMState]:
        with torch.autocast(x.device.type, enabled=False):
            h, last = self.recurrence(x, tuple(z.unsqueeze(0).contiguous() for z in state))
        return h, LSTMState(*(z.squeeze(0) for z in last))
