"""``generate`` with our cache, and with the uncertainty about every generated token."""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin

from kalman_attention.models.generation import TokenUncertainty
from kalman_attention.models.hf.caching_kla import adopt
from kalman_attention.models.language_model import LanguageModel
from kalman_attention.models.uncertainty import Prediction, predict, predictions


class KLAGenerationMixin(GenerationMixin):
    """The ``generate`` of transformers, with our cache and our uncertainty."""

    @torch.no_grad()
    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *args: Any,
        output_uncertainty: bool = False,
        num_samples: int = 0,
        **kwargs: Any,
    ) -> Any:
        """The ``generate`` of transformers, optionally with the uncertainty about every new token.

        Args:
            inputs: prompts, ``[B, T]``; may be passed as ``input_ids=`` or ``inputs_embeds=``.
            generation_config: as in transformers.
            *args: as in transformers.
            output_uncertainty: return transformers' dictionary (``return_dict_in_generate``) with
                an entry ``uncertainty``, a ``TokenUncertainty`` of ``[rows, new tokens]`` each. It
                describes the model's own distribution, before temperature, beams or other
                processing, and is computed by one more pass over the finished sequences, so that
                it does not depend on the decoding strategy. NaN after the end of a row.
            num_samples: number of posterior samples to predict with (KLA+).
            **kwargs: as in transformers.

        Returns:
            What transformers returns.
        """
        if num_samples:
            kwargs["num_samples"] = num_samples
        if not output_uncertainty:
            return super().generate(inputs, generation_config, *args, **kwargs)
        if kwargs.get("past_key_values") is not None:
            raise ValueError(
                "output_uncertainty needs the whole prompt: leave past_key_values out, or use "
                "model.uncertainty on the text."
            )
        ids, embeds = kwargs.pop("input_ids", inputs), kwargs.get("inputs_embeds")
        options = {**kwargs, "generation_config": generation_config}
        mask = _prompt_mask(self, ids, options)
        if generation_config is None:
            kwargs["return_dict_in_generate"] = True
        else:
            generation_config = copy.deepcopy(generation_config)
            generation_config.return_dict_in_generate = True
        out = super().generate(ids, generation_config, *args, **{**kwargs, "attention_mask": mask})
        # For a prompt of embeddings, transformers returns the new tokens only.
        tokens = out.sequences[:, 0 if ids is None else ids.shape[1] :]
        prompt = self.get_input_embeddings()(ids) if embeds is None else embeds
        found = token_uncertainty(self.native(), prompt, mask, tokens, num_samples)
        over = _ended(self, tokens, options)
        out["uncertainty"] = TokenUncertainty._make(
            None if x is None else x.masked_fill(over, torch.nan) for x in found
        )
        return out

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Let transformers make or check its cache, then put our layers into it."""
        prepare = super()._prepare_cache_for_generation
        found = prepare(generation_config, model_kwargs, *args, **kwargs)
        cache = model_kwargs.get("past_key_values")
        if cache is not None:
            adopt(cache, self.config.mixers)
        return found

    @staticmethod
    def create_masks_for_generate(
        *, inputs_embeds: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> Tensor | None:
        """With a static cache, the mask of this call's tokens, ``[B, T]``; the cache has the rest.

        It then has the same shape at every step, so that one compiled step serves all.
        """
        return None if attention_mask is None else attention_mask[:, -inputs_embeds.shape[1] :]


@torch.no_grad()
def token_uncertainty(
    model: LanguageModel, prompt: Tensor, mask: Tensor, tokens: Tensor, num_samples: int = 0
) -> TokenUncertainty:
    """Read prompt and continuation in one pass, which equals reading them token by token.

    Args:
        model: the native model.
        prompt: embedded prompts, ``[B, T, d_model]``.
        mask: ``[B, T]``, 0 for padding.
        tokens: continuations, ``[B r, n]``: r for every prompt.
        num_samples: number of posterior samples; 0 predicts with the posterior mean.
    """
    r, n = tokens.shape[0] // prompt.shape[0], tokens.shape[1]
    prompt, mask = (x.repeat_interleave(r, 0) for x in (prompt, mask.bool()))
    x = torch.cat([prompt, model.embedding(tokens)], 1)[:, :-1]
    every = torch.cat([mask, torch.ones_like(tokens, dtype=torch.bool)], 1)[:, :-1]
    real = None if bool(every.all()) else every
    if n == 0:
        empty = x.new_zeros(tokens.shape)
        return TokenUncertainty(empty, empty, None, None, None)
    if model.config.layers[-1] != "kla" and not num_samples:
        logits = model(inputs_embeds=x, mask=real, logits_to_keep=n).logits
        return _of_chosen([predict(logits)], tokens, None)
    read = model.read(inputs_embeds=x, mask=real).map(lambda z: z[:, -n:])
    assert read.variance is not None
    parts = list(predictions(model, read, num_samples=num_samples))
    return _of_chosen(parts, tokens, read.variance.float().mean(-1))


def _prompt_mask(model: Any, ids: Tensor | None, kwargs: dict[str, Any]) -> Tensor:
    """The mask passed to ``generate``, or the one implied by the padding token."""
    given: Tensor | None = kwargs.get("attention_mask")
    if given is not None:
        return given
    if ids is None:
        embeds: Tensor = kwargs["inputs_embeds"]
        return torch.ones(embeds.shape[:2], dtype=torch.int64, device=embeds.device)
    pad, ends = _option(model, kwargs, "pad_token_id"), _ends(model, kwargs)
    if pad is None or pad in ends:
        return torch.ones_like(ids)
    mask: Tensor = ids != pad
    return mask.long()


def _ended(model: Any, tokens: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """Positions after the end of a row, ``[B, n]`` bool: after its first end-of-text token."""
    ends = torch.tensor(_ends(model, kwargs), dtype=tokens.dtype, device=tokens.device)
    stop = torch.isin(tokens, ends).long()
    return stop.cumsum(1) - stop > 0


def _ends(model: Any, kwargs: dict[str, Any]) -> list[int]:
    found = _option(model, kwargs, "eos_token_id")
    if found is None:
        return []
    return [found] if isinstance(found, int) else [int(token) for token in found]


def _option(model: Any, kwargs: dict[str, Any], name: str) -> Any:
    """An option of ``generate``, from its arguments, its configuration or that of the model."""
    for source in (kwargs.get("generation_config"), model.generation_config):
        if kwargs.get(name) is not None:
            return kwargs[name]
        if source is not None and getattr(source, name) is not None:
            return getattr(source, name)
    return None


def _of_chosen(
    parts: list[Prediction], tokens: Tensor, variance: Tensor | None
) -> TokenUncertainty:
    def join(values: list[Tensor | None]) -> Tensor | None:
        known = [value for value in values if value is not None]
        return torch.cat(known, 1) if known else None

    log_probs = torch.cat([part.log_probs for part in parts], 1)
    entropy = torch.cat([part.entropy for part in parts], 1)
    return TokenUncertainty(
        entropy=entropy,
        log_prob=log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1),
        variance=variance,
        aleatoric=join([part.aleatoric for part in parts]),
        epistemic=join([part.epistemic for part in parts]),
    )
