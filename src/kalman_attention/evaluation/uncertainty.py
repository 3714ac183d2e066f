"""Readable summaries of the posterior: a table of tokens, and Kalman attention maps of a layer."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kalman_attention.filtering.moment import KLAState
from kalman_attention.models.block import Block
from kalman_attention.models.language_model import LanguageModel
from kalman_attention.models.stack import walk
from kalman_attention.models.uncertainty import Uncertainty
from kalman_attention.nn.kla import KLA
from kalman_attention.ops.frames import into_frames
from kalman_attention.ops.kla_scan import kla_scan


@dataclass(frozen=True, kw_only=True)
class TokenRow:
    """One token of a sequence.

    Attributes:
        token: its text, or its id.
        gain: share of the state that it replaced, mean over channels, one number per block (NaN for
            a block without a posterior).
        variance: posterior variance after it, one number per block.
        entropy: entropy of the prediction after it, in nats.
        epistemic: the part of the entropy that knowing the last read-out would resolve: the mutual
            information with it, not with earlier blocks or the weights; NaN without samples.
    """

    token: str
    gain: tuple[float, ...]
    variance: tuple[float, ...]
    entropy: float
    epistemic: float


def token_table(found: Uncertainty, tokens: Sequence[object], *, row: int = 0) -> list[TokenRow]:
    """One row per token of sequence ``row``, from ``model.uncertainty``."""
    nan = torch.full_like(found.entropy[row], torch.nan)
    gain, variance = (
        torch.stack([nan if x is None else x[row].float().mean(-1) for x in column], 1).tolist()
        for column in (found.gain, found.variance)
    )
    epistemic = nan if found.epistemic is None else found.epistemic[row]
    return [
        TokenRow(
            token=str(token),
            gain=tuple(gain[t]),
            variance=tuple(variance[t]),
            entropy=float(found.entropy[row, t]),
            epistemic=float(epistemic[t]),
        )
        for t, token in enumerate(tokens)
    ]


def format_table(rows: Sequence[TokenRow]) -> str:
    """The table as text, with gain and variance of the last block that has them."""
    lines = [f"{'token':>12}  {'gain':>6}  {'variance':>8}  {'entropy':>7}  {'epistemic':>9}"]
    for r in rows:
        gain, variance = _last_known(r.gain), _last_known(r.variance)
        lines.append(
            f"{r.token:>12}  {gain:6.3f}  {variance:8.4f}  {r.entropy:7.3f}  {r.epistemic:9.4f}"
        )
    return "\n".join(lines)


def attention_maps(
    model: LanguageModel, input_ids: Tensor, *, block: int, channels: Sequence[int]
) -> Tensor:
    """Kalman attention matrices of some channels of a block (App. ``sec:attn-matrix``).

    Entry (t, s) is the weight of token s in the read-out at token t. The read-out is linear in the
    values, so the weights are its derivatives, for every kind of filter: also with shared slots,
    learned steps or reflections. The cost is quadratic in T, for inspecting short sequences.

    Args:
        model: any model whose block ``block`` is a KLA block.
        input_ids: ``[B, T]``.
        block: index of the block; negative indices count from the end.
        channels: indices of channels of the filter.

    Returns:
        ``[B, len(channels), T, T]``, lower triangular.
    """
    blocks: list[Block] = model.stack()
    chosen = blocks[block]
    if not isinstance(chosen.mixer, KLA):
        raise ValueError(
            f"block {block} is a block of {chosen.kind}: it has no Kalman attention map."
        )
    with torch.no_grad():
        end = range(len(blocks))[block] + 1
        read = walk(blocks[:end], model.embed(input_ids), hold=True).readout
        a_bar, p_bar, first = chosen.mixer.prior(len(input_ids))
    assert read is not None
    e, picked = read.evidence, list(channels)
    q, k = (e.q, e.k) if e.u_h is None else into_frames(e.q, e.k, e.u_h)[:2]
    v = e.v[..., picked].to(a_bar.dtype).requires_grad_()
    with torch.enable_grad():
        y = kla_scan(
            q,
            k,
            v,
            e.lam_v[..., picked],
            a_bar[:, picked],
            p_bar[:, picked],
            dt=e.dt[..., picked] if e.dt is not None and e.dt.dim() == 3 else e.dt,
            state=KLAState(*(z[..., picked] for z in first)),
        ).y
    rows = [torch.autograd.grad(y_t.sum(), v, retain_graph=True)[0] for y_t in y.unbind(1)]
    return (
        torch.stack(rows, 1).permute(0, 3, 1, 2) if rows else y.new_empty(len(y), len(picked), 0, 0)
    )


def _last_known(values: tuple[float, ...]) -> float:
    known = [value for value in values if value == value]
    return known[-1] if known else float("nan")
