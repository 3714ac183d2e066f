"""What the loop does at each step, against a loop written by hand."""

import io
import json
import math
import random
import struct
import sys
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from kalman_attention._progress import TrainingProgress, bar, duration
from kalman_attention.parallel.batch import named_tensors, to_device
from kalman_attention.train.config import TrainConfig
from kalman_attention.train.data import StreamBatches, TensorBatches
from kalman_attention.train.loop import fit
from kalman_attention.train.nonfinite import NonFiniteError
from kalman_attention.train.objective import token_evaluation, token_loss
from kalman_attention.train.optim import flat_groups, param_groups
from kalman_attention.train.schedule import trapezoidal
from tests.models.small import small, text
from tests.train.toy import build, records, run, same, weights

pytestmark = pytest.mark.usefixtures("no_flush")


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("groups", [flat_groups, param_groups])
def test_equals_a_loop_by_hand(accumulate, clip, groups, tmp_path):
    tokens = text(7, 6)
    config = TrainConfig(
        max_steps=5, accumulate=accumulate, clip=clip, schedule="trapezoidal", log_every=1
    )
    model = small()
    fit(model, TensorBatches([tokens], 3), token_loss(), config, folder=tmp_path,
        groups=groups(model), progress=False)  # fmt: skip

    other, batches = small(), TensorBatches([tokens], 3)
    optimiser = torch.optim.AdamW(groups(other), fused=True)
    rates = [group["lr"] for group in optimiser.param_groups]
    for step in range(5):
        for group, rate in zip(optimiser.param_groups, rates, strict=True):
            group["lr"] = rate * trapezoidal(step, 5)
        optimiser.zero_grad()
        total = 0.0
        for _ in range(accumulate):
            (rows,) = next(batches)
            loss = other.loss(rows[:, :-1], rows[:, 1:])
            (loss / accumulate).backward()
            total += loss.item() / accumulate
        norm = torch.nn.utils.clip_grad_norm_(other.parameters(), clip or math.inf)
        optimiser.step()
        record = records(tmp_path)[step]
        assert record["loss"] == pytest.approx(total, rel=1e-6)
        assert record["grad_norm"] == pytest.approx(norm.item(), rel=1e-6)
    assert same(weights(model), weights(other))


def scores(*values):
    """An evaluation that returns given values, one after the other."""
    left = iter(values)
    return lambda model: {"score": next(left)}


@pytest.mark.parametrize(
    ("options", "values", "step", "reason", "best"),
    [
        ({"patience": 2}, (1, 3, 2, 2.5, 9), 4, "patience", 2),
        ({"patience": 2}, (1, 3, 2, 3, 9), 4, "patience", 4),  # equals do not improve
        ({}, (0, 0, 0, 0, 0, 0), 6, "max_steps", 6),
        ({"patience": 2, "mode": "min"}, (3, 1, 2, 3, 9), 4, "patience", 2),
        ({"patience": 1, "min_delta": 0.5}, (1, 1.4, 9), 2, "patience", 1),
        ({"patience": 2}, (1, math.nan, math.nan, 5), 3, "patience", 1),
        ({"target": 3.0}, (1, 2, 3, 4), 3, "target", 3),
        ({"target": 2.0, "mode": "min"}, (5, 3, 2, 1), 3, "target", 3),
        ({}, (1, 2, 3, 4, 5, 0), 6, "max_steps", 5),
    ],
)
def test_when_to_stop(options, values, step, reason, best, tmp_path):
    options = {"mode": "max", **options, "monitor": "score", "eval_every": 1, "max_steps": 6}
    _, result = run(tmp_path, evaluate=scores(*values), **options)
    assert (result.step, result.reason, result.best.step) == (step, reason, best)


