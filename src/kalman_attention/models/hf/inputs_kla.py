"""Conversion of transformers' masks, positions and labels to those of the native model."""

import torch
from torch import Tensor


def real_tokens(attention_mask: Tensor | None, length: int, past: int | None) -> Tensor | None:
    """The mask of this call's tokens, ``[B, length]`` bool; None if there is no padding.

    Args:
        attention_mask: transformers' mask, of this call's tokens or of all tokens so far.
        length: tokens of this call.
        past: tokens before them; None if only the cache knows.
    """
    if attention_mask is None:
        return None
    columns = attention_mask.shape[-1]
    fits = columns >= length if past is None else columns in (length, past + length)
    if attention_mask.dim() != 2 or not fits:
        raise ValueError(
            f"attention_mask is {list(attention_mask.shape)} but must be [B, {length}], one entry "
            f"per token of this call"
            + (
                f", or [B, {past + length}], the {past} tokens in the cache included."
                if past
                else "."
            )
        )
    mask = attention_mask[:, attention_mask.shape[1] - length :].bool()
    if not torch.compiler.is_compiling() and bool(mask.all()):
        return None  # equivalent, faster, and compatible with packed documents
    return mask


def packed_borders(position_ids: Tensor | None, length: int) -> Tensor | None:
    """Document boundaries of a packed row, if positions restart at 0; otherwise None."""
    if position_ids is None or length < 2 or position_ids.dim() != 2:
        return None
    first = position_ids == 0
    if not bool(first[:, 1:].any()):
        return None
    if position_ids.shape[0] != 1:
        raise ValueError(
            "position_ids restart inside a row, which means packed documents, but there are "
            f"{position_ids.shape[0]} rows. Pack everything into one row (B = 1), or pad."
        )
    starts = first[0].nonzero().flatten()
    starts[0] = 0
    return torch.cat([starts, starts.new_tensor([length])])


def next_labels(labels: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Targets of every position: the label of the next token; -100 for the last and in padding."""
    targets = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
    if attention_mask is None:
        return targets
    padding = attention_mask[:, attention_mask.shape[1] - labels.shape[1] :] == 0
    return targets.masked_fill(padding, -100)


def counted_share(labels: Tensor, targets: Tensor) -> Tensor:
    """The share of the labels counted by a trainer that ``next_labels`` kept as targets.

    transformers' trainer counts every label except the first of a row. This includes the first
    token after padding on the left, which nothing could predict.
    """
    counted = (labels[:, 1:] != -100).sum()
    return (targets != -100).sum() / counted.clamp(min=1)
