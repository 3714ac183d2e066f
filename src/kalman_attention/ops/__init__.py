"""One op, many engines, one contract.

==================  =================================================================
``kla_scan``        the op and its single step: check, pick an engine, call it
``reference``       its definition, a readable loop
``smooth``          smoothing, and the likelihood of a series
``checks``          which arguments are accepted, and the errors for all others
``arithmetic``      when float32 is not accurate enough
``contract``        what passes between the op and its engines: the tensors of one call
``engines``         the table: which engine serves which call, and what ``auto`` means
``torch``           engines in plain torch operations, on any device
``cpu``             the native engine: a loader around ``csrc/cpu``
``triton``          fused Triton kernels
``cuda``            fused CUDA kernels: a loader around ``csrc/cuda``
``frames``          keys and queries in a frame that rotates with the latent
``linear_scan``     Mamba's selective scan, for the baselines
``matrix_scan``     the matrix memory of GLA, Gated DeltaNet and mLSTM, for the baselines
``exported``        the scan in torch's own operators, for programs that leave torch
==================  =================================================================
"""
