r"""One step of the filter as a map that composes: the reason it can run in parallel over time.

=================  ============================================================
``Mobius``         Theorem 1 (``Th:Mobius``): one step of the precision
``Affine``         Theorem 2 (``thm:eta-affine``): one step of the mean
``Projective``     both at once, as one linear map
=================  ============================================================

Composition is associative, so all prefixes over time are a parallel scan (``cor:parallel-scan``,
``cor:mean-parallel-scan``). How to scan is in ``ops/torch/prefix_scan.py``.

**Theorem 1.** The precision follows a Mobius map, whose matrix is that of the token:

.. math:: \lambda_t = \frac{\alpha\lambda_{t-1} + \beta}{\gamma\lambda_{t-1} + \delta}, \qquad
          M_t = \begin{pmatrix} 1 + \bar p\phi & \bar a^2\phi \\ \bar p & \bar a^2 \end{pmatrix}

Maps compose by the product of their matrices, and a common factor does not matter.

**Theorem 2.** Given the precisions, the information mean follows an affine map:

.. math:: \eta_t = f_t\,\eta_{t-1} + b_t, \qquad
          (f_2, b_2) \oplus (f_1, b_1) = (f_2 f_1,\; f_2 b_1 + b_2)

**Both at once.** Write the belief in homogeneous coordinates, :math:`s = x/w` and
:math:`\mu = u/w`. With a = a_bar and p = p_bar, one step is linear:

.. math:: \begin{pmatrix} x \\ w \\ u \end{pmatrix} \leftarrow
          \begin{pmatrix} a^2 & p & 0 \\ \phi a^2 & \phi p + 1 & 0 \\ b a^2 & b p & a
          \end{pmatrix} \begin{pmatrix} x \\ w \\ u \end{pmatrix}.

The upper left block is Theorem 1 in terms of variances, the last row is Theorem 2. A segment of
tokens of any length is summarised by seven numbers per slot and channel, so time can be split over
threads, kernels or machines at the cost of exchanging one summary each. This is the theorem;
engines carry the five numbers of ``segment`` instead, which need no rescaling.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kalman_attention._typing import Belief, Dynamics
from kalman_attention.filtering.moment import KLAState


class Mobius(NamedTuple):
    """The map lam -> (alpha lam + beta) / (gamma lam + delta), entries ``[..., N, D]``."""

    alpha: Tensor
    beta: Tensor
    gamma: Tensor
    delta: Tensor

    @classmethod
    def from_evidence(cls, a_bar: Dynamics, p_bar: Dynamics, phi: Belief) -> "Mobius":
        """The map of one token (the matrix M_t of the theorem)."""
        a2 = a_bar * a_bar
        return cls(
            alpha=1.0 + p_bar * phi,
            beta=a2 * phi,
            gamma=p_bar.expand_as(phi),
            delta=a2.expand_as(phi),
        )

    def compose(self, earlier: "Mobius") -> "Mobius":
        """The map that applies ``earlier`` first and ``self`` second, normalised."""
        # All entries are at least 0, so the sums of products cannot cancel.
        return Mobius(
            alpha=self.alpha * earlier.alpha + self.beta * earlier.gamma,
            beta=self.alpha * earlier.beta + self.beta * earlier.delta,
            gamma=self.gamma * earlier.alpha + self.delta * earlier.gamma,
            delta=self.gamma * earlier.beta + self.delta * earlier.delta,
        ).normalise()

    def normalise(self) -> "Mobius":
        """The same map with alpha = 1, so that long products neither overflow nor vanish."""
        # alpha is the entry to divide by: 1 + p_bar phi is at least 1, and so is its product.
        scale = 1.0 / self.alpha
        return Mobius(self.alpha * scale, self.beta * scale, self.gamma * scale, self.delta * scale)

    def apply(self, lam: Belief) -> Belief:
        """Precision after the map, from the precision before it."""
        return (self.alpha * lam + self.beta) / (self.gamma * lam + self.delta)

    def apply_variance(self, s: Belief) -> Belief:
        """The same map in terms of variances, s = 1 / lam: bounded where lam overflows."""
        return (self.gamma + self.delta * s) / (self.alpha + self.beta * s)


class Affine(NamedTuple):
    """The map eta -> f eta + b, entries ``[..., N, D]``."""

    f: Tensor
    b: Tensor

    def compose(self, earlier: "Affine") -> "Affine":
        """The map that applies ``earlier`` first and ``self`` second."""
        return Affine(f=self.f * earlier.f, b=self.f * earlier.b + self.b)

    def apply(self, eta: Belief) -> Belief:
        """Mean after the map, from the mean before it."""
        return self.f * eta + self.b


class Projective(NamedTuple):
    """The matrix ((xx, xw, 0), (wx, ww, 0), (ux, uw, uu)), entries ``[..., N, D]``."""

    # One entry follows from the others by the determinant, but computing it that way loses digits:
    # all seven are carried.
    xx: Tensor
    xw: Tensor
    wx: Tensor
    ww: Tensor
    ux: Tensor
    uw: Tensor
    uu: Tensor

    @classmethod
    def identity_like(cls, x: Tensor) -> "Projective":
        """The identity map, with entries of the shape and dtype of ``x``."""
        one, zero = torch.ones_like(x), torch.zeros_like(x)
        return cls(xx=one, xw=zero, wx=zero, ww=one, ux=zero, uw=zero, uu=one)

    @classmethod
    def from_evidence(
        cls, a_bar: Dynamics, p_bar: Dynamics, phi: Belief, b: Belief
    ) -> "Projective":
        """The map of one token."""
        a2 = (a_bar * a_bar).expand_as(phi)
        p = p_bar.expand_as(phi)
        return cls(
            xx=a2,
            xw=p,
            wx=phi * a2,
            ww=phi * p + 1.0,
            ux=b * a2,
            uw=b * p,
            uu=a_bar.expand_as(phi),
        )

    def compose(self, earlier: "Projective") -> "Projective":
        """The map that applies ``earlier`` first and ``self`` second, normalised."""
        return Projective(
            xx=self.xx * earlier.xx + self.xw * earlier.wx,
            xw=self.xx * earlier.xw + self.xw * earlier.ww,
            wx=self.wx * earlier.xx + self.ww * earlier.wx,
            ww=self.wx * earlier.xw + self.ww * earlier.ww,
            ux=self.ux * earlier.xx + self.uw * earlier.wx + self.uu * earlier.ux,
            uw=self.ux * earlier.xw + self.uw * earlier.ww + self.uu * earlier.uw,
            uu=self.uu * earlier.uu,
        ).normalise()

    def normalise(self) -> "Projective":
        """The same map with ww = 1."""
        # ww is at least 1 in every step and, the upper left block being nonnegative, in every
        # product: dividing by it never overflows.
        scale = 1.0 / self.ww
        return Projective(*(entry * scale for entry in self))

    def apply(self, state: KLAState) -> KLAState:
        """Belief after the map, from the belief before it."""
        s, mu = state.variance, state.mean
        w = self.wx * s + self.ww
        return KLAState(
            mean=(self.ux * s + self.uw + self.uu * mu) / w, variance=(self.xx * s + self.xw) / w
        )
