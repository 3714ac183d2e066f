"""``kla score``: score tokens and windows of texts: surprise, uncertainty, unusual passages."""

import argparse
import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kalman_attention._files import write_atomically
from kalman_attention._progress import Progress
from kalman_attention._tables import render
from kalman_attention.cli import numbers
from kalman_attention.cli.arguments import (
    add_checkpoint,
    add_dtype,
    add_number,
    add_out_folder,
    add_samples,
    open_checkpoint,
)
from kalman_attention.cli.paths import read_texts

if TYPE_CHECKING:
    from kalman_attention.evaluation.checkpoint import Checkpoint
    from kalman_attention.evaluation.detection import Reference
    from kalman_attention.evaluation.scores import Scores

LABELS = {
    "perplexity": "perplexity",
    "nll": "surprise (nats)",
    "entropy": "entropy (nats)",
    "max_prob": "top probability",
    "log_variance": "log-variance",
    "gain": "gain",
    "epistemic": "epistemic (nats)",
    "mahalanobis": "Mahalanobis",
}
"""Scores, and their labels in tables and figures."""


class _Text(NamedTuple):
    """A text, its tokens as text, and its scores."""

    pieces: list[str]
    scores: "Scores"
    windows: dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_checkpoint(parser)
    add_dtype(parser)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="texts to score")
    parser.add_argument(
        "--reference",
        type=Path,
        metavar="FILE",
        help="a text of the kind that the model was trained on: half of its windows fit the "
        "Mahalanobis distance of hidden states, the other half defines usual scores (default: "
        "none)",
    )
    add_number(parser, "--window", numbers.positive_int, "tokens per window", default=64)
    add_number(
        parser,
        "--show",
        numbers.nonnegative_int,
        "print the N windows of each text with the highest perplexity, in the order of the text",
        default=12,
    )
    add_samples(
        parser,
        "posterior samples (KLA+), which also give the epistemic part of the entropy; 0 uses the "
        "mean",
    )
    add_out_folder(parser, "write scores.json, windows.csv and figures (default: print only)")


def run(args: argparse.Namespace) -> int:
    """Score, print tables, and write files if requested."""
    from kalman_attention.evaluation.checkpoint import naming
    from kalman_attention.evaluation.detection import Reference, require_libraries

    require_libraries()
    texts = read_texts(args.files)
    known = read_texts([args.reference] if args.reference else ())
    found = open_checkpoint(args)
    with naming(args.checkpoint):
        usual = [Reference(_score(args, found, name, text)) for name, text in known.items()]
        reference = usual[0] if usual else None
        scored = {name: _text(args, found, reference, name, text) for name, text in texts.items()}
    print(f"{_beliefs(next(iter(scored.values())).scores)}\n")
    for name, text in scored.items():
        print(f"{name}\n{_window_table(args, text, reference)}\n")
    print(_summary_table(scored))
    if reference is not None:
        print(f"\n{_detection_table(args, scored, reference)}")
    if args.out is not None:
        _write(args, scored, reference)
    return 0


def _text(
    args: argparse.Namespace,
    found: "Checkpoint",
    reference: "Reference | None",
    name: str,
    text: str,
) -> _Text:
    scores = _score(args, found, name, text)
    windows = scores.of_windows() if reference is None else reference.windows(scores)
    return _Text(found.tokenizer.pieces(found.tokenizer.encode(text)), scores, windows)


def _score(args: argparse.Namespace, found: "Checkpoint", name: str, text: str) -> "Scores":
    """Score every window of a text, with everything before it as context."""
    from kalman_attention.evaluation.scores import cut, score_windows

    windows = cut(found.tokenizer.encode(text), found.tokenizer.bos, args.window)
    progress = Progress(f"scoring {name}", len(windows), "windows")
    scores = score_windows(
        found.model,
        windows,
        carry=True,
        num_samples=args.num_samples,
        seed=args.seed,
        report=progress.update,
    )
    progress.close()
    return scores


def _beliefs(scores: "Scores") -> str:
    """Which layers have variance and gain, as a sentence."""
    without = [f"{i} ({kind})" for i, kind in enumerate(scores.mixers) if kind != "kla"]
    if not scores.believing:
        return "variance and gain: none, as this model has no KLA layer."
    told = f"variance and gain: layer {scores.believing[-1]}, counted from 0"
    return f"{told}; layers without: {', '.join(without)}." if without else f"{told}."


def _window_table(args: argparse.Namespace, text: _Text, reference: "Reference | None") -> str:
    import numpy as np

    order = np.argsort(-text.windows["perplexity"], kind="stable")[: args.show]
    marks = reference.unusual(text.windows) if reference is not None else {}
    rows = []
    for i in sorted(order.tolist()):
        begin = i * args.window
        pieces = text.pieces[begin : begin + args.window]
        cells = [
            _number(values[i]) + ("*" if name in marks and marks[name][i] else "")
            for name, values in text.windows.items()
        ]
        rows.append([f"{begin}-{begin + len(pieces) - 1}", _opening(pieces), *cells])
    header = ["tokens", "text", *(LABELS[name] for name in text.windows)]
    count = len(text.scores.nll)
    told = f"{len(rows)} of {count} windows of {args.window} tokens, highest perplexity"
    star = "; * beyond 95 % of the reference" if marks else ""
    return f"{told}{star}\n\n{render(header, rows)}"


def _opening(pieces: list[str], most: int = 36) -> str:
    text = re.sub(r"\s+", " ", "".join(pieces)).strip()
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4g}"


