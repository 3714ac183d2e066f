"""Everything that the page shows about one sequence, as plain data.

The page contains the evidence of every KLA layer (keys, queries, precisions and dynamics) and runs
the filter itself, in ``script.js``, for the layer, channel and token that the reader selects: the
weights of all channels would be T^2 D numbers per layer.
"""

import base64
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kalman_attention.data.tokenizer import Tokenizer
from kalman_attention.evaluation.scores import score_predictions
from kalman_attention.models.block import Block, BlockOutput
from kalman_attention.models.language_model import LanguageModel
from kalman_attention.models.plan import format_plan
from kalman_attention.models.uncertainty import Beliefs, predict
from kalman_attention.nn.kla import KLA
from kalman_attention.nn.readout import Readout
from kalman_attention.ops.frames import into_frames
from kalman_attention.tasks.task import IGNORE, Task

MOST_TOKENS = 512
"""Longer texts are cut: the page is for close inspection."""

_TOP = 5  # predictions listed per token


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A sequence to inspect.

    Attributes:
        tokens: ``[T]``.
        targets: the target after each token, ``[T]``; ``IGNORE`` for none.
        pieces: display text of each token.
        name: maps a token to its name in lists.
        kind: ``"text"``, where a prediction is shown at the token that it predicts, or ``"task"``,
            where it is shown at the token that it is made from.
        about: one line on the origin of the sequence.
    """

    tokens: Tensor
    targets: Tensor
    pieces: list[str]
    name: Callable[[int], str]
    kind: str
    about: str


def text_subject(tokenizer: Tokenizer, text: str, most: int = MOST_TOKENS) -> Subject:
    """A text, preceded by start of text."""
    ids = tokenizer.encode(text)
    shown = ids[:most]
    if not shown:
        raise ValueError("the text is empty: enter some text.")
    tokens = torch.tensor([tokenizer.bos, *shown])
    specials = set(tokenizer.special_ids())

    def name(token: int) -> str:
        if token in specials:
            return str(tokenizer.raw.id_to_token(token))
        return tokenizer.decode([token])

    rest = "" if len(shown) == len(ids) else f"; the first of {len(ids):,}"
    return Subject(
        tokens=tokens,
        targets=torch.cat([tokens[1:], torch.tensor([IGNORE])]),
        pieces=[tokenizer.bos_token, *tokenizer.pieces(shown)],
        name=name,
        kind="text",
        about=f"{len(shown):,} tokens{rest}",
    )


def task_subject(task: Task, name: str, *, seed: int = 0, index: int = 0) -> Subject:
    """A sequence of the test set of a synthetic task.

    Args:
        task: the task.
        name: its display name.
        seed: random seed of the test set.
        index: index of the sequence.
    """
    if index >= task.size("test"):
        raise ValueError(f"the test set has {task.size('test'):,} sequences, numbered from 0.")
    found = task.generate("test", seed=seed, count=index + 1)
    names = task.token_names()
    tokens = found.inputs[index]
    return Subject(
        tokens=tokens,
        targets=found.targets[index],
        pieces=[names[i] for i in tokens.tolist()],
        name=names.__getitem__,
        kind="task",
        about=f"{name}, test sequence {index} of seed {seed}; {len(tokens):,} tokens",
    )


@dataclass
class _Trace:
    """A visitor that collects variances, gains and the read-out of every block."""

    beliefs: Beliefs = field(default_factory=Beliefs)
    layers: list[tuple[Block, Readout | None]] = field(default_factory=list)

    def __call__(self, block: Block, found: BlockOutput) -> None:
        """Look at one block."""
        self.beliefs(block, found)
        self.layers.append((block, found.readout))


@torch.no_grad()
def look(model: LanguageModel, subject: Subject, *, title: str) -> dict[str, Any]:
    """Everything that the page shows, ready for JSON.

    Args:
        model: any language model; blocks other than KLA have no variance, gain or weights.
        subject: the sequence.
        title: display name of the model.
    """
    if int(subject.tokens.max()) >= model.config.vocab_size:
        raise ValueError(
            f"the sequence contains token {int(subject.tokens.max())}, but the model has a "
            f"vocabulary of {model.config.vocab_size:,}: it was trained on something else."
        )
    trace = _Trace()
    ids = subject.tokens.unsqueeze(0).to(model.embedding.weight.device)
    found = model.walk(model.embed(ids), return_variance=True, visit=trace)
    prediction = predict(model.logits(found.y))
    targets = subject.targets.to(ids.device).unsqueeze(0)
    columns = score_predictions([prediction], targets.clamp(min=0))
    if not bool(columns["nll"].isfinite().all()):
        raise FloatingPointError("the predictions of the model are not finite.")
    counted = targets[0] != IGNORE
    scores = {
        name: _shown(columns[name][0], counted, subject.kind)
        for name in ("nll", "entropy", "max_prob")
    }
    top = prediction.log_probs[0].exp().topk(min(_TOP, model.config.vocab_size))
    lists = [
        [[subject.name(i), round(p, 5)] for i, p in zip(places, values, strict=True)]
        for places, values in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    ]
    wanted = [subject.name(i) if i >= 0 else None for i in subject.targets.tolist()]
    if subject.kind == "text":  # each prediction is shown at the token that it predicts
        lists, wanted = [[], *lists[:-1]], [None, *wanted[:-1]]
    return {
        "title": title,
        "about": subject.about,
        "model": f"{format_plan(model.config.layers)}, {model.num_parameters():,} parameters",
        "kind": subject.kind,
        "tokens": subject.pieces,
        "scores": scores,
        "top": lists,
        "wanted": wanted,
        "layers": [_layer(*pair, i, trace.beliefs) for i, pair in enumerate(trace.layers)],
    }


def _shown(values: Tensor, counted: Tensor, kind: str) -> list[float | None]:
    """One value per token, or None where there is no target."""
    flat = [
        round(x, 5) if there else None
        for x, there in zip(values.tolist(), counted.tolist(), strict=True)
    ]
    return [None, *flat[:-1]] if kind == "text" else flat


def _layer(block: Block, read: Readout | None, place: int, beliefs: Beliefs) -> dict[str, Any]:
    """A block: its kind, and for KLA its variance, gain and evidence."""
    variance, gain = beliefs.variance[place], beliefs.gain[place]
    if read is None or variance is None or gain is None or not isinstance(block.mixer, KLA):
        return {"kind": block.kind}
    evidence, (a_bar, p_bar, first) = read.evidence, block.mixer.prior(1)
    q, k = evidence.q, evidence.k
    if evidence.u_h is not None:
        q, k, *_ = into_frames(q, k, evidence.u_h)
    arrays = {
        "q": q[0],
        "k": k[0],
        "precision": evidence.lam_v[0],
        "decay": a_bar,
        "noise": p_bar,
        "variance0": first.variance[0],
    }
    if evidence.dt is not None:
        arrays["steps"] = evidence.dt[0]
    return {
        "kind": block.kind,
        "slots": q.shape[-1],
        "blocks": a_bar.shape[0],
        "channels": a_bar.shape[1],
        "log_variance": _rounded(variance[0].float().log().mean(-1)),
        "gain": _rounded(gain[0].float().mean(-1)),
        **{name: _packed(array) for name, array in arrays.items()},
    }


def _rounded(values: Tensor) -> list[float]:
    return [round(x, 5) for x in values.tolist()]


def _packed(array: Tensor) -> str:
    """Float32, little-endian, as base64."""
    return base64.b64encode(array.float().cpu().numpy().astype("<f4").tobytes()).decode()
