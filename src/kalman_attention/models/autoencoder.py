"""The autoencoder of MAD's compression task: a sequence into one vector, and back.

::

    tokens -> embedding (-> MLP) -> blocks -> stream at the last position    the code, [B, d_model]
    code + sinusoid of t -> (norm, linear, GELU) twice -> norm -> head    logits at t, each t alone

The encoder is the stack of the language model. With KLA as its last mixer the code has a posterior,
and the marginal likelihood (KLA+) averages over it, position by position.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from kalman_attention.losses import marginal_nll, posterior_mean_cross_entropy
from kalman_attention.models.block import Block
from kalman_attention.models.config import LanguageModelConfig
from kalman_attention.models.output import ModelOutput
from kalman_attention.models.scaffold import Encoder, make_decoder, make_encoder
from kalman_attention.models.stack import BlockStack
from kalman_attention.models.vocabulary import Embedding, Head
from kalman_attention.nn.norms import RMSNorm
from kalman_attention.reading import from_dict


@dataclass(frozen=True, kw_only=True)
class AutoencoderConfig:
    """An encoder with the widths of its decoder.

    Attributes:
        encoder: vocabulary, width, blocks and what stands around them; ``decoder_widths`` of None
            means d_model twice here, as in MAD-Lab. What it says about the head of a language model
            has no place here: the head is not tied, has a bias, and starts like every linear map.
        init_std: spread of the initial weights of all linear maps but those of the group
            ``state_space``. Biases of mixers (a step size, say) keep their own start.
    """

    encoder: LanguageModelConfig
    init_std: float = 0.02

    def __post_init__(self) -> None:
        encoder = self.encoder
        if encoder.d_model % 2 or encoder.d_model < 4:
            raise ValueError(
                f"d_model must be even and at least 4, got {encoder.d_model}: half of it are "
                "sines of the position, half cosines."
            )
        if encoder.tie_embeddings or encoder.logit_softcap is not None or encoder.head_std:
            raise ValueError(
                "tie_embeddings, logit_softcap and head_std belong to a language model; leave "
                "them at their defaults. The autoencoder's head starts with init_std."
            )

    @property
    def widths(self) -> tuple[int, ...]:
        """Hidden widths of the decoder, first one first."""
        if self.encoder.decoder_widths is None:
            return self.encoder.d_model, self.encoder.d_model
        return self.encoder.decoder_widths

    def to_dict(self) -> dict[str, Any]:
        """As nested dictionaries of plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(
        cls, data: object, where: str = "the configuration of an autoencoder"
    ) -> "AutoencoderConfig":
        """The inverse of ``to_dict``, also after a round trip through JSON.

        Args:
            data: nested dictionaries; names and types are checked.
            where: what an error names, such as the file.
        """
        return from_dict(cls, data, where)


class CodeReadout(NamedTuple):
    """One pass over tokens, stopped at the posterior of the code, repeated for every position.

    Attributes:
        mean: posterior mean of the last block's read-out at the last token, ``[B, T, d_inner]``.
        variance: its posterior variance, likewise.
        context: what ``Autoencoder.write`` needs beside a read-out, ``[B, T, ...]`` each.
    """

    mean: Tensor
    variance: Tensor
    context: tuple[Tensor, ...]