def _summary_table(scored: dict[str, _Text]) -> str:
    """Perplexity and calibration of each text."""
    rows = []
    for name, text in scored.items():
        c = _calibration(text)
        rows.append(
            [
                name,
                f"{int(text.scores.tokens.sum()):,}",
                f"{_perplexity(text.scores):.2f}",
                *(f"{x:.4f}" for x in (c["accuracy"], c["ece"], c["aurc"])),
            ]
        )
    return render(["text", "tokens", "perplexity", "accuracy", "ECE", "AURC"], rows)


def _perplexity(scores: "Scores") -> float:
    import numpy as np

    return float(np.exp(np.nanmean(scores.nll)))


def _calibration(text: _Text) -> dict[str, Any]:
    from kalman_attention.evaluation.detection import calibrate

    return calibrate(text.scores.max_prob, text.scores.correct)._asdict()


def _detection_table(
    args: argparse.Namespace, scored: dict[str, _Text], reference: "Reference"
) -> str:
    rows = [
        [name, LABELS[score], f"{d.auroc:.3f}", f"{d.fpr95:.3f}", f"{d.flagged:.3f}"]
        for name, text in scored.items()
        for score, d in reference.detect(text.windows).items()
    ]
    header = ["text", "score", "AUROC", "FPR95", "windows beyond 95 %"]
    told = (
        f"windows of each text against {reference.held_out} windows of {args.reference} that the "
        "distance was not fitted to\n\n"
    )
    return told + render(header, rows)


def _write(
    args: argparse.Namespace, scored: dict[str, _Text], reference: "Reference | None"
) -> None:
    """Write all scores as JSON, windows as CSV, and one figure per text."""
    args.out.mkdir(parents=True, exist_ok=True)
    first = next(iter(scored.values())).scores
    result = {
        "checkpoint": str(args.checkpoint),
        "settings": {
            "window": args.window,
            "state": "carried",
            "num_samples": args.num_samples,
            "seed": args.seed,
        },
        "mixers": first.mixers,
        "beliefs": _beliefs(first),
        "reference": reference
        and {
            "file": str(args.reference),
            "windows_fitted": reference.fitted,
            "windows_held_out": reference.held_out,
            "thresholds": reference.thresholds(),
        },
        "texts": {name: _record(text, reference) for name, text in scored.items()},
    }
    paths = [args.out / "scores.json", args.out / "windows.csv"]
    write_atomically(paths[0], (json.dumps(_plain(result)) + "\n").encode())
    write_atomically(paths[1], _csv(args, scored).encode())
    for path in (*paths, *_draw(args, scored, reference)):
        print(path)


def _record(text: _Text, reference: "Reference | None") -> dict[str, Any]:
    scores = text.scores
    flat = {name: values[values == values] for name, values in scores.of_tokens().items()}
    count = int(scores.tokens.sum())
    layers = {
        f"{name}_of_layers": getattr(scores, name).swapaxes(0, 1).reshape(len(scores.mixers), -1)
        for name in ("log_variance", "gain")
    }
    return {
        "tokens": count,
        "perplexity": _perplexity(scores),
        "calibration": _calibration(text),
        "detection": reference
        and {name: d._asdict() for name, d in reference.detect(text.windows).items()},
        "windows": text.windows,
        "text": text.pieces,
        "token_scores": flat,
        **{name: values[:, :count] for name, values in layers.items()},
    }


def _plain(value: Any) -> Any:
    """Convert a value for JSON, which has neither NaN nor arrays."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _csv(args: argparse.Namespace, scored: dict[str, _Text]) -> str:
    import csv
    import io

    names = list(next(iter(scored.values())).windows)
    sheet = io.StringIO()
    writer = csv.writer(sheet, lineterminator="\n")
    writer.writerow(["text", "window", "first_token", "tokens", *names])
    for name, text in scored.items():
        for i, count in enumerate(text.scores.tokens.tolist()):
            row = [f"{text.windows[score][i]:.6g}" for score in names]
            writer.writerow([name, i, i * args.window, count, *row])
    return sheet.getvalue()


def _draw(
    args: argparse.Namespace, scored: dict[str, _Text], reference: "Reference | None"
) -> list[Path]:
    import numpy as np

    try:
        from kalman_attention.plots.beliefs import plot_scores
        from kalman_attention.plots.common import save_figure
    except ModuleNotFoundError:
        print("no figures: pip install 'kalman_attention[plot]'")
        return []
    paths: list[Path] = []
    for i, (name, text) in enumerate(scored.items()):
        # Over time, show the surprise: the logarithm of a window's perplexity is its mean.
        windows = {"nll": np.log(text.windows["perplexity"]), **text.windows}
        del windows["perplexity"]
        marks = {} if reference is None else reference.unusual(text.windows)
        limits = {} if reference is None else reference.thresholds()
        if reference is not None:
            marks["nll"], limits["nll"] = marks["perplexity"], math.log(limits["perplexity"])
        figure = plot_scores(
            windows,
            {n: x[x == x] for n, x in text.scores.of_tokens().items()},
            size=args.window,
            labels=LABELS,
            thresholds=limits,
            unusual=marks,
            title=f"{Path(name).name}, scored by {args.checkpoint.name}",
        )
        stem = Path(name).stem if len(scored) == 1 else f"{i}-{Path(name).stem}"
        paths += save_figure(figure, args.out / f"{stem}.png")
    return paths
