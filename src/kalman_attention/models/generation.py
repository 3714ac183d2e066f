"""Text generation: greedy or sampled, optionally with the uncertainty about every token."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from kalman_attention._typing import Mask
from kalman_attention.models.uncertainty import Prediction, predict, predict_readout
from kalman_attention.nn.readout import Readout

if TYPE_CHECKING:
    from kalman_attention.models.language_model import LanguageModel


class TokenUncertainty(NamedTuple):
    """How uncertain the model was when it chose each token, ``[B, n]`` each, in nats.

    Attributes:
        entropy: of the predicted distribution.
        log_prob: of the token that was chosen.
        variance: posterior variance of the last read-out, mean over channels; None if the last
            mixer has no posterior.
        aleatoric: part of the entropy that knowing the last read-out would not resolve; None
            without samples.
        epistemic: part of the entropy that knowing it would resolve: the mutual information with
            the last read-out only, not with earlier blocks or the weights; None without samples.
    """

    entropy: Tensor
    log_prob: Tensor
    variance: Tensor | None
    aleatoric: Tensor | None
    epistemic: Tensor | None


class Generation(NamedTuple):
    """New tokens.

    Attributes:
        tokens: ``[B, n]``; a row that has stopped is filled up with the stop token.
        uncertainty: one entry per token, or None if not requested.
    """

    tokens: Tensor
    uncertainty: TokenUncertainty | None


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: 0 selects the most likely token.
        top_k: sample only from the ``top_k`` most likely tokens.
        top_p: sample only from the most likely tokens that together reach this probability.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be 0 or more, got {self.temperature!r}.")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1 token, got {self.top_k!r}.")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be a probability above 0, got {self.top_p!r}.")

    def choose(self, log_probs: Tensor, generator: torch.Generator | None) -> Tensor:
        """Tokens ``[B]`` from log-probabilities ``[B, V]``."""
        if self.temperature == 0.0:
            return log_probs.argmax(-1)
        scores = log_probs / self.temperature
        if self.top_k is not None:
            k = min(self.top_k, scores.shape[-1])
            scores = scores.masked_fill(scores < scores.topk(k).values[:, -1:], -torch.inf)
        if self.top_p is not None:
            ordered, order = scores.softmax(-1).sort(descending=True)
            # A token is dropped if those before it suffice, so the most likely one always stays.
            surplus = ordered.cumsum(-1) - ordered >= self.top_p
            dropped = torch.zeros_like(surplus).scatter(-1, order, surplus)
            scores = scores.masked_fill(dropped, -torch.inf)
        return torch.multinomial(scores.softmax(-1), 1, generator=generator).squeeze(-1)


class _Look(NamedTuple):
    """Prediction of the model at one position of every row."""

    prediction: Prediction
    variance: Tensor | None
    states: tuple[object, ...]

    def at(self, token: Tensor) -> TokenUncertainty:
        """Uncertainty about ``token``, ``[B]`` each."""
        log_probs, entropy, aleatoric, epistemic = self.prediction
        log_prob = log_probs.gather(-1, token.unsqueeze(-1)).squeeze(-1)
        return TokenUncertainty(entropy, log_prob, self.variance, aleatoric, epistemic)


def generate(
    model: "LanguageModel",
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    output_uncertainty: bool = False,
    **options: Any,
) -> Generation:
    """Continue prompts; see ``LanguageModel.generate``."""
    found = list(
        stream(
            model,
            input_ids,
            max_new_tokens=max_new_tokens,
            output_uncertainty=output_uncertainty,
            **options,
        )
    )
    chosen = torch.stack([step.tokens for step in found], 1) if found else input_ids[:, :0]
    looks = [step.uncertainty for step in found if step.uncertainty is not None]
    return Generation(chosen, _gather(looks, chosen) if output_uncertainty else None)


@torch.no_grad()
def stream(
    model: "LanguageModel",
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    states: tuple[Any, ...] | None = None,
    mask: Mask | None = None,
    sampling: Sampling | None = None,
    stop_token: int | None = None,
    generator: torch.Generator | None = None,
    num_samples: int = 0,
    output_uncertainty: bool = False,
) -> Iterator[Generation]:
    """Continue prompts one token at a time; arguments as for ``LanguageModel.generate``.

    Yields:
        The next token of every row, ``[B]``, until all rows have stopped; a row that has stopped
        repeats the stop token.
    """
    if input_ids.dim() != 2:
        raise ValueError(
            f"prompts must be [B, T], got {list(input_ids.shape)}. Add a batch axis to one prompt "
            "with unsqueeze(0)."
        )
    B, T = input_ids.shape
    if T == 0 or (mask is not None and not bool(mask.any(1).all())):
        raise ValueError("every prompt needs at least one token, such as the start-of-text token.")
    for name, value in (("max_new_tokens", max_new_tokens), ("num_samples", num_samples)):
        if value < 0:
            raise ValueError(f"{name} must be 0 or more, got {value}.")
    sampling = sampling or Sampling()
    reader = _Reader(model, num_samples, output_uncertainty, generator)
    look = reader.prompt(input_ids, states, mask, T + max_new_tokens)
    alive = torch.ones(B, dtype=torch.bool, device=input_ids.device)
    for i in range(max_new_tokens):
        if bool(look.prediction.log_probs.isnan().any()):
            raise FloatingPointError(
                "the model predicts NaN, from which no token can be chosen. Its weights are "
                "damaged, or its training has diverged."
            )
        token = sampling.choose(look.prediction.log_probs, generator)
        if stop_token is not None:
            token = torch.where(alive, token, stop_token)
            alive = alive & (token != stop_token)
        yield Generation(token, look.at(token) if output_uncertainty else None)
        if i + 1 == max_new_tokens or not bool(alive.any()):
            break
        look = reader.step(token, look.states, None if stop_token is None else alive)


class _Reader:
    """Reads a model one position at a time, through the posterior if needed."""

    def __init__(
        self,
        model: "LanguageModel",
        num_samples: int,
        output_uncertainty: bool,
        generator: torch.Generator | None,
    ) -> None:
        self.model, self.num_samples, self.generator = model, num_samples, generator
        filters = model.config.layers[-1] == "kla"
        self.through_posterior = num_samples > 0 or (output_uncertainty and filters)

    def prompt(
        self,
        input_ids: Tensor,
        states: tuple[Any, ...] | None,
        mask: Mask | None,
        capacity: int,
    ) -> _Look:
        model = self.model
        if states is None:
            states = model.init_states(len(input_ids), capacity=capacity)
        else:
            states = model.reserve(states, capacity)
        if not self.through_posterior:
            found = model.prefill(input_ids, states=states, mask=mask)
            return _Look(predict(found.logits), None, found.states)
        last = last_tokens(input_ids, mask)
        return self._decode(model.read(input_ids, states=states, mask=mask).map(itemgetter(last)))

    def step(self, token: Tensor, states: tuple[object, ...], mask: Mask | None) -> _Look:
        if not self.through_posterior:
            found = self.model.step(token, states, mask=mask)
            return _Look(predict(found.logits), None, found.states)
        return self._decode(self.model.read(token, states=states, mask=mask))

    def _decode(self, read: Readout) -> _Look:
        assert read.variance is not None
        prediction = predict_readout(self.model, read, self.num_samples, self.generator)
        return _Look(prediction, read.variance.float().mean(-1), read.state)


def last_tokens(input_ids: Tensor, mask: Mask | None) -> tuple[Tensor, Tensor]:
    """Row and position of each row's last real token; position 0 in a row without any."""
    rows = torch.arange(len(input_ids), device=input_ids.device)
    if mask is None:
        return rows, rows.new_full(rows.shape, input_ids.shape[1] - 1)
    place = torch.arange(mask.shape[1], device=mask.device)
    return rows, torch.where(mask, place, -1).amax(1).clamp(min=0)


def _gather(looks: list[TokenUncertainty], tokens: Tensor) -> TokenUncertainty:
    if not looks:
        empty = tokens.new_zeros(tokens.shape, dtype=torch.float32)
        return TokenUncertainty(empty, empty, None, None, None)
    return TokenUncertainty._make(
        None if column[0] is None else torch.stack(column, 1) for column in zip(*looks, strict=True)
    )
