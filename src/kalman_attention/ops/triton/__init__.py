"""The Triton engine. Importing it needs triton; ``ops/engines.py`` looks first."""

from kalman_attention.ops.triton.forward import forward as forward
