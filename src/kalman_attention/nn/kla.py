"""The KLA layer (``fig:block_arch``, App. ``app:architecture``): Kalman filtering as a mixer.

::

    x -> in_proj -> stream, gate          [B, T, D] each
    u = SiLU(conv(stream))                causal, kernel 4
    u -> value, precision, key, query     what it observes, and what it reads
    u -> step                             how much time it takes, if tokens choose (step_rank)
    u -> reflections                      how it rotates the latent (num_reflections)
    dt -> turns                           how time rotates the latent (frequencies)
    y = kla_scan(...)                     posterior mean (and variance) of the read-out
    out_proj((y + skip u) SiLU(gate))     -> [B, T, d_model]

``read`` is everything up to the posterior, ``write`` everything after it; a posterior sample can
be put in between, which is how the marginal likelihood (KLA+) is estimated.
"""

from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from kalman_attention._typing import Mask, Values
from kalman_attention.filtering.moment import KLAState
from kalman_attention.nn.config import KLAConfig
from kalman_attention.nn.decoding import decode_token, project
from kalman_attention.nn.float32 import at_least_float32
from kalman_attention.nn.links import inverse_precision, value_precision
from kalman_attention.nn.mixer import (
    Bias,
    Context,
    LayerOutput,
    Mixer,
    Skip,
    from_table,
    kept,
    kept_rows,
)
from kalman_attention.nn.norms import RMSNorm, l2_norm
from kalman_attention.nn.prior import LatentPrior, TimeTurns, TokenSteps
from kalman_attention.nn.readout import Evidence, Readout
from kalman_attention.nn.short_conv import Convolved, ShortConv
from kalman_attention.ops.contract import ScanOutput
from kalman_attention.ops.frames import into_frames, turn_belief
from kalman_attention.ops.kla_scan import kla_scan, kla_step
from kalman_attention.ops.smooth import kla_smooth


class LayerState(NamedTuple):
    """The recurrent state of a KLA layer.

    Attributes:
        conv: the last K - 1 inputs of the convolution, ``[R, K - 1, D]``; empty without one.
        belief: mean and variance of the latent, ``[R, N, D]`` each (a shared variance
            ``[R, G, D]``).
    """

    conv: Tensor
    belief: KLAState


class EvidenceLinear(nn.Linear):
    """A projection to evidence, whose bias can be initialised to a given precision.

    Args:
        in_features: width of the input.
        out_features: width of the output.
        config: options of the layer; ``evidence_bias`` determines whether there is a bias.
        precision: range of outputs (first, end) that the link turns into precisions.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        config: KLAConfig,
        precision: tuple[int, int] = (0, 0),
    ) -> None:
        self.config, self._precision = config, slice(*precision)
        super().__init__(in_features, out_features, bias=config.evidence_bias)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise like ``nn.Linear``, but precisions to ``initial_precision`` if it is set."""
        super().reset_parameters()
        wanted = self.config.initial_precision
        if self.bias is not None and wanted is not None and not self.bias.is_meta:
            link, floor = self.config.precision_link, self.config.precision_floor
            self.bias[self._precision] = inverse_precision(wanted, link, floor)