@pytest.mark.parametrize(
    ("options", "updates", "evaluations"),
    [
        ({"max_steps": 5, "eval_every": 2}, 5, [2, 4, 5]),
        ({"max_steps": 5, "eval_every": None}, 5, [5]),
        ({"max_steps": None, "epochs": 2, "eval_every": "epoch"}, 6, [3, 6]),
        ({"max_steps": None, "epochs": 2, "eval_every": "epoch", "accumulate": 2}, 3, [2, 3]),
    ],
)
def test_lengths(options, updates, evaluations, tmp_path):
    _, result = run(tmp_path, **options)
    assert result.step == updates
    assert [r["step"] for r in result.history if r["kind"] == "eval"] == evaluations


def bad_loss(step, spoil):
    """The loss of the toy, spoilt at one update."""
    _, _, loss, _, _ = build()
    calls = iter(range(100))

    def spoilt(model, batch, generator):
        value = loss(model, batch, generator)
        return spoil(model, value) if next(calls) == step else value

    return spoilt


def infinite_gradient(model, value):
    zero = (model.norm.weight - model.norm.weight.detach()).sum()
    return value + zero.abs().sqrt()  # finite, with an infinite slope


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda model, value: value * math.nan, r"update 3 .*the loss is \[nan\]"),
        (lambda model, value: value * math.inf, r"update 3 .*the loss is \[inf\]"),
        (infinite_gradient, r"norm of the gradients is (nan|inf)\. Gradients .*: norm\.weight\."),
    ],
)
def test_what_is_not_finite_stops_and_is_kept(spoil, message, tmp_path):
    with pytest.raises(NonFiniteError, match=message) as caught:
        run(tmp_path / "bad", loss=bad_loss(3, spoil))
    model, _ = run(tmp_path / "good", max_steps=3, schedule="constant")
    kept = caught.value.folder
    assert kept == tmp_path / "bad" / "nonfinite" / "step-00000003"
    assert str(kept) in str(caught.value)
    before = load_file(kept / "model.safetensors")
    assert same(before, weights(model))  # as they were before the update
    _, batches, _, _, _ = build()
    assert torch.equal(load_file(kept / "batches.safetensors")["batch.0.0"], batches.batch(3)[0])
    report = json.loads((kept / "report.json").read_text())
    assert report["step"] == 3
    assert len(report["nonfinite_gradients"]) >= 1
    assert [r["step"] for r in records(tmp_path / "bad") if r["kind"] == "train"] == [1, 2, 3]


def test_metrics_of_the_loss_are_logged_and_averaged(tmp_path):
    def loss(model, batch, generator):
        inputs = batch[0]
        return model(inputs).square().mean(), {"size": len(inputs), "twice": 2.0 * inputs.mean()}

    model, batches = torch.nn.Linear(1, 1), TensorBatches([torch.ones(3, 1)], 2)
    config = TrainConfig(max_steps=2, accumulate=2, log_every=1)
    found = fit(model, batches, loss, config, folder=tmp_path, progress=False).history
    assert [(r["size"], r["twice"], r["lr"]) for r in found] == [(1.5, 2.0, 1e-3)] * 2
    assert found[1]["seconds"] >= found[0]["seconds"] > 0


def test_every_source_of_randomness_is_a_function_of_the_step(tmp_path):
    drawn = []

    def loss(model, batch, generator):
        drawn.append(
            (torch.rand(()).item(), random.random(), np.random.rand(),
             torch.rand((), generator=generator).item())
        )  # fmt: skip
        return model(batch).mean()

    def train(folder, **options):
        drawn.clear()
        config = TrainConfig(max_steps=3, **options)
        stream = StreamBatches(lambda generator: torch.rand(2, 1, generator=generator))
        fit(torch.nn.Linear(1, 1), stream, loss, config, folder=folder, progress=False)
        return list(drawn)

    state = random.getstate(), np.random.get_state()[1].tolist()
    first, second = train(tmp_path / "a"), train(tmp_path / "b")
    assert first == second
    assert len({x for row in first for x in row}) == 12
    assert train(tmp_path / "c", seed=1) != first
    assert (random.getstate(), np.random.get_state()[1].tolist()) == state


