"""One op, many engines, one contract.

==================  =================================================================
``kla_scan``        the op and its single step: check, pick an engine, call it
``reference``       its definition, a readable loop
``smooth``          beliefs in hindsight, and the likelihood of a series
``checks``          what is accepted, and errors that say what instead
``contract``        what passes between op and engines: the tensors of one call
``engines``         the table: who can serve which call, and what ``auto`` means
``torch``           engines in plain torch operations, on any device
``cpu``             the native engine: a loader around ``csrc/cpu``
``triton``          fused Triton kernels
``cuda``            fused CUDA kernels: a loader around ``csrc/cuda``
``frames``          keys and queries in a frame that turns along with the latent
``linear_scan``     Mamba's selective scan, for the baselines
``raw``             tensors as addresses and strides, for engines behind a C interface
==================  =================================================================
"""
