r"""Mamba (S6): a selective state space as a mixer (``eq:mamba-rec``).

::

    x -> in_proj -> stream, gate          [B, T, D] each
    u = SiLU(conv(stream))                causal, kernel 4
    u -> low, B, C                        dt_rank, N and N numbers per token
    dt = softplus(dt_proj(low) + raw_dt)  [B, T, D]
    h' = exp(dt A) h + dt B u             A = -exp(log_A), [N, D]
    y  = sum_n C h'
    out_proj((y + skip u) SiLU(gate))     -> [B, T, d_model]

Published initialisation: A = -(1..N) in every channel, skip 1, softplus(raw_dt) log-uniform in
[dt_min, dt_max], dt_proj uniform within dt_rank^-0.5. Each module initialises its own parameters,
and nothing overwrites them: with a step-size bias of 0 the initial memory would be about a hundred
times shorter.

Where the package ``mamba_ssm`` is installed and can serve a call, its CUDA kernel runs instead of
``linear_scan``: whole sequences from an empty state, without padding or packing, not in float64.
That path is written from the documentation of the package and has never run on a GPU.
"""

import functools
import importlib.util
import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from kalman_attention._typing import Belief, Dynamics, Keys, Mask, Values
from kalman_attention.nn.decoding import project
from kalman_attention.nn.float32 import KeepsFloat32, at_least_float32, empty_parameter
from kalman_attention.nn.links import inverse_softplus, log_uniform, softplus
from kalman_attention.nn.mixer import LayerOutput, Mixer, Skip, from_table, kept, kept_rows
from kalman_attention.nn.norms import RMSNorm
from kalman_attention.nn.short_conv import ShortConv
from kalman_attention.ops.linear_scan import LinearScanOutput, linear_scan


@dataclass(frozen=True, kw_only=True)
class MambaConfig:
    """Options of the Mamba mixer. The defaults are the published ones.

    Attributes:
        d_model: width of input and output.
        d_state: memory slots per channel.
        expand: channels of the scan as a multiple of d_model (the paper's MAD table uses 1).
        conv_kernel: taps of the causal convolution, which has a bias.
        dt_rank: rank of the step-size projection; None means d_model / 16, rounded up.
        dt_min: smallest initial step size; initial values are log-uniform.
        dt_max: largest initial step size.
        dt_floor: lower bound of initial step sizes.
        readout_norm: divide the output of the scan by its root mean square over the channels,
            before skip and gate; not in the published block.
    """

    d_model: int
    d_state: int = 16
    expand: float = 2
    conv_kernel: int = 4
    dt_rank: int | None = None
    dt_min: float = 1e-3
    dt_max: float = 1e-1
    dt_floor: float = 1e-4
    readout_norm: bool = False

    def __post_init__(self) -> None:
        for name in ("d_model", "d_state", "conv_kernel", "dt_rank"):
            given = getattr(self, name)
            if given is not None and given < 1:
                raise ValueError(f"{name} must be at least 1, got {given}.")
        if self.width < 1 or self.width != self.expand * self.d_model:
            raise ValueError(
                f"expand = {self.expand} times d_model = {self.d_model} must be a whole number of "
                "channels, at least 1. Choose another expand."
            )
        if not 0.0 < self.dt_min <= self.dt_max:
            raise ValueError(f"0 < dt_min <= dt_max must hold, got {self.dt_min}, {self.dt_max}.")

    @property
    def width(self) -> int:
        """Channels of the scan."""
        return int(self.expand * self.d_model)

    @property
    def rank(self) -> int:
        """Rank of the step-size projection."""
        return math.ceil(self.d_model / 16) if self.dt_rank is None else self.dt_rank


class MambaState(NamedTuple):
    """The recurrent state of a Mamba layer.

    Attributes:
        conv: the last K - 1 inputs of the convolution, ``[R, K - 1, D]``.
        hidden: the state of the scan, ``[R, N, D]``, float32 or float64.
    """

    conv: Tensor
    hidden: Belief


