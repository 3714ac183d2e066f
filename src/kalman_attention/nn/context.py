"""Sequences split over processes: what a layer needs from those that hold the other pieces."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from kalman_attention._typing import Mask
from kalman_attention.ops.contract import ScanOutput
from kalman_attention.ops.frames import Turned


class Context(Protocol):
    """Access to the other pieces of a sequence; implemented in ``parallel``."""

    def window(
        self, x: Tensor, window: Tensor, mask: Mask | None, cu_seqlens: Tensor | None
    ) -> Tensor:
        """The last K - 1 tokens before this piece.

        Args:
            x: the piece, ``[B, T, D]``.
            window: the tokens before the whole sequence, ``[B, K - 1, D]``.
            mask: mask of the piece, ``[B, T]``.
            cu_seqlens: document boundaries in the piece.
        """
        ...

    @property
    def scan(self) -> Callable[..., ScanOutput]:
        """``kla_scan`` over the whole sequence, called with one piece of it.

        Its ``state`` is the belief before the whole sequence; the returned one is the belief after
        the piece.
        """
        ...

    def frames(self, turned: Turned) -> Turned:
        """Keys and queries in the frame of the whole sequence, from those of the piece alone.

        Args:
            turned: computed as if the piece were the whole sequence; the returned frame is the one
                after the piece.
        """
        ...
