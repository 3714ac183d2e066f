"""``KLAModel`` and ``KLAForCausalLM``: the native blocks behind transformers' interfaces.

The modules are the native ones (``Embedding``, ``Block``, ``RMSNorm``, ``Head``), so weights,
mathematics and engines are shared; ``native()`` and ``from_native()`` convert between the two
without a copy. This module adds only what transformers requires: its arguments, outputs, cache and
``generate``.
"""

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from kalman_attention.baselines.attention import Attend
from kalman_attention.models.block import Block, BlockOutput
from kalman_attention.models.hf.caching_kla import StaticAttentionCacheLayer, adopt
from kalman_attention.models.hf.configuration_kla import KLAHFConfig
from kalman_attention.models.hf.generation_kla import KLAGenerationMixin
from kalman_attention.models.hf.inputs_kla import (
    counted_share,
    next_labels,
    packed_borders,
    real_tokens,
)
from kalman_attention.models.hf.pretrained_kla import KLAPreTrainedModel
from kalman_attention.models.language_model import LanguageModel
from kalman_attention.models.stack import Variances, read_loss, walk
from kalman_attention.models.uncertainty import Uncertainty, predictions
from kalman_attention.models.vocabulary import Embedding, Head
from kalman_attention.nn.decoding import project
from kalman_attention.nn.float32 import KeepsFloat32
from kalman_attention.nn.norms import RMSNorm
from kalman_attention.nn.readout import Readout


@dataclass
class KLAModelOutput(BaseModelOutputWithPast):
    """Output of ``KLAModel``.

    Attributes:
        variances: posterior variance of every block's read-out, ``[B, T, inner_size]`` (None for
            attention), with ``output_variances=True``.
        readout: the posterior of the last block's read-out, with ``hold_readout=True``.
    """

    variances: tuple[Tensor | None, ...] | None = None
    readout: Readout | None = None


@dataclass
class KLACausalLMOutput(CausalLMOutputWithPast):
    """Output of ``KLAForCausalLM``; ``variances`` as in ``KLAModelOutput``."""

    variances: tuple[Tensor | None, ...] | None = None


class KLABlock(GradientCheckpointingLayer, Block):
    """The native block, with the activation checkpointing of transformers."""

    def __call__(self, *args: Any, **options: Any) -> BlockOutput:
        """The block's output; a call that returns a posterior or its variance is not checkpointed.

        A reentrant checkpoint passes gradients to the first output only.
        """
        if options.get("hold") or options.get("return_variance"):
            return nn.Module.__call__(self, *args, **options)  # type: ignore[no-any-return]
        return super().__call__(*args, **options)  # type: ignore[no-any-return]