def test_errors_say_what_instead(tmp_path):
    model, batches, loss, config, evaluate = build()
    with pytest.raises(ValueError, match="pass evaluate"):
        fit(model, batches, loss, config, folder=tmp_path)
    with pytest.raises(ValueError, match="'loss', but the evaluation returns only score"):
        run(tmp_path / "a", evaluate=scores(1.0, 1.0))
    with pytest.raises(ValueError, match=r"a scalar, got shape \[3\]"):
        run(tmp_path / "b", loss=lambda model, batch, generator: model(batch[0]).logits[:, 0, 0])
    with pytest.raises(ValueError, match="a metric 'step', a name that the loop uses"):
        run(tmp_path / "c", loss=lambda *args: (loss(*args), {"step": 1}))
    with pytest.raises(ValueError, match="warmup_steps is 9, but there are 7"):
        run(tmp_path / "d", warmup_steps=9)
    foreign = [{"params": [torch.nn.Parameter(torch.ones(2))]}]
    with pytest.raises(ValueError, match="1 parameters that are not part of the model"):
        fit(model, batches, loss, TrainConfig(max_steps=1), folder=tmp_path, groups=foreign)
    stream = StreamBatches(lambda generator: None)
    with pytest.raises(ValueError, match="no length, so there are no epochs"):
        fit(model, stream, loss, TrainConfig(epochs=1), folder=tmp_path / "e", evaluate=evaluate)


def test_token_evaluation_counts_tokens():
    model = small().eval()
    tokens = text(3, 6)
    targets = tokens[:, 1:].clone()
    targets[0] = -100
    pairs = [(tokens[:1, :-1], targets[:1]), (tokens[1:, :-1], targets[1:])]
    with torch.no_grad():
        found = token_evaluation(pairs)(model)
        logits = model(tokens[1:, :-1]).logits
        assert found["loss"] == pytest.approx(model.loss(tokens[:, :-1], targets).item(), rel=1e-5)
        assert token_evaluation([(tokens[1:],)])(model) == token_evaluation(pairs[1:])(model)
    right = (logits.argmax(-1) == tokens[1:, 1:]).double().mean().item()
    assert found["accuracy"] == pytest.approx(right)
    with pytest.raises(ValueError, match="nothing to evaluate"):
        token_evaluation(pairs[:1])(model)


def test_both_losses_learn(tmp_path):
    for kind in ("mean", "marginal"):
        model, batches, _, config, _ = build(max_steps=60, save_every=None, monitor=None)
        result = fit(model, batches, token_loss(kind, num_samples=4), config,
                     folder=tmp_path / kind, progress=False)  # fmt: skip
        losses = [r["loss"] for r in result.history]
        assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps in (3, 7):  # the second call goes on from the first
        model, batches, loss, config, evaluate = build(max_steps=steps, schedule="constant")
        fit(model, batches, loss, config, folder=tmp_path, evaluate=evaluate, progress=False,
            boards=["tensorboard"])  # fmt: skip
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6, 7]
    assert [event.step for event in events.Scalars("eval/accuracy")] == [3, 6, 7]


def test_tensorboard_that_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    model, batches, loss, config, evaluate = build()
    with pytest.raises(ValueError, match="pip install tensorboard"):
        fit(model, batches, loss, config, folder=tmp_path, evaluate=evaluate, progress=False,
            boards=["tensorboard"])  # fmt: skip


