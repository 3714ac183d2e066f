r"""Theorem 2 (``thm:eta-affine``): given the precisions, one step of the mean is an affine map.

.. math:: \eta_t = f_t\,\eta_{t-1} + b_t, \qquad
          (f_2, b_2) \oplus (f_1, b_1) = (f_2 f_1,\; f_2 b_1 + b_2)

The operator is associative, so the means too are a parallel scan (``cor:mean-parallel-scan``).
"""

from typing import NamedTuple

from torch import Tensor

from kalman_attention._typing import Belief


class Affine(NamedTuple):
    """The map eta -> f eta + b, entries ``[..., N, D]``."""

    f: Tensor
    b: Tensor

    def compose(self, earlier: "Affine") -> "Affine":
        """The map that applies ``earlier`` first and ``self`` after it."""
        return Affine(f=self.f * earlier.f, b=self.f * earlier.b + self.b)

    def apply(self, eta: Belief) -> Belief:
        """Mean after the map, from the mean before it."""
        return self.f * eta + self.b
