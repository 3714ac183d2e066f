r"""Posterior summaries and predictive uncertainty per token, computed only on request.

The predictive entropy splits exactly. With read-outs y ~ posterior and p(o | y) the decoder,

.. math:: H[E_y\, p(o|y)] \;=\; E_y H[p(o|y)] \;+\; I(o; y)

the first part (aleatoric) would remain even if the latent were known, the second (epistemic, a
mutual information) is what knowing the latent would resolve. The latent here is the read-out of the
LAST block only: uncertainty of earlier blocks and of the weights is in neither part. It is not
epistemic uncertainty in the sense of ensembles or Bayesian weights.
"""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from kalman_attention._typing import Mask
from kalman_attention.filtering.innovation import noise_scale
from kalman_attention.filtering.moment import KLAState
from kalman_attention.models.block import Block, BlockOutput
from kalman_attention.models.output import Writer
from kalman_attention.nn.kla import KLA
from kalman_attention.nn.readout import Readout
from kalman_attention.ops.kla_scan import kla_scan
from kalman_attention.ops.smooth import kla_innovations

if TYPE_CHECKING:
    from kalman_attention.models.language_model import LanguageModel


VarianceOf = Literal["readout", "output"]


class Prediction(NamedTuple):
    """A distribution over the next token and its entropies, in nats.

    Attributes:
        log_probs: ``[..., vocab_size]``.
        entropy: of the distribution, ``[...]``.
        aleatoric: mean entropy given the last read-out, ``[...]``; None without samples.
        epistemic: mutual information with the last read-out, at least 0, ``[...]``; None without
            samples. It covers that read-out only, not earlier blocks or the weights.
    """

    log_probs: Tensor
    entropy: Tensor
    aleatoric: Tensor | None
    epistemic: Tensor | None


class Uncertainty(NamedTuple):
    """Posterior summaries of a sequence.

    Attributes:
        variance: posterior variance of every block's read-out, ``[B, T, d_inner]``, or of what
            its mixer adds to the residual stream, ``[B, T, d_model]``; None for a block without a
            posterior.
        gain: Kalman gain of every block, as the share of the state that each token replaced:
            sum_n k_n K_n / N with K = s k lam_v, in [0, 1), ``[B, T, d_inner]``; None as above.
        entropy: of the predicted next token, in nats, ``[B, T]``.
        aleatoric: the part of it that knowing the last read-out would not resolve, ``[B, T]``; None
            without samples.
        epistemic: the part of it that knowing the last read-out would resolve, ``[B, T]``: the
            mutual information with that read-out only, not with earlier blocks or the weights;
            None without samples.
    """

    variance: tuple[Tensor | None, ...]
    gain: tuple[Tensor | None, ...]
    entropy: Tensor
    aleatoric: Tensor | None
    epistemic: Tensor | None


class Beliefs:
    """A visitor that collects variance and gain of every block; None for one without a posterior.

    Args:
        states: states that the pass continues from, one per block; None for the initial states.
        mask: as for the pass.
        cu_seqlens: as for the pass.
        variance_of: ``"readout"``, or ``"output"`` for what the mixer adds to the residual stream.
        noise_scale: also estimate from the innovations by how much variances are too small.

    Attributes:
        variance: of every block's read-out, ``[B, T, d_inner]``, or output, ``[B, T, d_model]``.
        gain: Kalman gain of every block, ``[B, T, d_inner]``.
        factor: estimated factor of every block's variances, ``[B, T, d_inner]``; None if it was not
            asked for, and for slots that share a precision.
    """

    def __init__(
        self,
        states: Sequence[Any] | None = None,
        mask: Mask | None = None,
        cu_seqlens: Tensor | None = None,
        variance_of: VarianceOf = "readout",
        noise_scale: bool = False,
    ) -> None:
        if variance_of not in ("readout", "output"):
            raise ValueError(f"variance_of must be 'readout' or 'output', got {variance_of!r}.")
        if noise_scale and not (mask is None and cu_seqlens is None):
            raise ValueError(
                "the noise level is estimated over whole rows: no mask, no cu_seqlens."
            )
        self._output = variance_of == "output"
        self.variance: list[Tensor | None] = []
        self.gain: list[Tensor | None] = []
        self.factor: list[Tensor | None] = []
        self._noise_scale = noise_scale
        self._states, self._mask, self._cu_seqlens = states, mask, cu_seqlens

    def __call__(self, block: Block, found: BlockOutput) -> None:
        """Look at one block."""
        read, gain, variance, factor = found.readout, None, None, None
        if read is not None and isinstance(block.mixer, KLA):
            state = None if self._states is None else self._states[len(self.gain)].belief
            gain = kalman_gain(block.mixer, read, self._mask, self._cu_seqlens, state)
            variance = read.variance
            if self._output and variance is not None:
                variance = block.mixer.write_variance(variance, *read.context[:2])
            if self._noise_scale and block.mixer.config.shared_slots == 1:
                factor = _variance_factor(block.mixer, read, state)
        self.variance.append(variance)
        self.gain.append(gain)
        self.factor.append(factor)


def predict(logits: Tensor) -> Prediction:
    """Prediction of the posterior mean, from logits ``[..., V]``; float32 at least."""
    log_probs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    return Prediction(log_probs, _entropy(log_probs), None, None)