class SelectiveInputs(NamedTuple):
    """The token inputs of the scan: u and dt ``[B, T, D]``, B and C ``[B, T, N]``."""

    u: Values
    dt: Values
    B: Keys
    C: Keys


class SelectiveDynamics(KeepsFloat32):
    """Decay rates and step-size bias: log_A ``[N, D]`` and raw_dt ``[D]``, always float32.

    Args:
        config: options of the layer.
    """

    parameter_group: ClassVar[str] = "state_space"

    def __init__(self, config: MambaConfig) -> None:
        super().__init__()
        self.config = config
        self.log_A = empty_parameter(config.d_state, config.width)
        self.raw_dt = empty_parameter(config.width)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise rates to 1 ... N, step sizes log-uniformly."""
        if self.log_A.is_meta:
            return  # nothing to initialise, and torch would import its compiler for it
        config, like = self.config, self.log_A
        rates = torch.arange(1, config.d_state + 1, dtype=like.dtype, device=like.device)
        self.log_A.copy_(rates.log().unsqueeze(1).expand_as(like))
        dt = log_uniform((config.width,), config.dt_min, config.dt_max, like.dtype)
        self.raw_dt.copy_(inverse_softplus(dt.clamp(min=config.dt_floor)))

    def forward(self, projected: Tensor) -> tuple[Values, Dynamics]:
        """Step sizes from their projection ``[..., D]``, and A; float64 where the tokens are."""
        dtype = at_least_float32(projected.dtype)
        return softplus(projected, self.raw_dt), -torch.exp(self.log_A.to(dtype))


class Mamba(Mixer):
    """Mamba's selective state space, with the interface of ``nn.KLA``.

    Args:
        config: options; ``MambaConfig(d_model=...)`` is the published block.
        **fields: the same options by name, as in ``Mamba(d_model=64)``.
    """

    options: ClassVar[type[Any]] = MambaConfig
    picks = True
    config: MambaConfig

    def __init__(self, config: MambaConfig | None = None, **fields: Any) -> None:
        super().__init__(config, **fields)
        config = self.config
        d_model, D = config.d_model, config.width
        self._split = [config.rank, config.d_state, config.d_state]
        self.skip = Skip(D)
        self.in_proj = nn.Linear(d_model, 2 * D, bias=False)
        self.conv = ShortConv(D, config.conv_kernel)
        self.select_proj = nn.Linear(D, sum(self._split), bias=False)
        # nn.Linear's default, uniform within fan_in^-0.5, is the published one for this matrix.
        self.dt_proj = nn.Linear(config.rank, D, bias=False)
        self.state_space = SelectiveDynamics(config)
        self.readout_norm = RMSNorm(D) if config.readout_norm else None
        self.out_proj = nn.Linear(D, d_model, bias=False)

    def init_state(
        self, batch_size: int, *, capacity: int = 0, like: Tensor | None = None
    ) -> MambaState:
        """State before the first token; its size does not depend on ``capacity``."""
        like, c = self._like(like), self.config
        shape, dtype = (batch_size, c.d_state, c.width), at_least_float32(like.dtype)
        window = self.conv.init_window(batch_size, like)
        return MambaState(window, like.new_zeros(shape, dtype=dtype))

    def mix(
        self,
        x: Tensor,
        state: MambaState | None = None,
        mask: Mask | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        return_variance: bool = False,
        ids: Tensor | None = None,
        keep: Mask | None = None,
    ) -> LayerOutput:
        """Mix a piece of sequences, continuing from ``state``; see ``Mixer``. No variance.

        ``ids`` and ``keep`` as in ``Block.forward``: x is a table, and only some outputs are
        needed.
        """
        if ids is None:
            self._check(x, mask, cu_seqlens)
        if mask is not None:
            x = x.masked_fill(~mask.unsqueeze(-1), 0.0)  # padding may hold anything, even NaN
        window, hidden = (None, None) if state is None else state
        found = self.conv.along(project(self.in_proj, x), ids, window, mask, cu_seqlens)
        u, gate = nn.functional.silu(found.u), found.x[..., self.config.width :]
        inputs, A = self.select(u)
        inputs = SelectiveInputs(*(from_table(z, found.ids) for z in inputs))
        # The published kernel supports neither padding nor packing nor an initial state.
        if mask is None and cu_seqlens is None and hidden is None and kernel_serves(inputs.u):
            y, hidden = kernel_scan(*inputs, A)
        else:
            y, hidden = self._scan(inputs, A, hidden, mask, cu_seqlens)
        parts = (kept_rows(z, found.ids, keep) for z in (u, gate))
        return LayerOutput(
            self.write(kept(y, keep), *parts), None, MambaState(found.window, hidden)
        )

    def step(
        self,
        x: Tensor,
        state: MambaState,
        *,
        mask: Mask | None = None,
        return_variance: bool = False,
    ) -> LayerOutput:
        """One token ``[B, d_model]`` (mask ``[B]``); equal to ``mix`` on sequences of one."""
        self._check(x, mask, axes=2)
        if mask is not None:
            x = x.masked_fill(~mask.unsqueeze(-1), 0.0)
        stream, gate = project(self.in_proj, x).chunk(2, -1)  # [B, D] each
        u, window = self.conv(stream, state.conv, mask)
        inputs, A = self.select(nn.functional.silu(u).unsqueeze(1))
        now = None if mask is None else mask.unsqueeze(1)
        y, hidden = self._scan(inputs, A, state.hidden, now, None)
        y = self.write(y.squeeze(1), inputs.u.squeeze(1), gate)
        return LayerOutput(y, None, MambaState(window, hidden))

    def select(self, u: Values) -> tuple[SelectiveInputs, Dynamics]:
        """The input and read-out operators and step sizes of all tokens, and the decay rates A."""
        low, B, C = torch.split(project(self.select_proj, u), self._split, -1)
        dt, A = self.state_space(project(self.dt_proj, low))
        return SelectiveInputs(u, dt, B, C), A

    def write(self, y: Values, u: Values, gate: Tensor) -> Tensor:
        """From the scan's output to the layer's: norm, skip, gate, output projection."""
        if self.readout_norm is not None:
            y = self.readout_norm(y)
        return project(self.out_proj, self.skip(y, u) * nn.functional.silu(gate))

    def _scan(
        self,
        inputs: SelectiveInputs,
        A: Dynamics,
        hidden: Belief | None,
        mask: Mask | None,
        cu_seqlens: Tensor | None,
    ) -> LinearScanOutput:
        hidden = None if hidden is None else hidden.to(A.dtype)
        return linear_scan(
            *inputs[:2], A, *inputs[2:], state=hidden, mask=mask, cu_seqlens=cu_seqlens
        )


def kernel_serves(u: Values) -> bool:
    """Whether the kernel of ``mamba_ssm`` can process a sequence ``[B, T, D]``."""
    return u.is_cuda and u.shape[1] > 0 and u.dtype != torch.float64 and _installed()


def kernel_scan(u: Values, dt: Values, B: Keys, C: Keys, A: Dynamics) -> LinearScanOutput:
    """``linear_scan`` from an empty state, by the kernel of ``mamba_ssm``.

    The kernel has no gradient for the final state, which is returned detached.

    Args:
        u: inputs, ``[B, T, D]``.
        dt: step sizes, ``[B, T, D]``.
        B: input operators, ``[B, T, N]``.
        C: read-out operators, ``[B, T, N]``.
        A: decay rates, ``[N, D]``.
    """
    along_time = [x.transpose(1, 2).contiguous() for x in (u, dt.to(u.dtype), B, C)]
    x, steps, inputs, outputs = along_time  # [B, D, T] twice, [B, N, T] twice
    y, last = _kernel()(x, steps, A.T.contiguous(), inputs, outputs, return_last_state=True)
    return LinearScanOutput(y.transpose(1, 2), last.detach().transpose(1, 2))


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("mamba_ssm") is not None


def _kernel() -> Any:
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    return selective_scan_fn
