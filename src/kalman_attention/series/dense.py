r"""The Kalman filter for a few latents coupled by one observation: matrices, parallel in time.

Only the sum of the components is observed, so their errors are correlated, and independent filters
per latent, as in ``kla_scan``, would not be exact. This is ``filtering.segment`` with matrices
instead of numbers. The effect of a segment of tokens on any state N(m, P) before it is determined
by the state (mu, s) after a start at exactly 0, the gain A that applies to other starts, and the
evidence of its tokens about the start, precision J and information eta,

.. math:: s' = s + A (1 + P J)^{-1} P A^T, \qquad
          \mu' = \mu + A (1 + P J)^{-1} (m + P \eta).

Composition of segments is associative, so a prefix scan filters. J and eta of a scan from the other
end are the evidence of the future, so that scan smooths.

**Exact diffuse starts.** Latents with a diffuse start begin at an unknown constant delta.
Everything is affine in delta, so the filter carries the series, filtered from delta = 0, and one
column for each entry of delta, the response to a unit start. With innovations e + E delta of
variances S, the tokens up to t give delta the precision and the estimate

.. math:: W = \sum_t E_t^T E_t / S_t, \qquad \hat\delta = -W^{-1} \sum_t E_t^T e_t / S_t,

and integrating it out under a flat prior leaves the diffuse likelihood
sum log N(e; 0, S) + (eta^T W^{-1} eta - log det W) / 2 with eta the sum above. As in statsmodels
with ``use_exact_diffuse=True``, every observation counts log(2 pi) / 2, including those that
determine delta.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kalman_attention.ops.torch.prefix_scan import prefix_scan

_DETERMINED = 1e-10
"""Smallest eigenvalue of W, scaled to a unit diagonal, above which delta counts as known."""


class System(NamedTuple):
    """A linear-Gaussian state-space model on the gaps of a panel, for S sets of parameters.

    Attributes:
        F: transition before each token, ``[S, B, T, d, d]``.
        Q: its noise covariance, of the same shape.
        P_0: covariance before the first token, 0 for diffuse latents, ``[S, d, d]``.
        r: variance of the noise of an observation, ``[S]``.
        h: which latents an observation sums, ``[d]``.
        diffuse: indices of the latents with a diffuse start.
    """

    F: Tensor
    Q: Tensor
    P_0: Tensor
    r: Tensor
    h: Tensor
    diffuse: tuple[int, ...]

    def starts(self) -> Tensor:
        """Means before the first token: 0 for the series, a unit for each diffuse latent."""
        d = len(self.h)
        return torch.eye(d, dtype=self.h.dtype)[:, list(self.diffuse)]


class Segment(NamedTuple):
    """The map from the state before a segment of tokens to the state after it.

    Attributes:
        s: covariance after a start without uncertainty, ``[..., d, d]``.
        mu: mean after a start at 0, for every column, ``[..., d, c]``.
        gain: gain that applies to other starts, ``[..., d, d]``.
        J: precision of the tokens about the start, ``[..., d, d]``.
        eta: information of the tokens about the start, ``[..., d, c]``.
    """

    s: Tensor
    mu: Tensor
    gain: Tensor
    J: Tensor
    eta: Tensor

    def compose(self, earlier: "Segment") -> "Segment":
        """The map that applies ``earlier`` first and ``self`` after it."""
        scale = _inverse(earlier.s @ self.J)
        after, before = self.gain @ scale, scale @ earlier.gain
        return Segment(
            s=self.s + after @ earlier.s @ self.gain.mT,
            mu=self.mu + after @ (earlier.mu + earlier.s @ self.eta),
            gain=self.gain @ before,
            J=earlier.J + before.mT @ self.J @ earlier.gain,
            eta=earlier.eta + before.mT @ (self.eta - self.J @ earlier.mu),
        )


class Beliefs(NamedTuple):
    """Mean ``[S, B, T, d, c]`` of every column, covariance ``[S, B, T, d, d]`` of the latents."""

    mean: Tensor
    covariance: Tensor


class Innovations(NamedTuple):
    """Prediction errors e, ``[S, B, T, c]``, and their variance S."""

    e: Tensor
    S: Tensor


def filter_series(system: System, v: Tensor, seen: Tensor) -> Beliefs:
    """States after each token; columns are those of ``v``, then the responses to diffuse starts.

    Args:
        system: the model.
        v: values, ``[B, T, c]``, or ``[S, B, T, c]``.
        seen: whether there is a value, ``[B, T]``.
    """
    prefixes = prefix_scan(Segment.compose, _tokens(system, v, seen), dim=2)
    return Beliefs(prefixes.mu, prefixes.s)


def smooth_series(system: System, v: Tensor, seen: Tensor) -> Beliefs:
    """States at each token given all tokens, with the columns of ``filter_series``."""
    tokens = _tokens(system, v, seen)
    forward = prefix_scan(Segment.compose, tokens, dim=2)
    flipped = Segment(*(x.flip(2) for x in tokens))
    suffixes = prefix_scan(lambda ours, rest: rest.compose(ours), flipped, dim=2)
    J, eta = (_shift(x.flip(2), -1) for x in (suffixes.J, suffixes.eta))
    scale = _inverse(forward.s @ J)
    covariance = scale @ forward.s
    mean = scale @ (forward.mu + forward.s @ eta)
    return Beliefs(mean, 0.5 * (covariance + covariance.mT))


def predictions(system: System, filtered: Beliefs) -> Beliefs:
    """States before each token, from those after the previous token."""
    c = filtered.mean.shape[-1]
    mean = system.F @ _shift(filtered.mean, 1)
    covariance = system.F @ _shift(filtered.covariance, 1) @ system.F.mT + system.Q
    first = torch.zeros_like(mean[:, :, :1])
    starts = system.starts()
    first[..., c - starts.shape[-1] :] = starts
    start = system.P_0[:, None, None].expand_as(covariance[:, :, :1])
    return Beliefs(
        torch.cat([first, mean[:, :, 1:]], 2), torch.cat([start, covariance[:, :, 1:]], 2)
    )


def innovations(system: System, v: Tensor, predicted: Beliefs) -> Innovations:
    """Values minus their predictions, and the variance of the difference."""
    expected = torch.einsum("d,...dc->...c", system.h, predicted.mean)
    S = system.h @ (predicted.covariance @ system.h).unsqueeze(-1) + system.r.view(-1, 1, 1, 1)
    return Innovations(_columns(system, v) - expected, S.squeeze(-1))


def log_likelihood(system: System, v: Tensor, seen: Tensor) -> Tensor:
    """Diffuse log-likelihood of every series, ``[S, B]``, in nats."""
    at = innovations(system, v, predictions(system, filter_series(system, v, seen)))
    density = -0.5 * (torch.log(2.0 * math.pi * at.S) + at.e[..., 0].square() / at.S)
    total = torch.where(seen, density, 0.0).sum(-1)
    if not system.diffuse:
        return total
    start = diffuse_start(system, at, seen, prefixes=False).from_all()
    fitted = -(start.eta * start.mean).sum((-3, -2, -1))
    return total + 0.5 * (fitted - start.log_det.squeeze(-1))


class DiffuseStart(NamedTuple):
    """What the values up to each token determine about the constant delta of n diffuse latents.

    Attributes:
        mean: its estimate for every column, ``[S, B, T, n, c]``.
        covariance: covariance of the estimate, ``[S, B, T, n, n]``.
        eta: minus W times the estimate, of the shape of the mean.
        log_det: logarithm of the determinant of W, ``[S, B, T]``.
        known: whether the values determine it, ``[S, B, T]``.
    """

    mean: Tensor
    covariance: Tensor
    eta: Tensor
    log_det: Tensor
    known: Tensor

    def from_all(self) -> "DiffuseStart":
        """The estimate from all values."""
        return DiffuseStart(*(x[:, :, -1:] for x in self))

    def from_earlier(self) -> "DiffuseStart":
        """The estimate from the values before each token; there are none before the first."""
        return DiffuseStart(*(_shift(x, 1) for x in self))


def diffuse_start(
    system: System, at: Innovations, seen: Tensor, *, prefixes: bool = True
) -> DiffuseStart:
    """Delta from the innovations of the filter, up to each token or, at less cost, from all.

    W is scaled to a unit diagonal, so that the unit of a slope does not matter.
    """
    n = len(system.diffuse)
    values = at.e.shape[-1] - n
    weight = torch.where(seen, 1.0 / at.S, 0.0)[..., None, None]
    E = at.e[..., values:].unsqueeze(-2)
    W, eta = weight * E.mT @ E, weight * E.mT @ at.e[..., :values].unsqueeze(-2)
    W, eta = (x.cumsum(2) if prefixes else x.sum(2, keepdim=True) for x in (W, eta))
    size = torch.diagonal(W, dim1=-2, dim2=-1).clamp(min=torch.finfo(W.dtype).tiny).sqrt()
    scale = size.unsqueeze(-1) * size.unsqueeze(-2)
    eye = torch.eye(n, dtype=W.dtype)
    known = torch.linalg.eigvalsh((W / scale).detach())[..., 0] > _DETERMINED
    unit = torch.where(known[..., None, None], W / scale, eye)
    covariance = torch.linalg.inv(unit) / scale
    log_det = torch.linalg.slogdet(unit).logabsdet + 2.0 * size.log().sum(-1)
    return DiffuseStart(-covariance @ eta, covariance, eta, log_det, known)


def read(beliefs: Beliefs, start: DiffuseStart | None, q: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of q z, with the diffuse start as far as it is known.

    Args:
        beliefs: states of the latents, with the columns of ``filter_series``.
        start: the estimate of the diffuse start; None without diffuse latents.
        q: weights of the latents, ``[d]``.

    Returns:
        Mean ``[S, B, T, columns of v]`` and variance ``[S, B, T]``; where the start is not known
        yet, NaN and infinity.
    """
    mean = torch.einsum("d,...dc->...c", q, beliefs.mean)
    variance = torch.einsum("d,...de,e->...", q, beliefs.covariance, q)
    if start is None:
        return mean, variance
    n = start.covariance.shape[-1]
    response = mean[..., -n:].unsqueeze(-2)
    mean = mean[..., :-n] + (response @ start.mean).squeeze(-2)
    spread = (response @ start.covariance @ response.mT).flatten(-3)
    variance = torch.where(start.known, variance + spread, math.inf)
    return torch.where(start.known.unsqueeze(-1), mean, math.nan), variance


