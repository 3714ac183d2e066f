"""The Triton engine. Importing it needs triton; ``ops/engines.py`` looks first."""

from kalman_attention.ops.triton.bwd import backward as backward
from kalman_attention.ops.triton.decode import step as step
from kalman_attention.ops.triton.fwd import forward as forward
