"""The language model: embedding, blocks, final norm, head."""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kalman_attention._typing import Mask
from kalman_attention.losses import marginal_nll, posterior_mean_cross_entropy
from kalman_attention.models.block import Block
from kalman_attention.models.config import LanguageModelConfig
from kalman_attention.models.generation import Generation, Sampling, generate
from kalman_attention.models.output import ModelOutput, ModelReadout
from kalman_attention.models.presets import preset
from kalman_attention.models.scaffold import Encoder, make_decoder, make_encoder
from kalman_attention.models.stack import BlockStack
from kalman_attention.models.uncertainty import Uncertainty, uncertainty
from kalman_attention.models.vocabulary import Embedding, Head
from kalman_attention.nn.mixer import LayerOutput
from kalman_attention.nn.norms import RMSNorm

States = tuple[Any, ...]


class LanguageModel(BlockStack):
    """A stack of mixers that predicts the next token.

    Args:
        config: options, or the name of a preset such as ``"kla-45m"``.
    """

    def __init__(self, config: LanguageModelConfig | str) -> None:
        super().__init__()
        config = preset(config) if isinstance(config, str) else config
        self.config = config
        self.gradient_checkpointing = False
        self.embedding = Embedding(config.vocab_size, config.d_model)
        self.encoder = make_encoder(config)
        self.blocks = nn.ModuleList(Block(config, mixer) for mixer in config.layers)
        self.decoder = make_decoder(config.d_model, config.decoder_widths or (), config.norm_eps)
        self.norm = RMSNorm(config.head_width, config.norm_eps)
        self.head = Head(config.head_width, config.vocab_size, bias=config.head_bias)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight
        self._start()

    @torch.no_grad()
    def _start(self) -> None:
        """Initialise what depends on the model as a whole; the modules have done the rest."""
        if self.embedding.weight.is_meta:
            return  # a model without memory; see Embedding.reset_parameters
        config = self.config
        nn.init.normal_(self.embedding.weight, std=config.embedding_std)
        if config.head_std is not None and not config.tie_embeddings:
            nn.init.normal_(self.head.weight, std=config.head_std)
        branches = len(self.blocks) * (1 if config.mlp == "none" else 2)
        for block in self.stack():
            block.scale_residuals(1.0 / math.sqrt(branches))

    def embed(self, input_ids: Tensor) -> Tensor:
        """What the first block sees of tokens, ``[..., d_model]``, in the dtype of the blocks."""
        dtype = self.norm.weight.dtype
        if isinstance(self.encoder, Encoder):
            return self.encoder.look_up(self.embedding.weight.to(dtype), input_ids)
        same = self.embedding.weight.dtype == dtype  # then any embedding will do
        found: Tensor = self.embedding(input_ids) if same else self.embedding(input_ids, dtype)
        return found

    def init_states(self, batch_size: int, *, capacity: int = 0) -> States:
        """One state per block, before the first token.

        Args:
            batch_size: number of sequences.
            capacity: tokens that will follow; lets attention blocks set memory aside.
        """
        return tuple(b.mixer.init_state(batch_size, capacity=capacity) for b in self.stack())

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
            states: states of the last call on the same rows; None starts afresh.
            mask: ``[B, T]`` bool, False for padding, left or right.
            cu_seqlens: borders of documents packed into one row (B = 1), ``[n + 1]`` int; states
                are then per document.
            return_variances: also return the posterior variance of every block's read-out.
            logits_to_keep: compute logits of the last so many positions only; None for all.

        Returns:
            ``ModelOutput(logits, states, hidden, variances)``.
        """
        x = self._embed(input_ids, inputs_embeds)
        x, new, variances = self._walk(x, states, mask, cu_seqlens, return_variances)
        x = self.decode(x)
        kept = x if logits_to_keep is None else x[:, max(0, x.shape[1] - logits_to_keep) :]
        return ModelOutput(
            self.head_logits(kept), tuple(new), x, tuple(variances) if return_variances else None
        )

    def prefill(
        self, input_ids: Tensor, *, states: States | None = None, mask: Mask | None = None
    ) -> ModelOutput:
        """Read a prompt: ``forward`` with the logits of each row's last real token, ``[B, V]``."""
        found = self(input_ids, states=states, mask=mask, logits_to_keep=0)
        if mask is None:
            last = found.hidden[:, -1]
        else:
            place = torch.arange(mask.shape[1], device=mask.device)
            index = torch.where(mask, place, -1).amax(1).clamp(min=0)
            last = found.hidden[torch.arange(len(index), device=mask.device), index]
        return ModelOutput(self.head_logits(last), found.states, last, None)

    def step(
        self,
        token: Tensor,
        states: States,
        *,
        mask: Mask | None = None,
        return_variances: bool = False,
    ) -> ModelOutput:
        """One token per row, ``[B]``; logits come out as ``[B, vocab_size]``."""
        x = self.embed(token)
        sample = self.config.between_blocks == "sample"
        last = len(self.blocks) - 1
        new, variances = [], []
        for i, (block, state) in enumerate(zip(self.stack(), states, strict=True)):
            found = block.step(
                x, state, mask=mask, return_variance=return_variances, sample=sample and i < last
            )
            x = found.y
            new.append(found.state)
            variances.append(found.variance)
        x = self.decode(x)
        return ModelOutput(
            self.head_logits(x), tuple(new), x, tuple(variances) if return_variances else None
        )

    def read(
        self,
        input_ids: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        states: States | None = None,
        mask: Mask | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> ModelReadout:
        """Run up to the posterior of the last block's read-out; arguments as for ``forward``.

        ``write(mean)`` then gives the logits of ``forward``, and ``write(samples)`` those of
        posterior samples, from this one pass.
        """
        x = self._embed(input_ids, inputs_embeds)
        states = self._check_states(states)
        sample = self.config.between_blocks == "sample"
        *first, last = self.stack()
        new = []
        for block, state in zip(first, states, strict=False):
            found = self._run(block, x, state, mask, cu_seqlens, False, sample)
            x = found.y
            new.append(found.state)
        held = last.hold(x, states[-1], mask, cu_seqlens)
        return ModelReadout(held, (*new, held.readout.state))

    def read_step(self, token: Tensor, states: States, *, mask: Mask | None = None) -> ModelReadout:
        """``read`` for one token per row, ``[B]``."""
        x = self.embed(token)
        sample = self.config.between_blocks == "sample"
        *first, last = self.stack()
        new = []
        for block, state in zip(first, states, strict=False):
            found = block.step(x, state, mask=mask, sample=sample)
            x = found.y
            new.append(found.state)
        held = last.hold_step(x, states[-1], mask=mask)
        return ModelReadout(held, (*new, held.readout.state))

    def write(self, latent: Tensor, stream: Tensor, gate: Tensor, residual: Tensor) -> Tensor:
        """Logits from read-outs of the last block, ``[..., T, d_inner]``: the decoder of KLA+.

        Args:
            latent: the posterior mean of ``read``, or samples of it.
            stream: from ``ModelReadout.context``, with gate and residual.
            gate: likewise.
            residual: likewise.

        Returns:
            ``[..., T, vocab_size]``.
        """
        last = self.stack()[-1]
        return self.logits(last.resume(latent, stream, gate, residual))

    def loss(
        self,
        input_ids: Tensor,
        targets: Tensor,
        *,
        kind: Literal["mean", "marginal"] = "mean",
        num_samples: int = 10,
        generator: torch.Generator | None = None,
        mask: Mask | None = None,
        cu_seqlens: Tensor | None = None,
        chunk_size: int | None = None,
        ignore_index: int = -100,
        reduction: Literal["mean", "sum"] = "mean",
    ) -> Tensor:
        """Training loss: what the model makes of ``targets``, the tokens after ``input_ids``.

        Args:
            input_ids: ``[B, T]``.
            targets: ``[B, T]``; positions with ``ignore_index`` do not count.
            kind: ``"mean"``, cross-entropy of the posterior mean, or ``"marginal"``, the negative
                log marginal likelihood (KLA+), which also trains the variances.
            num_samples: posterior samples of the marginal likelihood.
            generator: source of their randomness.
            mask: as for ``forward``.
            cu_seqlens: as for ``forward``.
            chunk_size: positions decoded at a time; None for a default that bounds memory.
            ignore_index: target that does not count.
            reduction: ``"mean"`` over the positions that count, or their ``"sum"``.

        Returns:
            The loss, in nats.
        """
        if kind == "mean":
            x, _, _ = self._walk(self.embed(input_ids), None, mask, cu_seqlens, False)
            chunk_size = chunk_size or 512
            if self.config.decoder_widths:  # decode only what counts, few positions in some tasks
                counted = targets != ignore_index
                chunk_size *= len(targets)
                x, targets = (z[counted].unsqueeze(0) for z in (x, targets))
            return posterior_mean_cross_entropy(
                self.logits,
                x,
                targets,
                chunk_size=chunk_size,
                ignore_index=ignore_index,
                reduction=reduction,
            )
        read = self.read(input_ids, mask=mask, cu_seqlens=cu_seqlens)
        return marginal_nll(
            self.write,
            read.mean,
            read.variance,
            targets,
            context=read.context,
            num_samples=num_samples,
            generator=generator,
            chunk_size=chunk_size,
            ignore_index=ignore_index,
            reduction=reduction,
        )

    def uncertainty(
        self,
        input_ids: Tensor,
        *,
        mask: Mask | None = None,
        cu_seqlens: Tensor | None = None,
        num_samples: int = 0,
        generator: torch.Generator | None = None,
    ) -> Uncertainty:
        """How sure the model is at every token: variances, Kalman gains, entropies.

        Args:
            input_ids: ``[B, T]``.
            mask: as for ``forward``.
            cu_seqlens: as for ``forward``.
            num_samples: posterior samples; with some, the entropy is that of the marginal
                prediction (KLA+) and comes split into aleatoric and epistemic parts.
            generator: source of their randomness.

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
        )

    def generate(
        self,
        input_ids: Tensor,
        *,
        max_new_tokens: int,
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
            mask: ``[B, T]`` bool, False for padding, left or right.
            max_new_tokens: length of the continuation.
            temperature: 0 takes the most likely token; otherwise tokens are drawn.
            top_k: draw among so many of the most likely tokens only.
            top_p: draw among the most likely tokens that together reach this probability only.
            stop_token: ends a row.
            generator: source of the randomness.
            num_samples: predict with so many posterior samples (KLA+); 0 uses the posterior mean.
            output_uncertainty: also say how sure the model was of every token.

        Returns:
            ``Generation(tokens, uncertainty)``.
        """
        return generate(
            self,
            input_ids,
            max_new_tokens=max_new_tokens,
            mask=mask,
            sampling=Sampling(temperature=temperature, top_k=top_k, top_p=top_p),
            stop_token=stop_token,
            generator=generator,
            num_samples=num_samples,
            output_uncertainty=output_uncertainty,
        )

    def _walk(
        self,
        x: Tensor,
        states: States | None,
        mask: Mask | None,
        cu_seqlens: Tensor | None,
        return_variances: bool,
    ) -> tuple[Tensor, list[Any], list[Tensor | None]]:
        """Through all blocks: the residual stream after the last, states and variances."""
        states = self._check_states(states)
        sample = self.config.between_blocks == "sample"
        last = len(self.blocks) - 1
        new, variances = [], []
        for i, (block, state) in enumerate(zip(self.stack(), states, strict=True)):
            found = self._run(
                block, x, state, mask, cu_seqlens, return_variances, sample and i < last
            )
            x = found.y
            new.append(found.state)
            variances.append(found.variance)
        return x, new, variances

    def _run(self, block: Block, x: Tensor, *args: Any) -> LayerOutput:
        state, mask, cu_seqlens, return_variance, sample = args

        def run(x: Tensor) -> LayerOutput:
            found: LayerOutput = block(
                x, state, mask, cu_seqlens, return_variance=return_variance, sample=sample
            )
            return found

        if self.gradient_checkpointing and torch.is_grad_enabled():
            return checkpoint(run, x, use_reentrant=False)  # type: ignore[no-any-return]
        return run(x)

    def _embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass either input_ids or inputs_embeds, one of the two.")
        if inputs_embeds is not None:
            return self.encoder(inputs_embeds)  # type: ignore[no-any-return]
        assert input_ids is not None
        return self.embed(input_ids)

    def _check_states(self, states: States | None) -> States:
        if states is None:
            return (None,) * len(self.blocks)
        if len(states) != len(self.blocks):
            raise ValueError(
                f"states holds {len(states)} entries but the model has {len(self.blocks)} blocks: "
                "one state per block, as ModelOutput.states or init_states(batch_size) give them."
            )
        return states

    def decode(self, x: Tensor) -> Tensor:
        """What the head sees of the stream after the last block (``ModelOutput.hidden``)."""
        hidden: Tensor = self.norm(self.decoder(x))
        return hidden

    def head_logits(self, x: Tensor) -> Tensor:
        """Logits from what the head sees (``ModelOutput.hidden``)."""
        logits: Tensor = self.head(x)
        cap = self.config.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def logits(self, x: Tensor) -> Tensor:
        """Logits from the residual stream after the last block, ``[..., d_model]``."""
        return self.head_logits(self.decode(x))
