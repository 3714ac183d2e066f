"""What ``kla_scan`` and its family return."""

from typing import NamedTuple

from kalman_attention._typing import Values
from kalman_attention.filtering.moment import KLAState


class ScanOutput(NamedTuple):
    """Outputs and the belief after the last token.

    Attributes:
        y: posterior mean of the read-out, sum_n q mu, ``[B, T, D]`` (``[B, D]`` for a step).
        y_var: its posterior variance, sum_n q^2 / lam, or None when not asked for.
        state: belief after each row's last real token, ``[R, N, D]`` twice.
    """

    y: Values
    y_var: Values | None
    state: KLAState
