"""The paper: pure functions of tensors, each theorem in one place.

================  ==========================================================================
``ou``            the Ornstein-Uhlenbeck prior and its exact discretisation
``gaps``          the same prior over any length of time between two tokens
``evidence``      what one token says about the latent
``information``   the filter in the paper's coordinates (precision, information mean)
``moment``        the same filter in coordinates that stay bounded (mean, variance)
``maps``          Theorems 1 and 2, and both in one: a step is a map that composes
``segment``       the map of a whole segment of tokens, in the numbers that engines carry
``blocks``        slots that share a precision: one variance for several means
``rotation``      a latent rotated by every token is the plain filter in a rotating frame
``readout``       from belief to output: mean and variance
``smoothing``     what later tokens say about an earlier latent
``innovation``    how a token compares with what the filter expected
``identities``    equivalent forms of the same filter
================  ==========================================================================

All functions broadcast over leading axes, work in the dtype they are given and are
differentiable by autograd. ``docs/equations.md`` maps each equation of the paper to its function
and its test.
"""
