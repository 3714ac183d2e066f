"""The native CPU engine: a thin loader around the C++ kernel of ``csrc/cpu``."""

from kalman_attention.ops.cpu.conv import can_convolve as can_convolve
from kalman_attention.ops.cpu.conv import conv_backward as conv_backward
from kalman_attention.ops.cpu.conv import conv_forward as conv_forward
from kalman_attention.ops.cpu.decode import LayerOptions as LayerOptions
from kalman_attention.ops.cpu.decode import LayerTokens as LayerTokens
from kalman_attention.ops.cpu.decode import LayerWeights as LayerWeights
from kalman_attention.ops.cpu.decode import can_decode as can_decode
from kalman_attention.ops.cpu.decode import few_rows_product as few_rows_product
from kalman_attention.ops.cpu.decode import is_stored as is_stored
from kalman_attention.ops.cpu.decode import layer_step as layer_step
from kalman_attention.ops.cpu.frames import frames_backward as frames_backward
from kalman_attention.ops.cpu.frames import frames_forward as frames_forward
from kalman_attention.ops.cpu.library import info as info
from kalman_attention.ops.cpu.library import why_not as why_not
from kalman_attention.ops.cpu.linear import linear_backward as linear_backward
from kalman_attention.ops.cpu.linear import linear_forward as linear_forward
from kalman_attention.ops.cpu.scan import adjoint_map as adjoint_map
from kalman_attention.ops.cpu.scan import backward as backward
from kalman_attention.ops.cpu.scan import filter_map as filter_map
from kalman_attention.ops.cpu.scan import forward as forward
from kalman_attention.ops.cpu.scan import smooth as smooth
from kalman_attention.ops.cpu.scan import smooth_backward as smooth_backward
from kalman_attention.ops.cpu.scan import step as step
