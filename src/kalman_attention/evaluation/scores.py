"""Every score of every token of a text: what the model predicted, and what its filters believed.

The prediction for a token is made before it is read: ``nll``, ``entropy`` and ``max_prob`` are of
that moment. ``log_variance`` and ``gain`` are of the moment after: what the token did to the belief
of each block. A Kalman variance never depends on the values that were observed, only on keys,
queries, precisions, decay and noise: it says how much was seen, not whether that was a surprise.
``scaled_variance``, on request, multiplies it by a noise level estimated from the innovations so
far (``filtering.innovation.noise_scale``), which does depend on them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kalman_attention.models.language_model import LanguageModel
from kalman_attention.models.uncertainty import Beliefs, Prediction, predict, predictions
from kalman_attention.nn.readout import Readout

Array = NDArray[np.float64]

PADDING = -100
"""What fills up the end of a window that has fewer tokens than the others."""

_POSITIONS = 128
_PREDICTED = ("nll", "entropy", "max_prob", "correct", "epistemic")


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What a model makes of n windows of W tokens; NaN at padding.

    Attributes:
        nll: negative log-likelihood of each token given those before it, in nats, ``[n, W]``.
        entropy: of the prediction for it, in nats, ``[n, W]``.
        max_prob: probability of the most likely token at its place, ``[n, W]``.
        correct: 1 where the most likely token is the right one, 0 elsewhere, ``[n, W]``.
        log_variance: log of the posterior variance of each block's read-out after the token, mean
            over channels, ``[n, blocks, W]``; NaN for a block without a belief.
        gain: share of each block's belief that the token replaced, mean over channels and slots,
            in [0, 1), ``[n, blocks, W]``; NaN as above.
        scaled_variance: ``log_variance`` with the noise level estimated since the window began,
            ``[n, blocks, W]``; NaN unless asked for, and where slots share a precision.
        epistemic: mutual information of the prediction for the token with the read-out of the last
            block only, in nats, ``[n, W]``; NaN without samples.
        hidden: what the head sees, mean over the tokens of a window, ``[n, width]``.
        mixers: kind of each block, such as ``"kla"``.
    """

    nll: Array
    entropy: Array
    max_prob: Array
    correct: Array
    log_variance: Array
    gain: Array
    scaled_variance: Array
    epistemic: Array
    hidden: Array
    mixers: tuple[str, ...]

    @property
    def tokens(self) -> NDArray[np.int64]:
        """How many tokens each window has, ``[n]``."""
        counts: NDArray[np.int64] = np.isfinite(self.nll).sum(1)
        return counts

    @property
    def believing(self) -> list[int]:
        """The blocks that hold a belief: those of KLA."""
        return [i for i, mixer in enumerate(self.mixers) if mixer == "kla"]

    def of_tokens(self) -> dict[str, Array]:
        """The scores by name, ``[n, W]`` each; variance and gain of the last block that has them.

        A score that this model does not have is left out.
        """
        found = {name: getattr(self, name) for name in ("nll", "entropy", "max_prob")}
        if self.believing:
            last = self.believing[-1]
            found |= {"log_variance": self.log_variance[:, last], "gain": self.gain[:, last]}
            found["scaled_variance"] = self.scaled_variance[:, last]
        found["epistemic"] = self.epistemic
        return {name: values for name, values in found.items() if np.isfinite(values).any()}

    def of_windows(self) -> dict[str, Array]:
        """The same of windows: means over their tokens, ``[n]`` each; nll as perplexity.

        The rest of a text, if it is less than half a window, is NaN: a mean of few tokens is not
        comparable with the others.
        """
        rest = (2 * self.tokens < self.nll.shape[1]) & (len(self.nll) > 1)
        found = {
            name: np.where(rest, np.nan, np.nanmean(values, 1))
            for name, values in self.of_tokens().items()
        }
        return {"perplexity": np.exp(found.pop("nll")), **found}


