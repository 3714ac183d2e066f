"""The two matrices over the vocabulary: the token embedding and the head."""

from typing import ClassVar

import torch
from torch import Tensor, nn


class Embedding(nn.Embedding):
    """Token embedding."""

    parameter_group: ClassVar[str] = "embedding"

    def reset_parameters(self) -> None:
        """Initialise the weights; does nothing on the meta device."""
        # Normal samples on the meta device make torch import its compiler, which takes seconds.
        if not self.weight.is_meta:
            super().reset_parameters()

    def forward(self, input_ids: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Embeddings ``[..., d_model]``.

        Args:
            input_ids: tokens.
            dtype: dtype of the result; None for that of the table. The table may be stored in lower
                precision: its gradient is still accumulated in ``dtype`` and rounded once.
        """
        dtype = dtype or self.weight.dtype
        if torch.is_grad_enabled() and self.weight.requires_grad:
            return look_up(input_ids, self.weight.to(dtype))
        return look_up(input_ids, self.weight).to(dtype)


class Head(nn.Linear):
    """From the residual stream to logits; the initial bias, if there is one, is 0."""

    parameter_group: ClassVar[str] = "head"

    def reset_parameters(self) -> None:
        """Initialise the weights."""
        super().reset_parameters()
        if self.bias is not None:
            nn.init.zeros_(self.bias)


def look_up(input_ids: Tensor, table: Tensor) -> Tensor:
    """Rows of a table ``[vocab_size, D]`` by token, with an error that names a token outside it."""
    _require_integers(input_ids)
    try:
        return nn.functional.embedding(input_ids, table)
    except IndexError as error:
        raise _outside(input_ids, len(table)) from error


def require_tokens(input_ids: Tensor, vocab_size: int) -> None:
    """Raise unless these are tokens of the vocabulary; values are looked at on a CPU only."""
    _require_integers(input_ids)
    if input_ids.device.type != "cpu" or not input_ids.numel():
        return
    low, high = input_ids.aminmax()
    if int(low) < 0 or int(high) >= vocab_size:
        raise _outside(input_ids, vocab_size)


def _require_integers(input_ids: Tensor) -> None:
    """Raise unless these can be tokens."""
    if not isinstance(input_ids, Tensor) or input_ids.dtype not in (torch.int64, torch.int32):
        got = input_ids.dtype if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise ValueError(
            f"tokens must be an int64 or int32 tensor, got {got}. Pass embeddings as inputs_embeds."
        )


def _outside(input_ids: Tensor, vocab_size: int) -> ValueError:
    outside = input_ids[(input_ids < 0) | (input_ids >= vocab_size)]
    return ValueError(
        f"token {int(outside[0])} is outside the vocabulary of {vocab_size} tokens, which "
        f"are 0 to {vocab_size - 1}. Is this the model's own tokenizer? (Targets may be -100 "
        "where they do not count, inputs may not.)"
    )
