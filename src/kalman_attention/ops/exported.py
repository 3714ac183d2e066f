"""The scan in torch's own operators, for programs that leave torch.

Other runtimes do not know our registered op. This is torch's loop over time around one step of the
filter (``filtering/moment.py``), which exporters can translate: ONNX has an operator ``Scan`` for
it. T may be symbolic; no engine is involved, and there is no gradient.
"""

from typing import Any

import torch
from torch import Tensor

from kalman_attention.filtering.evidence import token_evidence, without_gaps
from kalman_attention.filtering.moment import KLAState, step
from kalman_attention.filtering.readout import read_mean, read_variance
from kalman_attention.ops.contract import ScanInputs, ScanOutput


def scan_in_steps(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``kalman_attention::scan`` as a decomposition: the same arguments and results."""
    inputs, (return_variance, _, _) = ScanInputs(*args[:12]), args[12:]
    out = filter_in_steps(inputs)
    assert out.y_var is not None
    nothing = inputs.v.new_empty(0)
    return out.y, out.y_var if return_variance else nothing, *out.state, nothing


def filter_in_steps(inputs: ScanInputs) -> ScanOutput:
    """Filter a sequence by a loop that torch can export; always with the variance."""
    from torch._higher_order_ops.scan import scan  # imported here because it loads the compiler

    if inputs.cu_seqlens is not None or inputs.dt is not None or inputs.slots > 1:
        raise ValueError(
            "packed documents, time gaps and shared precisions cannot be exported. Export a call "
            "with one sequence per row, with a mask if rows are padded."
        )
    dtype, out_dtype = inputs.compute_dtype, inputs.v.dtype
    q, k, v, lam_v, a_bar, p_bar, *first = (x.to(dtype).contiguous() for x in inputs[:8])
    mask = inputs.mask
    if mask is None:
        mask = torch.ones(v.shape[:2], dtype=torch.bool, device=v.device)
    real = mask.unsqueeze(-1)
    q, k, v, lam_v = (x.masked_fill(~real, 0.0) for x in (q, k, v, lam_v))

    def token(belief: tuple[Tensor, ...], x: tuple[Tensor, ...]) -> tuple[Any, Any]:
        q, k, v, lam_v, real = x
        old = KLAState(*belief)
        new = step(old, a_bar, p_bar, *token_evidence(k, v, lam_v))
        mean, variance = (
            torch.where(real.unsqueeze(-1), a, b) for a, b in zip(new, old, strict=True)
        )
        return (mean, variance), (read_mean(q, mean), read_variance(q, variance))

    every = tuple(x.transpose(0, 1) for x in (q, k, without_gaps(v, lam_v), lam_v, real))
    if v.shape[1] == 1:  # a loop over one token would only add overhead
        last, read = token(tuple(first), tuple(x[0] for x in every))
        y, y_var = (x.unsqueeze(1) for x in read)
    else:
        last, read = scan(token, tuple(first), every)
        y, y_var = (x.transpose(0, 1) for x in read)
    return ScanOutput(y.to(out_dtype), y_var.to(out_dtype), KLAState(*last))