def cut(tokens: Sequence[int], bos: int, size: int) -> Tensor:
    """A text as windows that ``score_windows`` takes, ``[n, size + 1]``.

    Each window begins with the token before its first one, or with start of text; the last may end
    in padding.

    Args:
        tokens: of the text, without start of text.
        bos: start of text.
        size: tokens that each window scores.
    """
    count = -(-len(tokens) // size)
    whole = torch.full((count * size + 1,), PADDING)
    whole[: len(tokens) + 1] = torch.tensor([bos, *tokens])
    return whole.unfold(0, size + 1, size) if count else whole.new_empty(0, size + 1)


@torch.no_grad()
def score_windows(
    model: LanguageModel,
    windows: Tensor,
    *,
    carry: bool = False,
    batch_size: int = 16,
    num_samples: int = 0,
    noise_scale: bool = False,
    seed: int = 0,
    report: Callable[[int], None] | None = None,
) -> Scores:
    """All scores of all tokens of windows, but for the first of each, which is only read.

    Args:
        model: any language model; what it has no belief for is NaN.
        windows: tokens, ``[n, W + 1]``; ``PADDING`` at the end of a window that is shorter.
        carry: take the windows for pieces of one text, as ``cut`` makes them, each of which goes on
            from the state of the one before; False lets each start afresh.
        batch_size: windows at a time, if they are not carried; changes nothing else.
        num_samples: posterior samples; with some, predictions are those of KLA+ and
            ``epistemic`` is known. The last block must then be KLA.
        noise_scale: compute ``scaled_variance`` too, by a loop over the tokens; not with ``carry``.
        seed: random seed of the samples.
        report: called with the number of windows that are done.

    Returns:
        The scores, as numpy arrays.

    Raises:
        FloatingPointError: the model gives a token a probability that is not finite.
    """
    if windows.dim() != 2 or windows.shape[1] < 2 or len(windows) == 0:
        raise ValueError(
            f"windows must be [n, W + 1] with n and W at least 1, got {list(windows.shape)}."
        )
    if bool((windows[:, :2] < 0).any()):
        raise ValueError("every window needs at least two tokens: one to read, one to score.")
    if carry and noise_scale:
        raise ValueError("the noise level is estimated window by window: it cannot be carried.")
    device = model.embedding.weight.device
    reader = _Reader(model, num_samples, noise_scale, torch.Generator(device).manual_seed(seed))
    previous: _Piece | None = None
    pieces: list[_Piece] = []
    size = 1 if carry else batch_size
    for begin in range(0, len(windows), size):
        rows = windows[begin : begin + size].to(device)
        pieces.append(reader.read(rows, previous))
        previous = pieces[-1] if carry else None
        if report is not None:
            report(begin + len(rows))
    columns = {
        name: np.concatenate([piece.scores[name].double().cpu().numpy() for piece in pieces])
        for name in pieces[0].scores
    }
    return Scores(mixers=tuple(block.kind for block in model.stack()), **columns)


class _Piece(NamedTuple):
    """The scores of some windows by name, and what the windows after them go on from."""

    scores: dict[str, Tensor]
    states: tuple[Any, ...]
    ahead: Prediction


@dataclass(frozen=True)
class _Reader:
    """One pass over some windows."""

    model: LanguageModel
    num_samples: int
    noise_scale: bool
    generator: torch.Generator

    def read(self, rows: Tensor, previous: _Piece | None) -> _Piece:
        """Score windows ``[B, W + 1]``, going on from the windows before them if there are any.

        The token before a window has then been read, and what follows it has been predicted.
        """
        model, targets = self.model, rows[:, 1:]
        # Padding stands on the right, where nothing before it can see it.
        inputs = (rows if previous is None else targets).clamp(min=0)
        states = None if previous is None else previous.states
        seen = Beliefs(states, noise_scale=self.noise_scale)
        found = model.walk(
            model.embed(inputs),
            states,
            return_variance=True,
            generator=self.generator,
            hold=self.num_samples > 0,
            visit=seen,
        )
        y, held = found.y, found.readout
        if held is not None:
            y = model.stack()[-1].resume(held.mean, *held.context)
        hidden = model.decode(y)
        before = [] if previous is None else [previous.ahead]
        predicted = [*before, *self._predict(hidden, held, slice(None, -1))]
        (ahead,) = self._predict(hidden, held, slice(-1, None))
        W, counted = targets.shape[1], targets >= 0
        columns = score_predictions(predicted, targets.clamp(min=0))
        columns["log_variance"] = _column(
            [None if v is None else v.float().log() for v in seen.variance], hidden
        )
        columns["gain"] = _column(seen.gain, hidden)
        factors = [None if c is None else c.float().log() for c in seen.factor]
        columns["scaled_variance"] = columns["log_variance"] + _column(factors, hidden)
        scores = {
            name: x[..., -W:].masked_fill(~(counted if x.dim() == 2 else counted[:, None]), np.nan)
            for name, x in columns.items()
        }
        if not bool(scores["nll"][counted].isfinite().all()):
            raise FloatingPointError(
                "the model gives a token a probability that is not finite: its weights are "
                "damaged, or its training has diverged."
            )
        share = counted / counted.sum(1, keepdim=True).clamp(min=1)
        scores["hidden"] = torch.einsum("bt,btd->bd", share.double(), hidden[:, -W:].double())
        return _Piece(scores, found.state, ahead)

    def _predict(self, hidden: Tensor, held: Readout | None, where: slice) -> Iterator[Prediction]:
        """Predictions from some positions, in pieces."""
        if held is None:
            for piece in torch.split(hidden[:, where], _POSITIONS, 1):
                yield predict(self.model.head_logits(piece))
        else:
            yield from predictions(
                self.model,
                held.map(lambda x: x[:, where]),
                num_samples=self.num_samples,
                generator=self.generator,
                chunk_size=_POSITIONS,
            )


def score_predictions(parts: Sequence[Prediction], targets: Tensor) -> dict[str, Tensor]:
    """What predictions say about the tokens that came, by name, ``[B, W]`` each.

    Args:
        parts: predictions of successive positions.
        targets: the tokens that came, ``[B, W]``.
    """
    columns: dict[str, list[Tensor]] = {name: [] for name in _PREDICTED}
    sizes = [part.entropy.shape[1] for part in parts]
    for part, wanted in zip(parts, torch.split(targets, sizes, 1), strict=True):
        best = part.log_probs.max(-1)
        columns["nll"].append(-part.log_probs.gather(-1, wanted.unsqueeze(-1)).squeeze(-1))
        columns["entropy"].append(part.entropy)
        columns["max_prob"].append(best.values.exp())
        columns["correct"].append((best.indices == wanted).float())
        nan = torch.full_like(part.entropy, torch.nan)
        columns["epistemic"].append(nan if part.epistemic is None else part.epistemic)
    return {name: torch.cat(column, 1) for name, column in columns.items()}


def _column(values: Sequence[Tensor | None], like: Tensor) -> Tensor:
    """Means over channels, one row per block, ``[B, blocks, T]``; NaN for a block without any."""
    nan = torch.full(like.shape[:2], torch.nan, device=like.device)
    return torch.stack([nan if x is None else x.float().mean(-1) for x in values], 1)
