"""Layers: the KLA mixer and its parts.

==================  ===============================================================
``kla``             the KLA layer
``config``          its options
``prior``           its learned prior: dynamics and initial belief
``readout``         the posterior of a read-out, and the evidence behind it
``mixer``           the interface of every sequence mixer, on whole sequences and on pieces
``decoding``        one token per row in native code
``short_conv``      the causal convolution over a few tokens
``norms``           normalisation
``links``           maps from unconstrained to positive numbers
``float32``         parameters that stay float32 in shorter models
==================  ===============================================================
"""