class KLAModel(KLAPreTrainedModel):
    """Embedding, blocks and final norm.

    Args:
        config: options.
    """

    def __init__(self, config: KLAHFConfig) -> None:
        super().__init__(config)
        native = config.to_native()
        self.embedding: nn.Embedding = Embedding(native.vocab_size, native.d_model)
        self.blocks = nn.ModuleList(KLABlock(native, mixer) for mixer in native.layers)
        self.norm = RMSNorm(native.d_model, native.norm_eps)
        # The dynamics stay float32 in every dtype: bfloat16 cannot represent 0.9999.
        # transformers searches parameter names for these strings; full paths are unambiguous.
        self._keep_in_fp32_modules_strict = [
            name for name, module in self.named_modules() if isinstance(module, KeepsFloat32)
        ]
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        """The token embedding."""
        return self.embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the token embedding."""
        self.embedding = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        output_variances: bool = False,
        hold_readout: bool = False,
        **kwargs: Any,
    ) -> KLAModelOutput | tuple[Any, ...]:
        """Hidden states of every token.

        Args:
            input_ids: tokens, ``[B, T]``.
            attention_mask: 0 for padding, left or right: ``[B, T]``, or ``[B, past + T]`` with a
                cache. All ones is the same as None.
            position_ids: used only to find documents packed into one row (positions that restart at
                0), and not with a cache; attention derives its positions from the tokens.
            past_key_values: the cache of earlier calls, which is updated. Any number of tokens may
                follow.
            inputs_embeds: embeddings instead of tokens, ``[B, T, hidden_size]``.
            use_cache: create a cache if none is given; None follows the configuration.
            output_hidden_states: also return the embeddings and every block's output.
            return_dict: False for a plain tuple.
            cu_seqlens: document boundaries in one packed row (B = 1), ``[n + 1]``; takes precedence
                over ``position_ids``. (transformers' name ``cu_seq_lens_q`` means the same.)
            output_variances: also return the posterior variance of every block's read-out.
            hold_readout: also return the posterior of the last block's read-out.
            **kwargs: by the conventions of transformers. ``output_attentions=True`` also returns
                the weights of every attention block, ``[B, heads, T, S]``; the rest is ignored.
        """
        weights = self._weights(kwargs.get("output_attentions", self.config.output_attentions))
        x = self._embed(input_ids, inputs_embeds)
        T = x.shape[1]
        cache = self._cache(past_key_values, use_cache)
        past = 0 if cache is None else cache.get_seq_length()
        mask = real_tokens(attention_mask, T, past if isinstance(past, int) else None)
        borders = kwargs.get("cu_seq_lens_q") if cu_seqlens is None else cu_seqlens
        if borders is None and mask is None and past_key_values is None:
            borders = packed_borders(position_ids, T)
        cache = self._without_packing(cache, borders, past)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        with weights:
            out = self._through(
                x, cache, mask, borders, output_variances, bool(output_hidden_states), hold_readout
            )
        out.attentions = weights.found
        return out if self._wants_dict(return_dict) else out.to_tuple()

    def _through(
        self,
        x: Tensor,
        cache: Cache | None,
        mask: Tensor | None,
        borders: Tensor | None,
        output_variances: bool,
        output_hidden_states: bool,
        hold: bool,
    ) -> KLAModelOutput:
        """Run the blocks from the states in the cache, and store the new states in it."""
        layers: list[Any] = [] if cache is None else list(cache.layers)
        for layer, block in zip(layers, self.stack(), strict=False):
            if isinstance(layer, StaticAttentionCacheLayer):
                layer.prepare(block.mixer, x)  # type: ignore[arg-type]
        states = None if cache is None else [layer.read() for layer in layers]
        # With states, a single token takes the faster decode path, with the same result.
        ready = states is not None and all(state is not None for state in states)
        one = ready and x.shape[1] == 1 and borders is None and not x.requires_grad
        hidden, variances = [x], Variances()

        def timed(z: Tensor) -> Tensor:
            return z.unsqueeze(1) if one else z

        def look(block: Block, found: BlockOutput) -> None:
            variances(block, found)
            if output_hidden_states:
                hidden.append(timed(found.y))

        found = walk(
            self.stack(),
            x[:, 0] if one else x,
            states,
            mask=mask[:, 0] if one and mask is not None else mask,
            cu_seqlens=borders,
            return_variance=output_variances,
            sample=self.config.between_blocks == "sample",
            hold=hold,
            visit=look,
        )
        for layer, state in zip(layers, found.state, strict=False):
            layer.write(state, x.shape[1])
        y, read = timed(found.y), found.readout
        if read is not None:
            read = read.map(timed)
            y = self.stack()[-1].resume(read.mean, *read.context)
        last = self.norm(y)
        shown = [None if v is None else timed(v) for v in variances]
        return KLAModelOutput(
            last_hidden_state=last,
            past_key_values=cache,
            hidden_states=(*hidden[:-1], last) if output_hidden_states else None,
            variances=tuple(shown) if output_variances else None,
            readout=read,
        )

    def _weights(self, wanted: bool | None) -> "_AttentionWeights":
        """Collector of the attention weights of this call, if they are requested."""
        attends = [x for x in self.modules() if isinstance(x, Attend)]
        if wanted and not attends:
            raise ValueError(
                "this model has no attention blocks and so no attention weights: leave "
                "output_attentions out. For the Kalman attention maps of a block, call "
                "evaluation.uncertainty.attention_maps with model.native()."
            )
        fused = not wanted and self.config._attn_implementation != "eager"
        for attend in attends:
            if attend.fused != fused:
                attend.fused = fused
        return _AttentionWeights(attends if wanted else [])

    def stack(self) -> list[KLABlock]:
        """The blocks, in order."""
        return list(self.blocks)  # type: ignore[arg-type]

    def _embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass either input_ids or inputs_embeds, exactly one of the two.")
        return self.embedding(input_ids) if inputs_embeds is None else inputs_embeds

    def _cache(self, cache: Cache | None, use_cache: bool | None) -> Cache | None:
        if cache is None:
            if use_cache is None:
                use_cache = self.config.use_cache and not self.training
            cache = DynamicCache(config=self.config) if use_cache else None
        return None if cache is None else adopt(cache, self.config.mixers)

    def _without_packing(self, cache: Cache | None, borders: Any, past: int) -> Cache | None:
        if borders is None:
            return cache
        if past:
            raise ValueError(
                "documents packed into one row have no past, but past_key_values holds "
                f"{past} tokens. Pass one of the two; native models accept states per document."
            )
        return None

    def _wants_dict(self, return_dict: bool | None) -> bool:
        return self.config.return_dict if return_dict is None else return_dict


class _AttentionWeights:
    """A context manager that collects the weights of attention blocks, in order.

    Args:
        attends: the modules that compute them.
    """

    def __init__(self, attends: list[Attend]) -> None:
        self.attends = attends
        self.found: tuple[Tensor, ...] | None = None

    def __enter__(self) -> None:
        self.hooks = [attend.register_forward_hook(self._keep) for attend in self.attends]

    def __exit__(self, *error: Any) -> None:
        for hook in self.hooks:
            hook.remove()

    def _keep(self, module: nn.Module, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        self.found = (*(self.found or ()), output[1])


class KLAForCausalLM(KLAPreTrainedModel, KLAGenerationMixin):
    """The language model: ``KLAModel`` and a head.

    Args:
        config: options.
    """

    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embedding.weight"}

    def __init__(self, config: KLAHFConfig) -> None:
        super().__init__(config)
        self.model = KLAModel(config)
        self.lm_head = Head(config.hidden_size, config.vocab_size, bias=config.head_bias)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        """The token embedding."""
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the token embedding."""
        self.model.set_input_embeddings(value)

    def set_output_embeddings(self, value: nn.Linear) -> None:
        """Replace the head; it stays in the parameter group of heads (``param_groups``)."""
        if not isinstance(value, Head):
            weight, bias = value.weight, value.bias
            value = Head(value.in_features, value.out_features, bias is not None, device="meta")
            value.weight, value.bias = weight, bias
            value._is_hf_initialized = True  # type: ignore[assignment]  # do not initialise it again
        self.lm_head = value

    @classmethod
    def from_native(cls, native: LanguageModel, **options: Any) -> "KLAForCausalLM":
        """Wrap a native model; the modules are shared, not copied.

        The exception is an embedding stored in lower precision than the rest: transformers
        supports one dtype per model, so the embedding is copied in the dtype of the rest.

        Args:
            native: the model, as returned by ``kalman_attention.load_model(folder)``.
            **options: options of ``KLAHFConfig.from_native``.
        """
        with torch.device("meta"):
            model = cls(KLAHFConfig.from_native(native.config, **options))
        trunk = model.model
        dtype = native.norm.weight.dtype
        same = native.embedding.weight.dtype == dtype
        trunk.embedding = native.embedding if same else copy.deepcopy(native.embedding).to(dtype)
        for block, own in zip(trunk.stack(), native.stack(), strict=True):
            block.norm, block.mixer = own.norm, own.mixer
            block.mlp_norm, block.mlp = own.mlp_norm, own.mlp
        trunk.norm, model.lm_head = native.norm, native.head
        model.train(native.training)
        return model

    def native(self) -> LanguageModel:
        """The native model of the same modules, as for ``kalman_attention.save_model``."""
        with torch.device("meta"):
            native = LanguageModel(self.config.to_native())
        trunk = self.model
        native.embedding = trunk.embedding  # type: ignore[assignment]
        native.blocks, native.norm, native.head = trunk.blocks, trunk.norm, self.lm_head
        native.training = self.training
        return native

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        *,
        cu_seqlens: Tensor | None = None,
        output_variances: bool = False,
        num_samples: int = 0,
        **kwargs: Any,
    ) -> KLACausalLMOutput | tuple[Any, ...]:
        """Logits of the token after each token, and the loss of ``labels``.

        Args:
            input_ids: as for ``KLAModel``.
            attention_mask: as for ``KLAModel``.
            position_ids: as for ``KLAModel``.
            past_key_values: as for ``KLAModel``.
            inputs_embeds: as for ``KLAModel``.
            labels: the tokens themselves, ``[B, T]``, -100 where they do not count; they are
                shifted by one here. The loss is ``config.loss``. Padding predicts nothing: the
                first token of a left-padded row is not a target.
            use_cache: as for ``KLAModel``.
            output_hidden_states: as for ``KLAModel``.
            return_dict: as for ``KLAModel``.
            logits_to_keep: number of last positions to compute logits for (0 for all), or the
                positions themselves.
            cu_seqlens: as for ``KLAModel``.
            output_variances: as for ``KLAModel``.
            num_samples: number of posterior samples to predict with (KLA+): ``logits`` are then
                log-probabilities averaged over the posterior. 0 uses the posterior mean.
            **kwargs: ``num_items_in_batch`` of the Trainer, ``shift_labels``, and further
                arguments of ``KLAModel``.
        """
        marginal = self.config.loss == "marginal" and labels is not None
        found = self.model(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            use_cache,
            output_hidden_states,
            return_dict=True,
            cu_seqlens=cu_seqlens,
            output_variances=output_variances,
            hold_readout=marginal or num_samples > 0,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        if num_samples:
            logits = self._marginal_logits(found.readout, num_samples, kept)
        else:
            logits = self._logits(found.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            if "shift_labels" not in kwargs:
                kwargs["shift_labels"] = targets = next_labels(labels, attention_mask)
                if attention_mask is not None and kwargs.get("num_items_in_batch") is not None:
                    share = counted_share(labels, targets)
                    kwargs["num_items_in_batch"] = kwargs["num_items_in_batch"] * share
            loss = (
                self._marginal_loss(found.readout, **kwargs)
                if marginal
                else self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
            )
        out = KLACausalLMOutput(
            loss=loss,
            logits=logits,
            past_key_values=found.past_key_values,
            hidden_states=found.hidden_states,
            attentions=found.attentions,
            variances=found.variances,
        )
        return out if self.model._wants_dict(return_dict) else out.to_tuple()

    def uncertainty(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        num_samples: int = 0,
        generator: torch.Generator | None = None,
    ) -> Uncertainty:
        """Uncertainty of the model at every token: variances, Kalman gains, entropies.

        Args:
            input_ids: ``[B, T]``.
            attention_mask: ``[B, T]``, 0 for padding.
            cu_seqlens: document boundaries in one packed row.
            num_samples: number of posterior samples. If positive, the entropy is split into an
                aleatoric part and an epistemic part, the mutual information with the last read-out
                only.
            generator: source of randomness.

        Returns:
            ``Uncertainty``, as from the native model.
        """
        return self.native().uncertainty(
            input_ids,
            mask=real_tokens(attention_mask, input_ids.shape[1], 0),
            cu_seqlens=cu_seqlens,
            num_samples=num_samples,
            generator=generator,
        )

    def write(self, latent: Tensor, *context: Tensor) -> Tensor:
        """Logits from read-outs of the last block, as ``LanguageModel.write``."""
        x = self.model.stack()[-1].resume(latent, *context)
        return self._logits(self.model.norm(x))

    def _logits(self, x: Tensor) -> Tensor:
        logits = project(self.lm_head, x)
        cap = self.config.final_logit_softcapping
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _marginal_logits(self, read: Readout, num_samples: int, kept: Any) -> Tensor:
        parts = predictions(self, read.map(lambda z: z[:, kept]), num_samples=num_samples)
        return torch.cat([part.log_probs for part in parts], 1)

    def _marginal_loss(self, read: Readout, shift_labels: Tensor, **kwargs: Any) -> Tensor:
        count = kwargs.get("num_items_in_batch")
        loss = read_loss(
            self.write,
            read,
            shift_labels,
            num_samples=self.config.loss_samples,
            reduction="mean" if count is None else "sum",
        )
        return loss if count is None else loss / count