def predict_marginal(sample_logits: Tensor) -> Prediction:
    """Prediction averaged over the latent, from logits of posterior samples ``[S, ..., V]``."""
    each = predict(sample_logits)
    log_probs = each.log_probs.logsumexp(0) - math.log(len(sample_logits))
    entropy, aleatoric = _entropy(log_probs), each.entropy.mean(0)
    return Prediction(log_probs, entropy, aleatoric, (entropy - aleatoric).clamp(min=0.0))


def predictions(
    model: Writer,
    found: Readout,
    *,
    num_samples: int = 0,
    generator: torch.Generator | None = None,
    chunk_size: int = 64,
) -> Iterator[Prediction]:
    """Predictions for successive chunks of the sequence, from one pass over the trunk.

    Args:
        model: the model that was read.
        found: what ``model.read`` returned, ``[B, T, ...]``.
        num_samples: number of posterior samples (KLA+); 0 decodes the posterior mean.
        generator: source of randomness.
        chunk_size: positions decoded at once, which bounds the memory to S x chunk x vocabulary
            numbers.

    Yields:
        Predictions ``[B, chunk, ...]``.
    """
    for piece in found.split(chunk_size):
        yield predict_readout(model, piece, num_samples, generator)


def predict_readout(
    model: Writer, found: Readout, num_samples: int = 0, generator: torch.Generator | None = None
) -> Prediction:
    """Prediction from the mean or from samples of a read-out; all positions at once."""
    if num_samples == 0:
        return predict(model.write(found.mean, *found.context))
    samples = found.sample(num_samples, generator)
    return predict_marginal(model.write(samples, *found.context))


@torch.no_grad()
def uncertainty(
    model: "LanguageModel",
    input_ids: Tensor,
    *,
    mask: Mask | None = None,
    cu_seqlens: Tensor | None = None,
    num_samples: int = 0,
    generator: torch.Generator | None = None,
    variance_of: VarianceOf = "readout",
) -> Uncertainty:
    """Variance, gain and entropies at every token; see ``LanguageModel.uncertainty``."""
    seen = Beliefs(None, mask, cu_seqlens, variance_of)
    hold = num_samples > 0 or model.config.layers[-1] == "kla"
    found = model.walk(
        model.embed(input_ids),
        mask=mask,
        cu_seqlens=cu_seqlens,
        return_variance=True,
        generator=generator,
        hold=hold,
        visit=seen,
    )
    if found.readout is None:
        whole = predict(model.logits(found.y))
        return Uncertainty(tuple(seen.variance), tuple(seen.gain), whole.entropy, None, None)
    parts = predictions(model, found.readout, num_samples=num_samples, generator=generator)
    entropies = [(p.entropy, p.aleatoric, p.epistemic) for p in parts]
    total, aleatoric, epistemic = (_join(column) for column in zip(*entropies, strict=True))
    assert total is not None
    return Uncertainty(tuple(seen.variance), tuple(seen.gain), total, aleatoric, epistemic)


def _join(parts: tuple[Tensor | None, ...]) -> Tensor | None:
    known = [part for part in parts if part is not None]
    return torch.cat(known, 1) if known else None


def kalman_gain(
    layer: KLA,
    found: Readout,
    mask: Mask | None = None,
    cu_seqlens: Tensor | None = None,
    state: KLAState | None = None,
) -> Tensor:
    """Share of the state that each token replaced, mean over slots, ``[B, T, d_inner]``.

    A slot keeps the share r = 1 - k K of its predicted mean. Running the scan with the key as the
    query gives sum_n k_n^2 s_n, so nothing of size ``[B, T, N, D]`` is materialised. Slots that
    share a precision count as one.

    Args:
        layer: the layer that was read.
        found: its read-out.
        mask: the mask it was read with.
        cu_seqlens: the document boundaries it was read with.
        state: the state it was read from; None for the prior.
    """
    e = found.evidence
    filtered = _filtering(layer, found, mask, cu_seqlens, state)
    asked = kla_scan(e.k, **filtered, return_variance=True, engine=layer.config.engine or "auto")
    assert asked.y_var is not None
    return asked.y_var * e.lam_v / layer.config.blocks


def _variance_factor(layer: KLA, found: Readout, state: KLAState | None) -> Tensor:
    """By how much the innovations so far say that variances are too small, ``[B, T, d_inner]``."""
    seen = kla_innovations(**_filtering(layer, found, None, None, state))
    return noise_scale(seen.normalised, found.evidence.lam_v).factor


def _filtering(
    layer: KLA,
    found: Readout,
    mask: Mask | None,
    cu_seqlens: Tensor | None,
    state: KLAState | None,
) -> dict[str, Any]:
    """What the layer passed to the scan, except the query; in float32 at least."""
    e, dtype = found.evidence, torch.promote_types(found.evidence.v.dtype, torch.float32)
    rows = e.v.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    a_bar, p_bar, prior = layer.prior(rows)
    initial = prior if state is None else state
    return {
        "k": e.k,
        "v": e.v.to(dtype),
        "lam_v": e.lam_v,
        "a_bar": a_bar.to(dtype),
        "p_bar": p_bar.to(dtype),
        "dt": e.dt,
        "state": KLAState(initial.mean.to(dtype), initial.variance.to(dtype)),
        "mask": mask,
        "cu_seqlens": cu_seqlens,
    }


def _entropy(log_probs: Tensor) -> Tensor:
    return -(log_probs.exp() * log_probs).sum(-1)
