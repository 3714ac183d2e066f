r"""Theorem 1 (``Th:Mobius``): one step of the precision is a Mobius map.

.. math:: \lambda_t = \frac{\alpha\lambda_{t-1} + \beta}{\gamma\lambda_{t-1} + \delta}, \qquad
          M_t = \begin{pmatrix} 1 + \bar p\phi & \bar a^2\phi \\ \bar p & \bar a^2 \end{pmatrix}

Maps compose by the product of their matrices and a common factor does not matter, so prefix
products over time are a parallel scan (``cor:parallel-scan``). All entries are at least 0, so
products never cancel; alpha is at least 1, so it can always be divided by.
"""

from typing import NamedTuple

from torch import Tensor

from kalman_attention._typing import Belief, Dynamics


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
        """The map that applies ``earlier`` first and ``self`` after it, normalised."""
        return Mobius(
            alpha=self.alpha * earlier.alpha + self.beta * earlier.gamma,
            beta=self.alpha * earlier.beta + self.beta * earlier.delta,
            gamma=self.gamma * earlier.alpha + self.delta * earlier.gamma,
            delta=self.gamma * earlier.beta + self.delta * earlier.delta,
        ).normalise()

    def normalise(self) -> "Mobius":
        """The same map with alpha = 1, so that long products neither overflow nor vanish."""
        scale = 1.0 / self.alpha
        return Mobius(self.alpha * scale, self.beta * scale, self.gamma * scale, self.delta * scale)

    def apply(self, lam: Belief) -> Belief:
        """Precision after the map, from the precision before it."""
        return (self.alpha * lam + self.beta) / (self.gamma * lam + self.delta)

    def apply_variance(self, s: Belief) -> Belief:
        """The same map read in variances, s = 1 / lam: bounded where lam overflows."""
        return (self.gamma + self.delta * s) / (self.alpha + self.beta * s)
