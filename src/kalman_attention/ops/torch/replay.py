"""The steps of a scan once more, from the beliefs that it saved, for those that walk back."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kalman_attention.filtering import moment
from kalman_attention.filtering.blocks import block_evidence
from kalman_attention.filtering.moment import KLAState
from kalman_attention.ops.contract import CHUNK
from kalman_attention.ops.torch.rows import Rows


class Step(NamedTuple):
    """What the adjoint of one token needs, ``[R, C, G, m, D]``, for all chunks at once.

    What the slots of a block share is ``[R, C, G, 1, D]``.

    Attributes:
        mean: posterior mean mu'.
        variance: posterior variance s'.
        mean_prev: mean before the token, mu.
        variance_prev: variance before the token, s.
        a: decay of the step to the token.
        r: retention.
        e: what the token says beyond the prediction, b - phi a mu.
        rest: what the new mean leaves of the value, k v - |k|^2 mu'.
        real: where there is a token.
    """

    mean: Tensor
    variance: Tensor
    mean_prev: Tensor
    variance_prev: Tensor
    a: Tensor
    r: Tensor
    e: Tensor
    rest: Tensor
    real: Tensor


class Adjoint(NamedTuple):
    """Gradients of the belief at one point in time, ``[R, C, G, m, D]`` or ``[R, G, m, D]``."""

    dmu: Tensor
    ds: Tensor


def replay(rows: Rows, starts: KLAState) -> Iterator[Step]:
    """The steps of all chunks at once, token by token, from their first beliefs."""
    state = starts
    for t in range(CHUNK):
        phi, b = block_evidence(rows.k[:, :, t], rows.v[:, :, t], rows.lam_v[:, :, t])
        real = rows.real[:, :, t]
        a, p = rows.dynamics(t)
        prior = moment.predict(state, a, p)
        new = moment.update(prior, phi, b)
        new = KLAState(*(torch.where(real, x, y) for x, y in zip(new, state, strict=True)))
        r = moment.retention(prior.variance, phi)
        e = moment.innovation(prior.mean, phi, b)
        k = rows.k[:, :, t].unsqueeze(-1)
        k2 = (k * k).sum(-2, keepdim=True)
        rest = r * (k * rows.v[:, :, t, None, None, :] - k2 * prior.mean)
        yield Step(new.mean, new.variance, state.mean, state.variance, a, r, e, rest, real)
        state = new


def sources(rows: Rows, dy: Tensor | None, dy_var: Tensor | None) -> Iterator[Adjoint]:
    """What the outputs of every token add to the adjoint of its belief."""
    zero = rows.v.new_zeros(())
    for t in range(CHUNK):
        q = rows.q[:, :, t].unsqueeze(-1)
        q2 = (q * q).sum(-2, keepdim=True)
        yield Adjoint(
            dmu=zero if dy is None else q * dy[:, :, t, None, None, :],
            ds=zero if dy_var is None else q2 * dy_var[:, :, t, None, None, :],
        )
