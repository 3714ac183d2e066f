"""Noisy in-context recall: recall in which one pair in five is replaced by noise.

::

    input        k3 v1 n2 n3 k0 v0 k3 v1 k0
    test target   _  _  _  _  _  _ v1  _ v0     as in recall; noise is never scored
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from kalman_attention.tasks.mad.recall import Recall


@dataclass(frozen=True, kw_only=True)
class NoisyRecall(Recall):
    """``Recall`` with 16 noise tokens beside its 16 others; options as there."""

    vocab_size: int = 32
    noise: float = 0.2
    noise_vocab: int = 16

    SHORT: ClassVar[dict[str, Any]] = {"vocab_size": 12, "noise_vocab": 4, "seq_len": 16}
