"""The language model: embedding, blocks, final norm, head."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from kalman_attention._typing import Mask
from kalman_attention.models.config import LanguageModelConfig
from kalman_attention.models.generation import Generation, Sampling, generate, last_tokens
from kalman_attention.models.output import ModelOutput
from kalman_attention.models.presets import preset
from kalman_attention.models.stack import BlockStack, States, Variances
from kalman_attention.models.uncertainty import Uncertainty, VarianceOf, uncertainty
from kalman_attention.nn.mixer import check_tokens, settle_config
from kalman_attention.nn.readout import Readout
from kalman_attention.ops.checks import require_mask


class LanguageModel(BlockStack):
    """A stack of mixers that predicts the next token.

    Args:
        config: options, or the name of a preset such as ``"kla-45m"``.
        **fields: the options by name, as in ``LanguageModel(vocab_size=256, d_model=64,
            plan="kla*2")``.
    """

    config: LanguageModelConfig

    def __init__(self, config: LanguageModelConfig | str | None = None, **fields: Any) -> None:
        given = preset(config) if isinstance(config, str) else config
        settled = settle_config("LanguageModel", LanguageModelConfig, given, fields)
        super().__init__(settled, settled.decoder_widths or (), settled.head_bias)
        self.config = settled
        if settled.tie_embeddings:
            self.head.weight = self.embedding.weight
        self._start()

    @torch.no_grad()
    def _start(self) -> None:
        """Initialise what depends on the whole model; the modules have initialised the rest."""
        if self.embedding.weight.is_meta:
            return  # a model without memory; see Embedding.reset_parameters
        config = self.config
        nn.init.normal_(self.embedding.weight, std=config.embedding_std)
        if config.head_std is not None and not config.tie_embeddings:
            nn.init.normal_(self.head.weight, std=config.head_std)
        branches = len(self.blocks) * (1 if config.mlp == "none" else 2)
        for block in self.stack() if config.depth_scaled_start else ():
            block.scale_residuals(1.0 / math.sqrt(branches))

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        states: States | None = None,
        mask: Mask | None = None,
        cu_seqlens: Tensor | None = None,
        return_variances: bool = False,
        logits_to_keep: int | None = None,
    ) -> ModelOutput:
        """Logits of the token after each token.

        Args:
            input_ids: tokens, ``[B, T]``; T may be 0.
            inputs_embeds: token embeddings instead, ``[B, T, d_model]``.
            states: states of the previous call on the same rows; None for the initial states.
            mask: ``[B, T]`` bool, False for padding, left or right.
            cu_seqlens: document boundaries in one packed row (B = 1), ``[n + 1]`` int; states
                are then per document.
            return_variances: also return the posterior variance of every block's read-out.
            logits_to_keep: number of last positions to compute logits for; None for all.

        Returns:
            ``ModelOutput(logits, states, hidden, variances)``.
        """
        x = self._embed(input_ids, inputs_embeds, mask)
        hidden, new, variances = self._hidden(
            x, states, return_variances, mask=mask, cu_seqlens=cu_seqlens
        )
        start = 0 if logits_to_keep is None else max(0, x.shape[1] - logits_to_keep)
        return ModelOutput(self.head_logits(hidden[:, start:]), new, hidden, variances)

    def prefill(
        self, input_ids: Tensor, *, states: States | None = None, mask: Mask | None = None
    ) -> ModelOutput:
        """Read a prompt: ``forward`` with the logits of each row's last real token, ``[B, V]``."""
        found = self(input_ids, states=states, mask=mask, logits_to_keep=0)
        last = found.hidden[last_tokens(input_ids, mask)]
        return ModelOutput(self.head_logits(last), found.states, last, None)

    def step(
        self,
        token: Tensor,
        states: States,
        *,
        mask: Mask | None = None,
        return_variances: bool = False,
    ) -> ModelOutput:
        """Process one token per row, ``[B]``; logits are ``[B, vocab_size]``."""
        x = self._embed(token, None, mask, axes=1)
        hidden, new, variances = self._hidden(x, states, return_variances, mask=mask)
        return ModelOutput(self.head_logits(hidden), new, hidden, variances)

    def read(
        self,
        input_ids: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        states: States | None = None,
        mask: Mask | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Readout:
        """Run up to the posterior of the last block's read-out; arguments as for ``forward``.

        ``write(mean, *context)`` then gives the logits of ``forward``, and ``write(samples,
        *context)`` those of posterior samples, from this one pass. A single token per row, ``[B]``,
        continues from ``states``.
        """
        axes = 1 if input_ids is not None and input_ids.dim() == 1 else 2
        x = self._embed(input_ids, inputs_embeds, mask, axes=axes)
        found = self.walk(x, states, mask=mask, cu_seqlens=cu_seqlens, hold=True).readout
        assert found is not None
        return found

    def uncertainty(
        self,
        input_ids: Tensor,
        *,
        mask: Mask | None = None,
        cu_seqlens: Tensor | None = None,
        num_samples: int = 0,
        generator: torch.Generator | None = None,
        variance_of: VarianceOf = "readout",
    ) -> Uncertainty:
        """Uncertainty of the model at every token: variances, Kalman gains, entropies.

        Args:
            input_ids: ``[B, T]``.
            mask: as for ``forward``.
            cu_seqlens: as for ``forward``.
            num_samples: number of posterior samples. If positive, the entropy is that of the
                marginal prediction (KLA+) and is split into an aleatoric part and an epistemic
                part, the mutual information with the read-out of the last block only.
            generator: source of randomness.
            variance_of: ``"readout"``, or ``"output"`` to propagate the variances through gate and
                output projection to the width of the model, which is exact.

        Returns:
            ``Uncertainty``; no gradients.
        """
        return uncertainty(
            self,
            input_ids,
            mask=mask,
            cu_seqlens=cu_seqlens,
            num_samples=num_samples,
            generator=generator,
            variance_of=variance_of,
        )

    def generate(
        self,
        input_ids: Tensor,
        *,
        max_new_tokens: int,
        states: States | None = None,
        mask: Mask | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop_token: int | None = None,
        generator: torch.Generator | None = None,
        num_samples: int = 0,
        output_uncertainty: bool = False,
    ) -> Generation:
        """Continue prompts, greedily by default.

        Args:
            input_ids: prompts, ``[B, T]``.
            max_new_tokens: length of the continuation.
            states: states before the prompts, as returned by ``forward`` or ``prefill``. They are
                not modified, so that many continuations can start from one prefix.
            mask: ``[B, T]`` bool, False for padding, left or right.
            temperature: 0 selects the most likely token; otherwise tokens are sampled.
            top_k: sample only from the ``top_k`` most likely tokens.
            top_p: sample only from the most likely tokens that together reach this probability.
            stop_token: token that ends a row.
            generator: source of randomness.
            num_samples: number of posterior samples to predict with (KLA+); 0 uses the posterior
                mean.
            output_uncertainty: also return the uncertainty about every token.

        Returns:
            ``Generation(tokens, uncertainty)``.
        """
        return generate(
            self,
            input_ids,
            max_new_tokens=max_new_tokens,
            states=states,
            mask=mask,
            sampling=Sampling(temperature=temperature, top_k=top_k, top_p=top_p),
            stop_token=stop_token,
            generator=generator,
            num_samples=num_samples,
            output_uncertainty=output_uncertainty,
        )

    def _hidden(
        self, x: Tensor, states: States | None, return_variances: bool, **options: Any
    ) -> tuple[Tensor, States, tuple[Tensor | None, ...] | None]:
        """Run blocks and decoder: input of the head, new states, and variances if requested."""
        seen = Variances()
        found = self.walk(x, states, return_variance=return_variances, visit=seen, **options)
        return self.decode(found.y), found.state, tuple(seen) if return_variances else None

    def _embed(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        mask: Mask | None = None,
        *,
        axes: int = 2,
    ) -> Tensor:
        """Check the arguments and compute the input of the first block."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass either input_ids or inputs_embeds, exactly one of the two.")
        given = input_ids if inputs_embeds is None else inputs_embeds[..., 0]
        assert given is not None
        if given.dim() != axes:
            raise ValueError(_wrong_axes(given, axes))
        if mask is not None:
            require_mask(mask, tuple(given.shape), "[B, T]" if axes == 2 else "[B]")
        if inputs_embeds is None:
            return self.embed(given)
        check_tokens("the model", inputs_embeds, self.config.d_model, axes + 1)
        embedded: Tensor = self.encoder(inputs_embeds)
        return embedded


def _wrong_axes(tokens: Tensor, axes: int) -> str:
    if axes == 1:
        return (
            f"step expects one token per row, [B], got {list(tokens.shape)}. Use prefill for "
            "prompts."
        )
    way = "Add a batch axis to one sequence with unsqueeze(0)." if tokens.dim() == 1 else ""
    return f"tokens must be [B, T], got {list(tokens.shape)}. {way}".rstrip()
