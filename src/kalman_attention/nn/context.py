"""A sequence of which a layer sees only a piece: what it needs from those that hold the others."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from kalman_attention._typing import Mask
from kalman_attention.ops.contract import ScanOutput
from kalman_attention.ops.frames import Turned


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

    @property
    def scan(self) -> Callable[..., ScanOutput]:
        """``kla_scan`` of the whole sequence, of which the tokens given are a piece.

        Its ``state`` is the belief before the whole sequence; the one that comes out is that after
        the piece.
        """
        ...

    def frames(self, turned: Turned) -> Turned:
        """Keys and queries in the frame of the whole sequence, from those of the piece alone.

        Args:
            turned: as if the piece were the whole sequence; the frame that comes out is the one
                after the piece.
        """
        ...
