"""The CUDA engine: kernels of ``csrc/cuda``, compiled at run time. Not yet run on a GPU."""

from kalman_attention.ops.cuda.device import why_not as why_not
from kalman_attention.ops.cuda.scan import backward as backward
from kalman_attention.ops.cuda.scan import forward as forward
from kalman_attention.ops.cuda.scan import step as step
