"""Belief summaries for people: a table of tokens, and the Kalman attention maps of a layer."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kalman_attention.filtering.identities import attention_form
from kalman_attention.filtering.moment import KLAState
from kalman_attention.models.block import Block
from kalman_attention.models.language_model import LanguageModel
from kalman_attention.models.stack import walk
from kalman_attention.models.uncertainty import Uncertainty
from kalman_attention.nn.kla import KLA


@dataclass(frozen=True, kw_only=True)
class TokenRow:
    """One token of a sequence.

    Attributes:
        token: its text, or its number.
        gain: share of the belief it replaced, mean over channels, one number per block (NaN for a
            block without a belief).
        variance: posterior variance after it, per block too.
        entropy: of the prediction after it, in nats.
        epistemic: part of that which knowing the latent would settle; NaN without samples.
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
    """The table as text; gain and variance of the last block that has them."""
    lines = [f"{'token':>12}  {'gain':>6}  {'variance':>8}  {'entropy':>7}  {'epistemic':>9}"]
    for r in rows:
        gain, variance = _last_known(r.gain), _last_known(r.variance)
        lines.append(
            f"{r.token:>12}  {gain:6.3f}  {variance:8.4f}  {r.entropy:7.3f}  {r.epistemic:9.4f}"
        )
    return "\n".join(lines)


@torch.no_grad()
def attention_maps(
    model: LanguageModel, input_ids: Tensor, *, block: int, channels: Sequence[int]
) -> Tensor:
    """Kalman attention matrices of some channels of a block (App. ``sec:attn-matrix``).

    Entry (t, s) is the weight of token s in the read-out at token t. Quadratic in T: for looking
    at short sequences.

    Args:
        model: any model whose block ``block`` is a KLA block.
        input_ids: ``[B, T]``.
        block: which block; negative counts from the end.
        channels: which channels of the filter.

    Returns:
        ``[B, len(channels), T, T]``, lower triangular.
    """
    blocks: list[Block] = model.stack()
    chosen = blocks[block]
    if not isinstance(chosen.mixer, KLA):
        raise ValueError(f"block {block} is a block of {chosen.kind}: it has no Kalman map.")
    if chosen.mixer.config.shared_slots > 1 or chosen.mixer.config.step_rank is not None:
        raise ValueError(
            "attention maps are those of the paper's filter: a layer with shared_slots or "
            "step_rank has none here."
        )
    end = range(len(blocks))[block] + 1
    read = walk(blocks[:end], model.embed(input_ids), hold=True).readout
    assert read is not None
    evidence, picked = read.evidence, list(channels)
    a_bar, p_bar, first = chosen.mixer.prior(len(input_ids))
    a_bar, p_bar = a_bar[:, picked], p_bar[:, picked]
    form = attention_form(
        evidence.q.to(a_bar.dtype),
        evidence.k.to(a_bar.dtype),
        evidence.lam_v[..., picked].to(a_bar.dtype),
        a_bar,
        p_bar,
        KLAState(*(z[..., picked] for z in first)),
    )
    return form.attn_seq


def _last_known(values: tuple[float, ...]) -> float:
    known = [value for value in values if value == value]
    return known[-1] if known else float("nan")