def logged(folder):
    """What the files of Weights & Biases hold, file by file: values by name."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        data, at, records = path.read_bytes(), 7, []
        assert len(data) < 1 << 15  # one block of its log: checksum, length and kind before each
        while at + 7 < len(data):
            _, size, kind = struct.unpack_from("<IHB", data, at)
            assert kind == 1  # whole
            if at + 7 + size > len(data):
                break
            record = wandb_internal_pb2.Record.FromString(data[at + 7 : at + 7 + size])
            at += 7 + size
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                names = [x.key or "/".join(x.nested_key) for x in items]
                values = [json.loads(x.value_json) for x in items]
                records.append(dict(zip(names, values, strict=True)))
        found.append(records)
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_weights_and_biases(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="pip install 'kalman_attention[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for steps in (3, 7):  # the second call goes on from the first
        model, batches, loss, config, evaluate = build(max_steps=steps, schedule="constant")
        result = fit(model, batches, loss, config, folder=tmp_path, evaluate=evaluate,
                     progress=False, boards=["wandb"])  # fmt: skip
    deadline = time.monotonic() + 30  # its process may still be writing
    while not any("eval/loss" in r and r["step"] == 7 for r in logged(tmp_path)[-1]):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    first, second = logged(tmp_path)
    losses = {r["step"]: r["train/loss"] for r in first + second if "train/loss" in r}
    expected = {r["step"]: r["loss"] for r in result.history if r["kind"] == "train"}
    assert losses == pytest.approx(expected)
    assert [r["step"] for r in first if "eval/accuracy" in r] == [3]
    assert [r["step"] for r in second if "eval/accuracy" in r] == [6, 7]


def test_boards_that_are_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    model, batches, loss, config, evaluate = build()
    for board, message in (("wandb", r"kalman_attention\[wandb\]"), ("sketch", "unknown board")):
        with pytest.raises(ValueError, match=message):
            fit(model, batches, loss, config, folder=tmp_path, evaluate=evaluate, progress=False,
                boards=[board])  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_on_a_terminal_is_one_line(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    monkeypatch.setenv("COLUMNS", "90")
    stream = Terminal()
    progress = TrainingProgress(8, 0, monitor="accuracy", stream=stream)
    progress.update(1, 2.5)
    progress.evaluated(1, {"loss": 2.0, "accuracy": 0.5}, best=True)
    progress.update(2, 2.25)
    progress.note("resumed")
    progress.update(8, 1.0)
    progress.close()
    first, second, last = stream.getvalue().split("\x1b[1F\x1b[J")  # up one line, erase it
    assert first.startswith("[##------------------] step 1/8  1.0 step/s  loss 2.5000  0:07")
    assert "step 2/8  1.0 step/s  loss 2.2500  eval accuracy 0.5000  0:06 left" in second
    note, end = last.splitlines()
    assert note == "resumed"
    assert end.startswith("[####################] step 8/8")
    assert last.endswith("\n")
    assert max(map(len, (first + second + last).splitlines())) < 90


def test_progress_elsewhere_is_rare_lines(monkeypatch):
    clock = iter(range(0, 1000, 20))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    stream = io.StringIO()
    progress = TrainingProgress(10, 0, stream=stream)
    for step in range(1, 6):
        progress.update(step, 1.0)
    progress.evaluated(5, {"accuracy": 0.25}, best=True)
    progress.close()
    assert stream.getvalue().splitlines() == [
        "step 2/10  0.1 step/s  loss 1.0000  2:40 left",
        "step 4/10  0.1 step/s  loss 1.0000  2:00 left",
        "step 5/10  eval: accuracy 0.2500  best so far",
    ]


def test_progress_can_be_silent(tmp_path, capsys):
    run(tmp_path, max_steps=2)
    run(tmp_path, max_steps=2)
    assert capsys.readouterr() == ("", "")


def test_bars_and_durations():
    assert bar(0.25) == "[#####---------------]"
    assert bar(1.0) == f"[{'#' * 20}]"
    assert [duration(s) for s in (0.2, 59.6, 3725, 200_000)] == [
        "0:00",
        "1:00",
        "1:02:05",
        "2 d 7 h",
    ]


def test_trees_of_tensors():
    tree = {"x": (torch.ones(1), [torch.zeros(2)]), "n": 3}
    assert [name for name, _ in named_tensors(tree)] == ["batch.x.0", "batch.x.1.0"]
    moved = to_device(tree, torch.device("meta"))
    assert moved["x"][0].device.type == "meta"
    assert moved["n"] == 3