class Autoencoder(BlockStack):
    """Reconstructs a sequence from what its encoder holds after the last token.

    Methods have the names and meanings of those of ``LanguageModel``.

    Args:
        config: options.
    """

    def __init__(self, config: AutoencoderConfig) -> None:
        super().__init__()
        self.config = config
        encoder = config.encoder
        self.embedding = Embedding(encoder.vocab_size, encoder.d_model)
        self.encoder = make_encoder(encoder)
        self.blocks = nn.ModuleList(Block(encoder, mixer) for mixer in encoder.layers)
        self.decoder = make_decoder(encoder.d_model, config.widths, encoder.norm_eps)
        width = (encoder.d_model, *config.widths)[-1]
        self.norm = RMSNorm(width, encoder.norm_eps)
        self.head = Head(width, encoder.vocab_size)
        self._start()

    @torch.no_grad()
    def _start(self) -> None:
        if self.embedding.weight.is_meta:
            return
        nn.init.normal_(self.embedding.weight, std=self.config.encoder.embedding_std)
        for module in self.modules():
            own = getattr(module, "parameter_group", None) == "state_space"
            if isinstance(module, nn.Linear) and not own:
                nn.init.normal_(module.weight, std=self.config.init_std)

    def forward(self, input_ids: Tensor, *, return_variances: bool = False) -> ModelOutput:
        """Logits of the token at every position, from the code.

        Args:
            input_ids: tokens, ``[B, T]``; T is at least 1.
            return_variances: also return the posterior variance of every block's read-out.

        Returns:
            ``ModelOutput(logits, states, hidden, variances)``; ``hidden`` is what the head sees.
        """
        x = self._embed(input_ids)
        states, variances = [], []
        *first, last = self.stack()
        for block in (*first, last):
            sample = self.config.encoder.between_blocks == "sample" and block is not last
            found = block(x, return_variance=return_variances, sample=sample)
            x = found.y
            states.append(found.state)
            variances.append(found.variance)
        hidden = self._decode(x[:, -1:] + self._positions(input_ids, x))
        return ModelOutput(
            self.head(hidden), tuple(states), hidden, tuple(variances) if return_variances else None
        )

    def read(self, input_ids: Tensor) -> CodeReadout:
        """Run up to the posterior of the last block's read-out at the last token.

        ``write(mean)`` then gives the logits of ``forward``, and ``write(samples)`` those of
        posterior samples, from this one pass.
        """
        x = self._embed(input_ids)
        sample = self.config.encoder.between_blocks == "sample"
        *first, last = self.stack()
        for block in first:
            x = block(x, sample=sample).y
        held = last.hold(x)
        variance = held.readout.variance
        assert variance is not None
        positions = self._positions(input_ids, x).expand(*x.shape)
        mean, variance, *context = (
            z[:, -1:].expand(-1, x.shape[1], -1)
            for z in (held.readout.mean, variance, *held.context)
        )
        return CodeReadout(mean, variance, (*context, positions))

    def write(
        self, latent: Tensor, stream: Tensor, gate: Tensor, residual: Tensor, positions: Tensor
    ) -> Tensor:
        """Logits from read-outs of the last block, ``[..., T, d_inner]``: the decoder of KLA+.

        Args:
            latent: the posterior mean of ``read``, or samples of it.
            stream: from ``CodeReadout.context``, with gate, residual and positions.
            gate: likewise.
            residual: likewise.
            positions: likewise.

        Returns:
            ``[..., T, vocab_size]``.
        """
        code = self.stack()[-1].resume(latent, stream, gate, residual)
        return self.logits(code + positions)

    def logits(self, x: Tensor) -> Tensor:
        """Logits from codes with their positions added, ``[..., d_model]``."""
        logits: Tensor = self.head(self._decode(x))
        return logits

    def loss(
        self,
        input_ids: Tensor,
        targets: Tensor,
        *,
        kind: Literal["mean", "marginal"] = "mean",
        num_samples: int = 10,
        generator: torch.Generator | None = None,
        ignore_index: int = -100,
        reduction: Literal["mean", "sum"] = "mean",
    ) -> Tensor:
        """Training loss; arguments as for ``LanguageModel.loss``.

        The marginal likelihood is that of each target on its own, as for language: samples of the
        code are drawn anew for every position.
        """
        if kind == "mean":
            hidden = self(input_ids).hidden
            return posterior_mean_cross_entropy(
                self.head, hidden, targets, ignore_index=ignore_index, reduction=reduction
            )
        mean, variance, context = self.read(input_ids)
        return marginal_nll(
            self.write,
            mean,
            variance,
            targets,
            context=context,
            num_samples=num_samples,
            generator=generator,
            ignore_index=ignore_index,
            reduction=reduction,
        )

    def _embed(self, input_ids: Tensor) -> Tensor:
        if isinstance(self.encoder, Encoder):
            return self.encoder.look_up(self.embedding.weight, input_ids)
        found: Tensor = self.embedding(input_ids)
        return found

    def _decode(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.norm(self.decoder(x))
        return hidden

    def _positions(self, input_ids: Tensor, like: Tensor) -> Tensor:
        if input_ids.shape[1] == 0:
            raise ValueError("an empty sequence has no last token to hold a code.")
        return sinusoids(input_ids.shape[1], like.shape[-1]).to(like)


def sinusoids(length: int, width: int) -> Tensor:
    """Fixed position encodings: sines in the first half, cosines in the second, ``[T, width]``.

    Frequencies fall geometrically from 1 to 1 / 10000, both ends included.
    """
    half = width // 2
    frequencies = 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / (half - 1))
    angles = torch.arange(length).unsqueeze(1) * frequencies
    return torch.cat([angles.sin(), angles.cos()], 1)
