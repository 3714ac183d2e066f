r"""The effect of a segment of tokens on any belief that enters it, in numbers that stay bounded.

This is what allows time to be split over chunks, threads or machines: summarise the segments in
parallel, carry the belief from one to the next, then filter each segment exactly.

**Derivation.** One step is a linear map of homogeneous coordinates (``maps.Projective``), so a
segment is one too, up to a common factor. Divide its seven entries by ww, which is at least 1. The
rest is determined by five numbers per slot and channel: the belief (s, mu) that results from
starting at z = 0 with certainty, the gain A that multiplies any other start, and what the tokens
say about that start: precision J and information eta. The entries are xw = s, uw = mu, ww = 1,
wx = J, uu = A, xx = A^2 + s J, ux = A eta + mu J. A belief (s_0, mu_0) before the segment becomes

.. math:: s' = s + \frac{A^2 s_0}{1 + J s_0}, \qquad
          \mu' = \mu + \frac{A (\mu_0 + s_0 \eta)}{1 + J s_0}.

All five are bounded, so no rescaling is needed, and xx and ux are never computed. Given the
beliefs, the adjoint of a segment is an affine map, determined by four numbers. Both maps are built
forward in time, one token after the other. Where slots share a variance (``blocks``), they share s,
gain, J and ds_0 as well.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kalman_attention._typing import Belief, Dynamics
from kalman_attention.filtering import moment
from kalman_attention.filtering.moment import KLAState


class FilterMap(NamedTuple):
    """From the belief before a segment to the belief after it, entries ``[..., N, D]``."""

    s: Tensor
    mu: Tensor
    gain: Tensor
    J: Tensor
    eta: Tensor

    @classmethod
    def identity_like(cls, state: KLAState) -> "FilterMap":
        """The map of an empty segment, with entries of the shapes and dtype of a belief."""
        mu, s = (torch.zeros_like(x) for x in state)
        return cls(s=s, mu=mu, gain=torch.ones_like(s), J=s, eta=mu)

    def then(self, a_bar: Dynamics, p_bar: Dynamics, phi: Belief, b: Belief) -> "FilterMap":
        """This map followed by one token: the filter, and what it leaves of the start."""
        prior = moment.predict(KLAState(self.mu, self.s), a_bar, p_bar)
        new = moment.update(prior, phi, b)
        before = a_bar * self.gain
        gain = moment.retention(prior.variance, phi) * before
        return FilterMap(
            s=new.variance,
            mu=new.mean,
            gain=gain,
            J=self.J + phi * before * gain,
            eta=self.eta + gain * moment.innovation(prior.mean, phi, b),
        )

    def compose(self, earlier: "FilterMap") -> "FilterMap":
        """The map that applies ``earlier`` first and ``self`` second."""
        scale = 1.0 / (1.0 + self.J * earlier.s)
        return FilterMap(
            s=self.s + self.gain * (self.gain * (earlier.s * scale)),
            mu=self.mu + self.gain * ((earlier.mu + earlier.s * self.eta) * scale),
            gain=self.gain * earlier.gain * scale,
            J=earlier.J + earlier.gain * (earlier.gain * (self.J * scale)),
            eta=earlier.eta + earlier.gain * ((self.eta - self.J * earlier.mu) * scale),
        )

    def apply(self, state: KLAState) -> KLAState:
        """Belief after the segment, from the belief before it."""
        scale = 1.0 / (1.0 + self.J * state.variance)
        # gain (gain s), like a (a s) in the filter: no squares are stored.
        return KLAState(
            mean=self.mu + self.gain * ((state.mean + state.variance * self.eta) * scale),
            variance=self.s + self.gain * (self.gain * (state.variance * scale)),
        )


class AdjointMap(NamedTuple):
    """From gradients of the belief after a segment to those of the belief before it.

    dmu -> gain dmu + dmu_0 and ds -> gain^2 ds + cross dmu + ds_0, entries ``[..., N, D]``. The
    gradients with respect to the outputs of the segment contribute dmu_0 and ds_0.
    """

    gain: Tensor
    cross: Tensor
    dmu_0: Tensor
    ds_0: Tensor

    @classmethod
    def identity_like(cls, state: KLAState) -> "AdjointMap":
        """The map of an empty segment, with entries of the shapes and dtype of a belief."""
        dmu, ds = (torch.zeros_like(x) for x in state)
        return cls(gain=torch.ones_like(ds), cross=dmu, dmu_0=dmu, ds_0=ds)

    def then(self, a_bar: Dynamics, r: Belief, e: Belief, dmu: Belief, ds: Belief) -> "AdjointMap":
        """This map followed by one token, whose adjoint is applied before it.

        Args:
            a_bar: decay.
            r: retention of the token, ``moment.retention``.
            e: its innovation, b - phi a mu.
            dmu: what its outputs add to the gradient with respect to the mean.
            ds: what they add to the gradient with respect to the variance.
        """
        c = a_bar * r
        gain = c * self.gain
        cross = c * self.cross + gain * (gain * e)
        return AdjointMap(
            gain=gain,
            cross=cross,
            dmu_0=self.dmu_0 + gain * dmu,
            ds_0=self.ds_0 + self._shared(cross * dmu) + gain * (gain * ds),
        )

    def compose(self, earlier: "AdjointMap") -> "AdjointMap":
        """The map of ``earlier`` followed by ``self`` in time; adjoints pass ``self`` first."""
        dmu, ds = earlier.apply(self.dmu_0, self.ds_0)
        return AdjointMap(
            gain=earlier.gain * self.gain,
            cross=earlier.gain * (earlier.gain * self.cross) + earlier.cross * self.gain,
            dmu_0=dmu,
            ds_0=ds,
        )

    def apply(self, dmu: Belief, ds: Belief) -> tuple[Belief, Belief]:
        """Gradients of mean and variance before the segment, from those after it."""
        return (
            self.gain * dmu + self.dmu_0,
            self.gain * (self.gain * ds) + self._shared(self.cross * dmu) + self.ds_0,
        )

    def _shared(self, x: Belief) -> Belief:
        """Sum over the slots that share a variance; the identity where each has its own."""
        return x.sum_to_size(self.ds_0.shape)
