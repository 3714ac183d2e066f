r"""Engine ``matrix``: matrix products for slots that share a precision, on any device.

A block of slots has one variance, so its retention r_t and its gate c_t = a r_t are scalars per
channel, and its mean follows a linear recurrence with one gate for all of its slots:

.. math:: \mu_t = c_t\,\mu_{t-1} + k_t w_t, \qquad w_t = s_t \Lambda^v_t v_t.

Only the variance has to be scanned, for the gates. Then divide time into spans. What the tokens of
a span write is one product over its tokens, what its queries read from the mean before it is
another, and inside a span a query meets a key only through the scalar q_t . k_s, for any number of
slots:

.. math:: F_{t+1}(u) = c_t F_t(u) + (q_u \cdot k_t)\,w_t, \qquad F_t(u) = q_u \cdot \mu_{t-1},
          \qquad y_t = F_{t+1}(t).

Gates are multiplied and never divided by, so nothing overflows however strong the evidence is. The
gradient needs two inner products over slots at every token, <k_t, dmu_t> and <mu_{t-1}, dmu_t>.
Both follow from F and its mirror image in the gradients of y, and the only means that are stored
are those between spans.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kalman_attention.filtering.blocks import from_blocks
from kalman_attention.filtering.gaps import transition_adjoint
from kalman_attention.filtering.maps import Affine
from kalman_attention.filtering.moment import KLAState
from kalman_attention.ops.contract import CHUNK, ScanGrads, ScanInputs, ScanResult
from kalman_attention.ops.torch.prefix_scan import prefix_scan
from kalman_attention.ops.torch.rows import Rows, end_gradients, to_rows
from kalman_attention.ops.torch.segments import chunk_filters, chunk_starts, replay

# Per token and channel a span takes SPAN products inside and m, the slots of a block, outside. 16
# is of the order of m where ``auto`` picks this engine, and divides CHUNK.
SPAN = 16
"""Tokens of a span."""


def forward(inputs: ScanInputs, *, return_variance: bool, save: bool) -> ScanResult:
    """Scan the variances, carry the means from span to span, read out every span."""
    rows, dtype = to_rows(inputs), inputs.compute_dtype
    # Variances first, as if every block had one slot; then the means, given the gates.
    narrow = _narrow(rows)
    starts = chunk_starts(chunk_filters(narrow), narrow.state_0)
    path = _path(narrow, starts)
    spans = Spans.of(rows, path)
    before, last = spans.carry(rows.state_0.mean)
    y = _to_rows(spans.read(before)[0])
    y_var = torch.einsum("rctgm,rctgd->rctd", rows.q * rows.q, path.s) if return_variance else None
    chunks = before[:, :: CHUNK // SPAN]
    variance = path.s[:, -1, -1].unsqueeze(-2) if y.shape[1] else rows.state_0.variance
    end = from_blocks(KLAState(last, variance))
    return ScanResult(
        y=rows.layout.scatter(y.sum(-2), inputs.v),
        y_var=None if y_var is None else rows.layout.scatter(y_var, inputs.v),
        mean=end.mean.to(dtype, copy=True),
        variance=end.variance.to(dtype, copy=True),
        checkpoints=rows.layout.save(KLAState(chunks, starts.variance), dtype) if save else None,
    )


def backward(
    inputs: ScanInputs,
    checkpoints: Tensor,
    dy: Tensor | None,
    dy_var: Tensor | None,
    dmean: Tensor | None,
    dvariance: Tensor | None,
) -> ScanGrads:
    """Exact gradients: through the means span by span, then through the variances by a scan."""
    rows = to_rows(inputs)
    dtype = rows.v.dtype
    starts = rows.layout.load(checkpoints, dtype)
    path = _path(_narrow(rows), KLAState(torch.zeros_like(starts.variance), starts.variance))
    last = end_gradients(inputs, dmean, dvariance, dtype)
    seen = torch.zeros_like(rows.v) if dy is None else rows.layout.gather(dy, dtype)
    spread = None if dy_var is None else rows.layout.gather(dy_var, dtype)
    means = Spans.of(rows, path).pull_back(starts.mean, seen, last.mean)
    return _collect(inputs, rows, path, means, spread, last.variance)


class Path(NamedTuple):
    """The variances of all tokens and derived quantities, ``[R, C, CHUNK, G, D]``.

    Attributes:
        s: posterior variance.
        s_prev: variance before the token.
        a: decay of the step to the token, of a shape that broadcasts.
        r: retention.
        real: True at real tokens.
    """

    s: Tensor
    s_prev: Tensor
    a: Tensor
    r: Tensor
    real: Tensor


class Spans(NamedTuple):
    """Tokens in J spans of ``SPAN``: q, k ``[R, J, G, SPAN, m]``, gates and writes ``[..., D]``."""

    q: Tensor
    k: Tensor
    c: Tensor
    w: Tensor

    @classmethod
    def of(cls, rows: Rows, path: Path) -> "Spans":
        """Gates and writes along a path of variances."""
        c = torch.where(path.real, path.a * path.r, 1.0)  # padding keeps the mean as it is
        w = path.s * (rows.lam_v * rows.v).unsqueeze(-2)
        return cls(*(_to_spans(x) for x in (rows.q, rows.k, c, w)))

    @property
    def after(self) -> Tensor:
        """Product of the gates of all later tokens of the span."""
        # By a reversed cumulative product: dividing by a prefix product would overflow.
        later = torch.cat([self.c[..., 1:, :], torch.ones_like(self.c[..., :1, :])], -2)
        return later.flip(-2).cumprod(-2).flip(-2)

    @property
    def written(self) -> Affine:
        """The map that every span applies to the mean before it."""
        return Affine(self.c.prod(-2, keepdim=True), self.k.mT @ (self.after * self.w))

    def carry(self, mean_0: Tensor) -> tuple[Tensor, Tensor]:
        """Means before all spans, ``[R, J, G, m, D]``, and the last one."""
        first = mean_0.unsqueeze(1)
        if self.c.shape[1] == 0:
            return first[:, :0], mean_0
        ends = prefix_scan(Affine.compose, self.written).apply(first)
        return torch.cat([first, ends[:, :-1]], 1), ends[:, -1]

    def read(self, before: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The read-outs of every block, ``[R, J, G, SPAN, D]``.

        Args:
            before: means before the spans.

        Returns:
            Also F_t for every t: the read-outs of this and of later queries before token t writes.
        """
        # meets: q_u . k_t, [R, J, G, SPAN, SPAN]; asked: F_t(u) for the queries u >= t.
        meets, asked, found, y = self.q @ self.k.mT, self.q @ before, [], []
        for t in range(SPAN):
            found.append(asked)
            asked = self.c[..., t : t + 1, :] * asked
            asked = asked + meets[..., t:, t : t + 1] * self.w[..., t : t + 1, :]
            y.append(asked[..., 0, :])
            asked = asked[..., 1:, :]  # query t is done
        return torch.stack(y, -2), found

    def pull_back(self, chunks: Tensor, dy: Tensor, last: Tensor) -> "MeanGrads":
        """The gradients that pass through the means.

        Args:
            chunks: means before all chunks, ``[R, C, G, m, D]``.
            dy: gradient with respect to y, ``[R, C, CHUNK, D]``.
            last: gradient with respect to the final mean, ``[R, G, m, D]``.
        """
        dy = _to_spans(dy.unsqueeze(-2)).expand_as(self.c)  # the same for all blocks
        before = self._between(chunks)
        first, arriving = self._arriving(dy, last)
        inside = self._mirror(before, arriving, dy)
        # Inside a span through pairs of tokens, outside through the means at its two ends.
        dq = inside.pairs @ self.k + (self.c.cumprod(-2) * dy) @ before.mT
        dk = inside.pairs.mT @ self.q + (self.after * self.w) @ arriving.mT
        return MeanGrads(
            dq=_to_rows(dq),
            dk=_to_rows(dk),
            along_key=_to_rows(inside.along_key),
            along_mean=_to_rows(inside.along_mean),
            first=first,
        )

    def _mirror(self, before: Tensor, arriving: Tensor, dy: Tensor) -> "Inside":
        """Walk back through every span, with gradients of y in place of the values of ``read``."""
        _, found = self.read(before)
        key_end = self.k @ arriving  # <k_t, what arrives at the end of the span>
        held = [(before * arriving).sum(-2)]  # <mean before the token, what arrives at the end>
        for t in range(SPAN - 1):
            held.append(self.c[..., t, :] * held[-1] + self.w[..., t, :] * key_end[..., t, :])
        meets, after = self.q @ self.k.mT, self.after
        along_key, along_mean, pairs = [], [], []
        later = dy[..., :0, :]  # gradients of later y, times the gates up to there
        for t in reversed(range(SPAN)):
            later = torch.cat([dy[..., t : t + 1, :], later], -2)
            key = (meets[..., t:, t : t + 1] * later).sum(-2)
            along_key.append(key + after[..., t, :] * key_end[..., t, :])
            along_mean.append((found[t] * later).sum(-2) + after[..., t, :] * held[t])
            pairs.append(pad((later * self.w[..., t : t + 1, :]).sum(-1), (t, 0)))
            later = self.c[..., t : t + 1, :] * later
        return Inside(
            along_key=torch.stack(along_key[::-1], -2),
            along_mean=torch.stack(along_mean[::-1], -2),
            pairs=torch.stack(pairs[::-1], -1),
        )

    def _between(self, chunks: Tensor) -> Tensor:
        """Means before all spans, from those before the chunks."""
        per = CHUNK // SPAN
        maps = Affine(*(torch.unflatten(x, 1, (-1, per)) for x in self.written))
        means = [chunks]
        for i in range(per - 1):
            means.append(Affine(*(x[:, :, i] for x in maps)).apply(means[-1]))
        return torch.stack(means, 2).flatten(1, 2)

    def _arriving(self, dy: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient with respect to the initial mean, and those at the end of every span."""
        end = last.unsqueeze(1)
        if self.c.shape[1] == 0:
            return last, end[:, :0]
        total, _ = self.written
        added = self.q.mT @ (self.c.cumprod(-2) * dy)
        maps = Affine(total.flip(1), added.flip(1))
        before = prefix_scan(Affine.compose, maps).apply(end).flip(1)
        return before[:, 0], torch.cat([before[:, 1:], end], 1)


class Inside(NamedTuple):
    """Gradients inside spans: two inner products ``[R, J, G, SPAN, D]``, and pairs of tokens.

    Attributes:
        along_key: as in ``MeanGrads``.
        along_mean: as in ``MeanGrads``.
        pairs: gradient with respect to q_t . k_s, ``[R, J, G, SPAN, SPAN]``; 0 where s > t.
    """

    along_key: Tensor
    along_mean: Tensor
    pairs: Tensor


class MeanGrads(NamedTuple):
    """Gradients through the means: dq, dk ``[R, C, CHUNK, G, m]``, inner products ``[..., G, D]``.

    Attributes:
        dq: gradient with respect to the queries, through y.
        dk: gradient with respect to the keys, through what they write.
        along_key: <k, dmu> of every token, where dmu is the gradient of the mean after it.
        along_mean: <mean before the token, dmu>.
        first: gradient with respect to the initial mean, ``[R, G, m, D]``.
    """

    dq: Tensor
    dk: Tensor
    along_key: Tensor
    along_mean: Tensor
    first: Tensor


def _collect(
    inputs: ScanInputs,
    rows: Rows,
    path: Path,
    means: MeanGrads,
    dy_var: Tensor | None,
    last: Tensor,
) -> ScanGrads:
    """Gradients of all inputs, by the rules of ``reverse.py``, given their sums over slots."""
    s, s_prev, a, r, real = path
    v, lam_v = rows.v.unsqueeze(-2), rows.lam_v.unsqueeze(-2)
    k2, q2 = ((x * x).sum(-1, keepdim=True) for x in (rows.k, rows.q))
    # <k, dmu> and r <mean before, dmu>: all that the rules need of the slots.
    dk_mu, r_mu = means.along_key, torch.where(real, r * means.along_mean, 0.0)
    own = q2 * dy_var.unsqueeze(-2) if dy_var is not None else torch.zeros_like(s)
    surprise = lam_v * (v * (r * dk_mu) - k2 * (a * r_mu))  # r <e, dmu>
    arriving, first = _variance_adjoints(path, own, surprise, last)
    ds = torch.where(real, arriving + own, 0.0)
    dP = torch.where(real, r * (r * ds + surprise), 0.0)
    da, dp, ddt = r_mu + 2.0 * a * s_prev * dP, dP, None
    if rows.dt is not None:
        dynamics = rows.a_bar.squeeze(-2), rows.p_bar.squeeze(-2)
        da, dp, ddt = transition_adjoint(*dynamics, rows.dt, da, dp)
    s_ds = s * ds
    through_mean = a * r_mu + s * lam_v * v * dk_mu  # <mean after the token, dmu>
    dphi = -s * (s_ds + through_mean)
    dlam_v = s * (v * (r * dk_mu) - k2 * (a * r_mu) - k2 * s_ds)
    dk = means.dk + 2.0 * rows.k * (lam_v * dphi).sum(-1, keepdim=True)
    dq = means.dq
    if dy_var is not None:
        dq = dq + 2.0 * rows.q * (s * dy_var.unsqueeze(-2)).sum(-1, keepdim=True)
    back, dtype = rows.layout.scatter, inputs.compute_dtype
    start = from_blocks(KLAState(means.first, first))
    return ScanGrads(
        q=back((dq * real).flatten(-2), inputs.q),
        k=back(dk.flatten(-2), inputs.k),
        v=back(rows.lam_v * (s * dk_mu).sum(-2), inputs.v),
        lam_v=back(dlam_v.sum(-2), inputs.lam_v),
        a_bar=da.sum((0, 1, 2)).to(dtype),
        p_bar=dp.sum((0, 1, 2)).to(dtype),
        mean_0=start.mean.to(dtype, copy=True),
        variance_0=start.variance.to(dtype, copy=True),
        dt=None if ddt is None or inputs.dt is None else back(ddt, inputs.dt),
    )


def _variance_adjoints(
    path: Path, own: Tensor, surprise: Tensor, last: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the variance that arrive from later tokens, and of the initial variance.

    Args:
        path: the variances.
        own: what the outputs of a token add to the gradient of its variance.
        surprise: r <e, dmu>.
        last: gradient with respect to the final variance, ``[R, G, 1, D]``.
    """
    end = last.squeeze(-2).unsqueeze(1)
    if path.s.shape[1] == 0:
        return torch.zeros_like(path.s), last
    # ds -> c^2 ds + a^2 r (r own + surprise), an affine map per token; identity at padding.
    c = path.a * path.r
    maps = Affine(
        torch.where(path.real, c * c, 1.0),
        torch.where(path.real, path.a * (path.a * (path.r * (path.r * own + surprise))), 0.0),
    )
    in_time = Affine(*(x.flatten(1, 2).flip(1) for x in maps))
    before = prefix_scan(Affine.compose, in_time).apply(end).flip(1)
    after = torch.cat([before[:, 1:], end], 1)
    return torch.unflatten(after, 1, path.s.shape[1:3]), before[:, 0].unsqueeze(-2)


def _narrow(rows: Rows) -> Rows:
    """The same call with one slot per block: the same variances, and means that stay 0."""
    # The variance of a block depends on a key only through its length.
    variance = rows.state_0.variance
    return rows._replace(
        k=torch.linalg.vector_norm(rows.k, dim=-1, keepdim=True),
        v=torch.zeros_like(rows.v),
        state_0=KLAState(torch.zeros_like(variance), variance),
    )


def _path(narrow: Rows, starts: KLAState) -> Path:
    """Filter the variances of every chunk from its initial one."""
    steps = list(replay(narrow, starts))

    def along(field: str) -> Tensor:
        return torch.stack([getattr(step, field).squeeze(-2) for step in steps], 2)

    a = narrow.a_bar.squeeze(-2) if narrow.dt is None else along("a")
    s, s_prev, r = (along(x) for x in ("variance", "variance_prev", "r"))
    return Path(s, s_prev, a, r, narrow.real.squeeze(-1))


def _to_spans(x: Tensor) -> Tensor:
    """``[R, C, CHUNK, G, F]`` to ``[R, J, G, SPAN, F]``."""
    return torch.unflatten(x, 2, (-1, SPAN)).flatten(1, 2).transpose(2, 3)


def _to_rows(x: Tensor) -> Tensor:
    """The inverse of ``_to_spans``."""
    per = CHUNK // SPAN
    return torch.unflatten(x.transpose(2, 3), 1, (-1, per)).flatten(2, 3)
