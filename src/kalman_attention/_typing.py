"""The legend. Read this first: all signatures of the library use these letters.

====  ==============================================  ===============================
 B    batch                                           ``batch_size``
 T    time (tokens)                                   ``seq_len``
 N    memory slots per channel (state expansion)      ``d_state``
 D    channels of the filter                          ``d_inner``
 R    rows with a separate belief: B, or the number   --
      of documents if documents are packed
====  ==============================================  ===============================

The aliases below are all ``torch.Tensor``; their names indicate the shape. D is contiguous.
"""

from typing import TypeAlias

from torch import Tensor

Values: TypeAlias = Tensor
"""Values v and outputs y, ``[B, T, D]``."""

Precisions: TypeAlias = Tensor
"""Value precisions lam_v (inverse variances, at least 0), ``[B, T, D]``."""

Keys: TypeAlias = Tensor
"""Observation operators k and read-out operators q, ``[B, T, N]``."""

Dynamics: TypeAlias = Tensor
"""Time-invariant parameters a, p, dt and their discretised forms a_bar, p_bar, ``[N, D]``."""

Belief: TypeAlias = Tensor
"""One half of a belief (a mean, a variance, a precision ...), ``[..., N, D]``."""

Mask: TypeAlias = Tensor
"""True for real tokens, False for padding, ``[B, T]`` bool."""
