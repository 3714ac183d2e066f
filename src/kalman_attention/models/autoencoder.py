"""The autoencoder of MAD's compression task: a sequence is compressed into one vector and restored.

::

    tokens -> embedding (-> MLP) -> blocks -> stream at the last position    the code, [B, d_model]
    code + sinusoid of t -> (norm, linear, GELU) twice -> norm -> head    logits at t, each t alone

The encoder is the stack of the language model. With KLA as its last mixer the code has a posterior,
and the marginal likelihood (KLA+) averages over it, position by position.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kalman_attention._reading import from_dict
from kalman_attention.models.block import BlockOutput
from kalman_attention.models.config import LanguageModelConfig
from kalman_attention.models.output import ModelOutput
from kalman_attention.models.stack import BlockStack, Variances
from kalman_attention.nn.mixer import kept
from kalman_attention.nn.readout import Readout


@dataclass(frozen=True, kw_only=True)
class AutoencoderConfig:
    """Options of an ``Autoencoder``.

    Attributes:
        encoder: vocabulary, width, blocks and scaffold; ``decoder_widths`` of None means two layers
            of width d_model here, as in MAD-Lab. Options for the head of a language model do not
            apply: the head is not tied, has a bias, and is initialised like every linear map.
        init_std: standard deviation of the initial weights of all linear maps except those in the
            parameter group ``state_space``. Biases of mixers (such as a step size) keep their own
            initialisation.
    """

    encoder: LanguageModelConfig
    init_std: float = 0.02

    def __post_init__(self) -> None:
        encoder = self.encoder
        if encoder.d_model % 2 or encoder.d_model < 4:
            raise ValueError(
                f"d_model must be even and at least 4, got {encoder.d_model}: half of the channels "
                "encode the position by sines, half by cosines."
            )
        if encoder.tie_embeddings or encoder.logit_softcap is not None or encoder.head_std:
            raise ValueError(
                "tie_embeddings, logit_softcap and head_std apply to language models only; leave "
                "them at their defaults. The autoencoder's head is initialised with init_std."
            )

    @property
    def widths(self) -> tuple[int, ...]:
        """Hidden widths of the decoder, in order."""
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


class Autoencoder(BlockStack):
    """Reconstructs a sequence from the output of its encoder at the last token.

    Methods have the same names and meanings as those of ``LanguageModel``.

    Args:
        config: options.
    """

    def __init__(self, config: AutoencoderConfig) -> None:
        super().__init__(config.encoder, config.widths, head_bias=True)
        self.config = config
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
        seen = Variances()
        found = self._run(input_ids, return_variance=return_variances, visit=seen)
        hidden = self.decode(found.y)
        variances = tuple(seen) if return_variances else None
        return ModelOutput(self.head_logits(hidden), found.state, hidden, variances)

    def read(self, input_ids: Tensor) -> Readout:
        """Run up to the posterior of the code, repeated for every position.

        ``write(mean, *context)`` then gives the logits of ``forward``, and ``write(samples,
        *context)`` those of posterior samples, from this one pass.
        """
        found = self._run(input_ids, hold=True).readout
        assert found is not None
        return found

    def write(self, latent: Tensor, *context: Tensor) -> Tensor:
        """Logits from read-outs of the last block, ``[..., T, d_inner]``: the decoder of KLA+.

        Args:
            latent: the posterior mean of ``read``, or samples of it.
            *context: ``Readout.context`` of what ``read`` returned; positions come last.

        Returns:
            ``[..., T, vocab_size]``.
        """
        *inner, positions = context
        return self.logits(self.stack()[-1].resume(latent, *inner) + positions)

    def _run(self, input_ids: Tensor, **options: Any) -> BlockOutput:
        """The code at every position with position encodings added, or its posterior with them."""
        if input_ids.dim() != 2 or input_ids.shape[1] == 0:
            raise ValueError(
                f"tokens must be [B, T] with T at least 1, got {list(input_ids.shape)}: an empty "
                "sequence has no last token to take the code from."
            )
        if options.pop("mask", None) is not None or options.pop("cu_seqlens", None) is not None:
            raise ValueError(
                "an autoencoder accepts rows of equal length only: it has no mask and no packing."
            )
        T, keep = input_ids.shape[1], options.pop("keep", None)
        last = torch.zeros_like(input_ids, dtype=torch.bool)
        last[:, -1] = True
        found = super()._run(input_ids, keep=last, **options)  # only the code leaves the last block

        def everywhere(code: Tensor) -> Tensor:  # [1, B, ...], of one position per sequence
            return kept(code.transpose(0, 1).expand(-1, T, *code.shape[2:]), keep)

        code = everywhere(found.y)
        positions = sinusoids(T, code.shape[-1]).to(code).expand(len(input_ids), -1, -1)
        positions = kept(positions, keep)
        if found.readout is None:
            return found._replace(y=code + positions)
        read = found.readout.map(everywhere)
        return found._replace(readout=read._replace(context=(*read.context, positions)))


def sinusoids(length: int, width: int) -> Tensor:
    """Fixed position encodings: sines in the first half, cosines in the second, ``[T, width]``.

    Frequencies fall geometrically from 1 to 1 / 10000, both ends included.
    """
    half = width // 2
    frequencies = 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / (half - 1))
    angles = torch.arange(length).unsqueeze(1) * frequencies
    return torch.cat([angles.sin(), angles.cos()], 1)
