"""The paper: pure functions of tensors, each theorem in one place.

================  ==========================================================================
``ou``            the Ornstein-Uhlenbeck prior and its exact discretisation
``gaps``          the same prior over any length of time between two tokens
``evidence``      what one token says about the latent
``information``   the filter in the paper's coordinates (precision, information mean)
``moment``        the same filter in coordinates that stay bounded (mean, variance)
``mobius``        Theorem 1: the precision step is a Mobius map
``affine``        Theorem 2: the mean step is an affine map
``projective``    both together: one step is one linear map, so one scan does both
``segment``       that map of a whole segment of tokens, in the numbers that engines carry
``blocks``        slots that share a precision: one variance for several means
``readout``       from belief to output: mean and variance
``identities``    other true forms of the same filter
================  ==========================================================================

All functions broadcast over leading axes, work in the dtype they are given and are
differentiable by autograd. See ``docs/equations.md`` for the way from paper to function to test.
"""
