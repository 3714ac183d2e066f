"""Fused Triton kernels. ``engine`` imports triton; ``schedule`` can be asked without it."""