def _tokens(system: System, v: Tensor, seen: Tensor) -> Segment:
    """Each token as a segment; the first one includes the initial state."""
    first = torch.zeros_like(system.Q[:, :, :1]) + system.P_0[:, None, None]
    Q = torch.cat([first, system.Q[:, :, 1:]], 2)
    F = torch.cat([torch.zeros_like(first), system.F[:, :, 1:]], 2)
    Qh, hF = Q @ system.h, torch.einsum("d,...de->...e", system.h, F)
    S = Qh @ system.h + system.r.view(-1, 1, 1)
    weight = torch.where(seen, 1.0 / S, 0.0)[..., None, None]
    K, y = weight * Qh.unsqueeze(-1), _columns(system, v).unsqueeze(-2)
    y = y.expand(*Qh.shape[:3], 1, y.shape[-1])
    mu = K @ y
    starts = system.starts()
    if starts.shape[-1]:
        # The response to a unit start: what remains of it after the first value.
        left = starts - K[:, :, :1] * (system.h @ starts)
        c = v.shape[-1]
        mu = torch.cat([mu[..., :c], torch.cat([left, mu[:, :, 1:, :, c:]], 2)], -1)
    return Segment(
        s=Q - K @ Qh.unsqueeze(-2),
        mu=mu,
        gain=F - K @ hF.unsqueeze(-2),
        J=weight * hF.unsqueeze(-1) @ hF.unsqueeze(-2),
        eta=weight * hF.unsqueeze(-1) @ y,
    )


def _columns(system: System, v: Tensor) -> Tensor:
    """Values, and zeros for every diffuse latent, whose response is filtered without values."""
    return torch.nn.functional.pad(v, (0, len(system.diffuse)))


def _inverse(product: Tensor) -> Tensor:
    """(1 + s J)^-1, whose eigenvalues lie in (0, 1]."""
    d = product.shape[-1]
    if d == 1:
        return 1.0 / (1.0 + product)
    found: Tensor = torch.linalg.inv(product + torch.eye(d, dtype=product.dtype))
    return found


def _shift(x: Tensor, by: int) -> Tensor:
    """Shift along time, filling with zeros."""
    none = torch.zeros_like(x[:, :, :1])
    return torch.cat([none, x[:, :, :-1]] if by > 0 else [x[:, :, 1:], none], 2)
