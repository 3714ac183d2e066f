r"""Mean and variance together as one linear map: one scan where the paper has two.

Write the belief in homogeneous coordinates, :math:`s = x/w` and :math:`\mu = u/w`. One step is

.. math:: \begin{pmatrix} x \\ w \\ u \end{pmatrix} \leftarrow
          \begin{pmatrix} a^2 & p & 0 \\ \phi a^2 & \phi p + 1 & 0 \\ b a^2 & b p & a
          \end{pmatrix} \begin{pmatrix} x \\ w \\ u \end{pmatrix},

with a = a_bar and p = p_bar. The upper left block is Theorem 1 read in variances, the last row is
Theorem 2. A segment of tokens of any length is summarised by seven numbers per slot and channel:
time can be split over threads, kernels or machines at the cost of one exchange of summaries. This
is the theorem; what engines carry are the five numbers of ``segment``, which need no rescaling.

The entry ww is at least 1 in every step and in every product (the block is nonnegative), so it is
the one to normalise by. All seven are carried: rebuilding one from the others loses digits.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kalman_attention._typing import Belief, Dynamics
from kalman_attention.filtering.moment import KLAState


class Projective(NamedTuple):
    """The matrix ((xx, xw, 0), (wx, ww, 0), (ux, uw, uu)), entries ``[..., N, D]``."""

    xx: Tensor
    xw: Tensor
    wx: Tensor
    ww: Tensor
    ux: Tensor
    uw: Tensor
    uu: Tensor

    @classmethod
    def identity_like(cls, x: Tensor) -> "Projective":
        """The map that changes nothing, with entries of the shape and dtype of ``x``."""
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
        """The map that applies ``earlier`` first and ``self`` after it, normalised."""
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
        scale = 1.0 / self.ww
        return Projective(*(entry * scale for entry in self))

    def apply(self, state: KLAState) -> KLAState:
        """Belief after the map, from the belief before it."""
        s, mu = state.variance, state.mean
        w = self.wx * s + self.ww
        return KLAState(
            mean=(self.ux * s + self.uw + self.uu * mu) / w, variance=(self.xx * s + self.xw) / w
        )
