"""A sequence of which a layer sees only a piece: what it needs from those that hold the others."""

from typing import Protocol

from torch import Tensor

from kalman_attention._typing import Dynamics, Keys, Mask, Precisions, Values
from kalman_attention.filtering.moment import KLAState
from kalman_attention.ops.output import ScanOutput


class Context(Protocol):
    """Reaches across the pieces of a sequence; ``parallel`` has the one for processes."""

    def window(
        self, x: Tensor, window: Tensor, mask: Mask | None, cu_seqlens: Tensor | None
    ) -> Tensor:
        """The last K - 1 tokens before this piece.

        Args:
            x: the piece, ``[B, T, D]``.
            window: what precedes the whole sequence, ``[B, K - 1, D]``.
            mask: of the piece, ``[B, T]``.
            cu_seqlens: borders of documents packed into the piece.
        """
        ...

    def scan(
        self,
        v: Values,
        lam_v: Precisions,
        k: Keys,
        q: Keys,
        a_bar: Dynamics,
        p_bar: Dynamics,
        *,
        state: KLAState | None = None,
        mask: Mask | None = None,
        cu_seqlens: Tensor | None = None,
        return_variance: bool = False,
    ) -> ScanOutput:
        """``kla_scan`` of the whole sequence, of which the tokens here are a piece.

        ``state`` is the belief before the whole sequence, the one that comes out that after the
        piece.
        """
        ...