class KLA(Mixer):
    """Kalman linear attention, a drop-in sequence mixer.

    Args:
        config: options; ``KLAConfig(d_model=...)`` is the paper's block.
        **fields: the same by name, as in ``KLA(d_model=64, d_state=16)``.

    Attributes:
        context: set while sequences are split over processes (``parallel``); None otherwise.
    """

    options: ClassVar[type[Any]] = KLAConfig
    config: KLAConfig
    context: Context | None = None

    def __init__(self, config: KLAConfig | None = None, **fields: Any) -> None:
        super().__init__(config, **fields)
        config = self.config
        d_model, D, N = config.d_model, config.width, config.d_state
        value = D if config.value == "project" else 0
        precision = D if config.precision_rank is None else config.precision_rank
        turns = config.num_reflections * N
        self._split = [value, precision, config.step_rank or 0, 2 * N, turns]
        self.skip = None if config.skip is None else Skip(D, config.skip)
        self.in_proj = nn.Linear(d_model, 2 * D, bias=False)
        self.gate_bias = None if config.gate_bias is None else Bias(D, config.gate_bias)
        self.conv = None if config.conv_kernel is None else ShortConv(D, config.conv_kernel)
        # One product for everything that depends on the stream: the narrow key and query add little
        # to it.
        self.precision_up = None
        if config.precision_rank is None:
            self.evidence_proj = EvidenceLinear(D, sum(self._split), config, (value, value + D))
        else:
            self.evidence_proj = EvidenceLinear(D, sum(self._split), config)
            self.precision_up = EvidenceLinear(config.precision_rank, D, config, (0, D))
        self.prior = LatentPrior(config)
        self.step_up, self.steps = None, None
        if config.step_rank is not None:
            self.step_up = nn.Linear(config.step_rank, D, bias=False)
            self.steps = TokenSteps(config, self.prior.unit)
        self.turns = None if config.frequencies is None else TimeTurns(config)
        self.readout_norm = RMSNorm(D) if config.readout_norm else None
        self.out_proj = nn.Linear(D, d_model, bias=False)

    def init_state(
        self, batch_size: int, *, capacity: int = 0, like: Tensor | None = None
    ) -> LayerState:
        """State before the first token; its size does not depend on ``capacity``."""
        window = self._first_window(batch_size, self._like(like))
        return LayerState(window, self.prior(batch_size).belief)

    def forward(
        self,
        x: Tensor,
        mask: Mask | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        dt: Tensor | None = None,
        seen: Mask | None = None,
    ) -> Tensor:
        """Mix whole sequences; see ``Mixer``.

        Args:
            x: ``[B, T, d_model]``; T may be 0.
            mask: ``[B, T]`` bool, False for padding, which is ignored and returned as 0.
            cu_seqlens: document boundaries in one packed row (B = 1), ``[n + 1]`` int.
            dt: time that passes before each token, ``[B, T]``, at least 0, where 1 is the step
                that the layer takes without it; differences of time stamps, for example.
            seen: ``[B, T]`` bool, False for tokens that only read the state: time passes, but they
                bring no evidence. None means that all tokens bring evidence.

        Returns:
            ``[B, T, d_model]``.
        """
        return self.mix(x, None, mask, cu_seqlens, dt=dt, seen=seen).y

    def mix(
        self,
        x: Tensor,
        state: LayerState | None = None,
        mask: Mask | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        dt: Tensor | None = None,
        seen: Mask | None = None,
        return_variance: bool | Literal["output"] = False,
    ) -> LayerOutput:
        """Mix a piece of sequences, continuing from ``state`` or from the prior; see ``Mixer``.

        ``dt`` and ``seen`` as for ``forward``. ``return_variance="output"`` returns the variance of
        the output itself, ``[B, T, d_model]``, instead of that of the read-out; see
        ``write_variance``.
        """
        self._check(x, mask, cu_seqlens)
        options: dict[str, Any] = {"dt": dt, "seen": seen, "return_variance": bool(return_variance)}
        return self._through(self.read(x, state, mask, cu_seqlens, **options), return_variance)

    def step(
        self,
        x: Tensor,
        state: LayerState,
        *,
        mask: Mask | None = None,
        dt: Tensor | None = None,
        seen: Mask | None = None,
        return_variance: bool | Literal["output"] = False,
    ) -> LayerOutput:
        """One token ``[B, d_model]`` (others ``[B]``); equal to ``mix`` on sequences of one."""
        self._check(x, mask, axes=2)
        if dt is None and seen is None and not return_variance:
            found = self.decode(x, state, mask)
            if found is not None:
                return found
        options: dict[str, Any] = {"dt": dt, "seen": seen, "return_variance": bool(return_variance)}
        return self._through(self.read(x, state, mask, **options), return_variance)

    def decode(
        self, x: Tensor, state: LayerState, mask: Mask | None = None, norm: RMSNorm | None = None
    ) -> LayerOutput | None:
        """``step`` in one native call, or None if that is not possible.

        Args:
            x: ``[B, d_model]``.
            state: state of the previous call.
            mask: ``[B]`` bool, False where a row has no token.
            norm: a norm before the layer; y is then x + layer(norm(x)), the whole residual branch.
        """
        found = decode_token(self, x, state, mask, norm)
        if found is None:
            return None
        new = LayerState(found.window, KLAState(found.mean, found.variance))
        return LayerOutput(found.x, None, new)

    def read(
        self,
        x: Tensor,
        state: LayerState | None = None,
        mask: Mask | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        dt: Tensor | None = None,
        seen: Mask | None = None,
        return_variance: bool = False,
        ids: Tensor | None = None,
        keep: Mask | None = None,
    ) -> Readout:
        """Everything up to the posterior of the read-out; arguments as for ``mix``.

        Also accepts one token ``[B, d_model]``, with mask ``[B]`` and a state, which is faster than
        a sequence of one, because the discretised dynamics are cached. With ``ids``, ``[B, T]``
        int, x is a table ``[V, d_model]`` of which they name the rows: what repeats is computed
        once, not token by token. With ``keep``, ``[B, T]`` bool, the read-out and its context are
        ``[1, n, ...]``, those of the n chosen positions.
        """
        if mask is not None:
            x = x.masked_fill(~mask.unsqueeze(-1), 0.0)  # padding may hold anything, even NaN
        if self.config.smooth and (state is not None or (x.dim() == 2 and ids is None)):
            raise ValueError(
                "a layer that smooths reads every token given those after it: it takes whole "
                "sequences, without a state. smooth=False goes on from a state."
            )
        window, belief = (None, None) if state is None else state
        projected = project(self.in_proj, x)  # stream and gate
        u, projected, ids, window = self._convolve(projected, ids, window, mask, cu_seqlens)
        u, gate = nn.functional.silu(u), projected[..., self.config.width :]
        if self.gate_bias is not None:
            gate = self.gate_bias(gate)
        evidence = self._evidence_at(u, ids, dt)
        if seen is not None:
            if seen.dtype != torch.bool or seen.shape != evidence.v.shape[:-1]:
                raise ValueError(
                    f"seen is {seen.dtype} {list(seen.shape)} but must be bool "
                    f"{list(evidence.v.shape[:-1])}: True for tokens that bring evidence."
                )
            evidence = evidence._replace(lam_v=evidence.lam_v * seen.unsqueeze(-1))
        filtered = self._step if evidence.v.dim() == 2 else self._scan
        y, y_var, belief = filtered(evidence, belief, mask, cu_seqlens, return_variance)
        y, y_var = kept(y, keep), None if y_var is None else kept(y_var, keep)
        context = tuple(kept_rows(z, ids, keep) for z in (u, gate))
        evidence = evidence.map(lambda z: kept(z, keep))
        return Readout(y, y_var, context, evidence, LayerState(window, belief))

    def _evidence_at(self, u: Tensor, ids: Tensor | None, dt: Tensor | None) -> Evidence:
        """The evidence of every position; u may be a table of which ``ids`` name the rows."""
        if dt is not None or self.turns is not None:  # which belong to positions, not to rows
            u, ids = from_table(u, ids), None
        return self.evidence(u, dt).map(lambda z: from_table(z, ids))

    def evidence(self, u: Tensor, dt: Tensor | None = None) -> Evidence:
        """Value, precision, key, query, step and reflections from the convolved stream.

        Args:
            u: the stream, ``[..., D]``.
            dt: time before every token, ``[...]``; step sizes that tokens choose are multiplied by
                it.
        """
        config = self.config
        parts = torch.split(project(self.evidence_proj, u), self._split, -1)
        value, raw, step, key_query, turn = parts
        if self.precision_up is not None:
            raw = project(self.precision_up, raw)
        lam_v = value_precision(raw, config.precision_link, config.precision_floor)
        key_query = torch.unflatten(key_query, -1, (2, config.d_state))  # [..., 2, N]
        if config.qk_norm:
            key_query = l2_norm(key_query)
        k, q = key_query.unbind(-2)
        u_h = self._turns(turn, dt)
        if self.step_up is not None and self.steps is not None:
            chosen = self.steps(project(self.step_up, step))
            dt = chosen if dt is None else chosen * dt.unsqueeze(-1)
        return Evidence(q, k, u if config.value == "stream" else value, lam_v, dt, u_h)

    def _turns(self, turn: Tensor, dt: Tensor | None) -> Tensor | None:
        """Reflections ``[..., n_h, G, m]`` before every token: by time, then by the token."""
        config, found = self.config, []
        if self.turns is not None:
            found.append(self.turns(turn.new_ones(turn.shape[:-1]) if dt is None else dt))
        if config.num_reflections:
            shape = (config.num_reflections, config.blocks, config.shared_slots)
            found.append(torch.unflatten(turn, -1, shape))
        if len(found) < 2:
            return found[0] if found else None
        by_time, by_token = found
        return torch.cat([by_time, by_token.to(by_time.dtype)], -3)

    def write(self, latent: Values, stream: Tensor, gate: Tensor) -> Tensor:
        """From a read-out to the layer's output: norm, skip, gate, output projection.

        Args:
            latent: the posterior mean, or samples, ``[..., T, D]``; leading axes broadcast.
            stream: first of ``Readout.context``, the convolved stream u, ``[B, T, D]``.
            gate: second of ``Readout.context``, before its SiLU, ``[B, T, D]``.

        Returns:
            ``[..., T, d_model]``.
        """
        if self.readout_norm is not None:
            latent = self.readout_norm(latent)
        if self.skip is not None:
            latent = self.skip(latent, stream)
        return project(self.out_proj, latent * nn.functional.silu(gate))

    def write_variance(self, variance: Values, stream: Tensor, gate: Tensor) -> Tensor:
        r"""Variance of the layer's output from that of the read-out: exact, ``write`` is linear.

        .. math:: \mathrm{Var}[o_i] = \sum_d W_{id}^2\,\mathrm{silu}(g_d)^2\,\mathrm{Var}[y_d]

        The channels of a read-out are independent given the tokens; those of the output are not,
        and this is the diagonal of their covariance. Stream and gate are known, so the skip adds
        nothing.

        Args:
            variance: of the read-out, ``[..., T, D]``.
            stream: first of ``Readout.context``.
            gate: second of ``Readout.context``, before its SiLU, ``[..., T, D]``.

        Returns:
            ``[..., T, d_model]``.
        """
        if self.readout_norm is not None:
            raise ValueError(
                "a layer with readout_norm is not linear in its read-out: the variance of its "
                "output has no closed form. Write samples instead."
            )
        known = nn.functional.silu(gate.to(variance.dtype))
        # Through the module, as everywhere: the weight itself may be sharded or quantised.
        eye = torch.eye(self.config.width, dtype=stream.dtype, device=stream.device)
        weight = project(self.out_proj, eye).to(variance.dtype)  # [D, d_model]
        return (variance * known.square()) @ weight.square()

    def _first_window(self, rows: int, like: Tensor) -> Tensor:
        if self.conv is None:
            return like.new_zeros(rows, 0, self.config.width)
        return self.conv.init_window(rows, like)

    def _convolve(
        self,
        x: Tensor,
        ids: Tensor | None,
        window: Tensor | None,
        mask: Mask | None,
        cu_seqlens: Tensor | None,
    ) -> Convolved:
        """The stream, the first D channels of x, after the convolution, if there is one."""
        rows = (x if ids is None else ids).shape[0]  # not len, which an export would freeze
        if cu_seqlens is not None:
            rows = len(cu_seqlens) - 1
        if self.conv is None:
            window = self._first_window(rows, x) if window is None else window
            return Convolved(x[..., : self.config.width], x, ids, window)
        if self.context is not None:
            x, ids = from_table(x, ids), None
            window = self._first_window(rows, x) if window is None else window
            stream = x[..., : self.config.width]
            window = self.context.window(stream, window, mask, cu_seqlens)
        return self.conv.along(x, ids, window, mask, cu_seqlens)

    def _scan(
        self,
        evidence: Evidence,
        belief: KLAState | None,
        mask: Mask | None,
        cu_seqlens: Tensor | None,
        return_variance: bool,
    ) -> ScanOutput:
        rows = evidence.v.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
        a_bar, p_bar, first = self.prior(rows if belief is None else 0)
        if belief is None and self.config.prior != "unit":  # which is the op's own
            belief = first
        options: dict[str, Any] = {"engine": self.config.engine or "auto"}
        if self.config.smooth:
            if self.context is not None:
                raise ValueError("a layer that smooths cannot share a sequence with other ranks.")
            scan: Callable[..., ScanOutput] = kla_smooth
        else:
            scan = kla_scan if self.context is None else self.context.scan
            options["return_variance"] = return_variance
        q, k, turned = evidence.q, evidence.k, None
        if evidence.u_h is not None:
            turned = into_frames(q, k, evidence.u_h, mask=mask, cu_seqlens=cu_seqlens)
            turned = turned if self.context is None else self.context.frames(turned)
            q, k = turned.q, turned.k
        found = scan(
            *(q, k, evidence.v, evidence.lam_v),
            _match(a_bar, evidence.v),
            _match(p_bar, evidence.v),
            dt=evidence.dt,
            state=None if belief is None else KLAState(*(_match(z, evidence.v) for z in belief)),
            mask=mask,
            cu_seqlens=cu_seqlens,
            **options,
        )
        # The returned belief is about the latent itself, because the next call starts a new frame.
        return found if turned is None else found._replace(state=turned.out_of_frame(found.state))

    def _step(
        self,
        evidence: Evidence,
        belief: KLAState | None,
        mask: Mask | None,
        cu_seqlens: Tensor | None,
        return_variance: bool,
    ) -> ScanOutput:
        if belief is None:
            raise ValueError(
                "one token [B, d_model] needs a state: pass the one of the previous call, or "
                "init_state(batch_size). A sequence has a time axis: [B, T, d_model]."
            )
        a_bar, p_bar, _ = self.prior.cached()
        belief = KLAState(*(_match(z, evidence.v) for z in belief))
        if evidence.u_h is not None:
            belief = turn_belief(belief, evidence.u_h, mask)
        return kla_step(
            *evidence[:4],
            _match(a_bar, evidence.v),
            _match(p_bar, evidence.v),
            belief,
            dt=evidence.dt,
            mask=mask,
            return_variance=return_variance,
            engine=self.config.engine or "auto",
        )

    def _through(self, found: Readout, of: bool | Literal["output"]) -> LayerOutput:
        variance = found.variance
        if of == "output":
            assert variance is not None
            variance = self.write_variance(variance, *found.context)
        return LayerOutput(self.write(found.mean, *found.context), variance, found.state)

    def extra_repr(self) -> str:
        """The options that shape the filter."""
        names = "shared_slots num_reflections frequencies value precision_rank step_rank"
        names += " process_noise prior smooth"
        return ", ".join(f"{name}={getattr(self.config, name)}" for name in names.split())


def _match(x: Tensor, tokens: Tensor) -> Tensor:
    """Convert to float32, or to float64 if the tokens are float64."""
    return x.to(at_least_float32(tokens.dtype))
