"""MLPs around the blocks: one between embedding and blocks, one between blocks and head.

::

    embedding -> encoder -> blocks -> decoder -> norm -> head

Both work position by position, and both are absent by default. ``SCAFFOLDS`` names the
combinations that the synthetic tasks use.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn

from kalman_attention.models.config import LanguageModelConfig
from kalman_attention.models.vocabulary import look_up
from kalman_attention.nn.norms import RMSNorm

Scaffold: TypeAlias = Literal["bare", "encoder-decoder", "swiglu"]

SCAFFOLDS: Mapping[Scaffold, Mapping[str, Any]] = {
    "bare": {},
    # Embeddings of deviation 0.02, MAD-Lab's, change by 15 % in a single update at 3e-3.
    "encoder-decoder": {"encoder_width": 120, "decoder_widths": (240, 120), "embedding_std": 1.0},
    "swiglu": {"mlp": "swiglu"},
}
"""Model options by scaffold: only mixers, the paper's two MLPs, MAD-Lab's channel mixers."""


def with_scaffold(config: LanguageModelConfig, scaffold: Scaffold) -> LanguageModelConfig:
    """The same model with a scaffold.

    Args:
        config: options of the model.
        scaffold: ``"bare"`` leaves the model unchanged; ``"encoder-decoder"`` adds the paper's
            MLPs, of hidden width 120 before the blocks and 240, 120 after them, and starts from
            embeddings of standard deviation 1; ``"swiglu"`` puts a SwiGLU after every mixer.
    """
    if scaffold not in SCAFFOLDS:
        raise ValueError(f"scaffold must be one of {', '.join(SCAFFOLDS)}, got {scaffold!r}.")
    return dataclasses.replace(config, **SCAFFOLDS[scaffold])


class Encoder(nn.Module):
    """An MLP on embeddings, with a residual path: x + norm(W2 GELU(W1 norm(x))).

    The inner norm makes the MLP independent of the scale of the embeddings, and the outer norm
    gives its output the same initial scale: neither hides the other.

    Args:
        d_model: width of input and output.
        hidden: width in between.
        spread: initial root mean square of the output of the MLP.
        norm_eps: of the norms.
    """

    def __init__(self, d_model: int, hidden: int, *, spread: float, norm_eps: float) -> None:
        super().__init__()
        self.norm = RMSNorm(d_model, norm_eps)
        self.in_proj = _linear(d_model, hidden)
        self.out_proj = _linear(hidden, d_model)
        self.out_norm = RMSNorm(d_model, norm_eps)
        nn.init.constant_(self.out_norm.weight, spread)

    def forward(self, x: Tensor) -> Tensor:
        """Encode ``[..., d_model]``."""
        hidden = nn.functional.gelu(self.in_proj(self.norm(x)))
        y: Tensor = x + self.out_norm(self.out_proj(hidden))
        return y

    def look_up(self, table: Tensor, input_ids: Tensor) -> Tensor:
        """Encoded embeddings of tokens, ``[..., d_model]``.

        Encodes the tokens or the table, whichever is shorter: with a small vocabulary and many
        tokens, as in the synthetic tasks, the MLP costs almost nothing.

        Args:
            table: embeddings of all tokens, ``[vocab_size, d_model]``.
            input_ids: tokens.
        """
        if len(table) < input_ids.numel():
            return look_up(input_ids, self(table))
        encoded: Tensor = self(look_up(input_ids, table))
        return encoded


def make_encoder(config: LanguageModelConfig) -> nn.Module:
    """The module between embedding and blocks; the identity without an ``encoder_width``."""
    if config.encoder_width is None:
        return nn.Identity()
    return Encoder(
        config.d_model,
        config.encoder_width,
        spread=config.embedding_std,
        norm_eps=config.norm_eps,
    )


def make_decoder(d_model: int, widths: Sequence[int], norm_eps: float) -> nn.Sequential:
    """The module between blocks and last norm: norm, linear map and GELU for every width.

    Args:
        d_model: width of the input.
        widths: hidden widths, in order; without any, the decoder is the identity.
        norm_eps: of the norms.
    """
    layers: list[nn.Module] = []
    for before, width in zip((d_model, *widths), widths, strict=False):
        layers += [RMSNorm(before, norm_eps), _linear(before, width), nn.GELU()]
    return nn.Sequential(*layers)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    """A linear map whose initial bias is 0, as everywhere in MAD-Lab."""
    layer = nn.Linear(inputs, outputs)
    nn.init.zeros_(layer.bias)
    return layer
