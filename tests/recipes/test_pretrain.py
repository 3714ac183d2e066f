"""Pretraining: recipes in numbers, runs that resume, runs that fail without losing anything."""

import dataclasses
import errno
import json
import os

import pytest
import torch

pytest.importorskip("tokenizers")

from kalman_attention import load_model
from kalman_attention.data.loader import PackingLoader, WindowLoader
from kalman_attention.data.shards import ShardedTokens
from kalman_attention.data.tokenizer import TOKENIZER
from kalman_attention.evaluation.checkpoint import RUN, load_checkpoint, newest_run, trained_on
from kalman_attention.models.names import ALIASES, NAMES
from kalman_attention.models.presets import PRESETS
from kalman_attention.models.storage import WEIGHTS
from kalman_attention.recipes import pretrain_run
from kalman_attention.recipes.pretrain import recipe
from kalman_attention.recipes.pretrain_budget import budget_rows, make_budget
from kalman_attention.recipes.pretrain_run import SUMMARY, pretrain
from kalman_attention.train import schedule
from kalman_attention.train.checkpoint import CheckpointError, checkpoints
from kalman_attention.train.metrics import METRICS, read_metrics
from tests.data.small import shards

pytestmark = pytest.mark.usefixtures("no_flush")


def small(**changes):
    """Two blocks' worth of seconds: six updates of two micro-batches."""
    found = {
        "tokens": 6 * 64,
        "batch_tokens": 64,
        "seq_len": 16,
        "micro_batch": 2,
        "eval_every": 3,
        "log_every": 1,
        "seed": 1,
    }
    return recipe(found.pop("name", "nano"), **{**found, **changes})


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return shards(tmp_path_factory.mktemp("corpus"))


def weights(folder):
    return load_model(folder).state_dict()


def equal(one, other):
    return all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize(
    ("name", "steps", "rows", "scale"),
    [("kla-45m", 13_733, 64, 0.6222), ("kla-180m", 20_790, 256, 0.7515)],
)
def test_the_papers_numbers(name, steps, rows, scale):
    chosen = recipe(name)
    assert chosen.steps == steps
    assert chosen.accumulate * chosen.micro_batch == rows
    assert chosen.seq_len == 2048
    plan = make_budget(chosen)
    bases = {"embedding": 0.3, "head": 4e-3, "hidden": 4e-3, "vector": 4e-3, "state_space": 4e-4}
    assert plan.rates == pytest.approx({k: v * scale for k, v in bases.items()}, rel=2e-4)
    assert plan.tokens / plan.parameters == pytest.approx(40 if rows == 64 else 60.6, rel=0.02)


def test_effective_rates_of_45m():
    rates = make_budget(recipe("kla-45m")).rates
    assert f"{rates['embedding']:.4f}" == "0.1867"
    assert f"{rates['hidden']:.3e}" == f"{rates['head']:.3e}" == "2.489e-03"
    assert f"{rates['state_space']:.3e}" == "2.489e-04"


def test_what_is_handed_to_the_training_loop():
    training = recipe("kla-45m").training()
    assert (training.clip, training.schedule, training.decay_fraction) == (3.0, "trapezoidal", 0.4)
    assert (training.warmup_steps, training.dtype, training.accumulate) == (0, "float32", 4)
    warmdown = round(0.4 * 13_733)
    factor = training.factor
    assert factor(0, 13_733) == factor(13_733 - warmdown, 13_733) == 1.0
    assert factor(13_732, 13_733) == pytest.approx(1 / warmdown)
    assert factor(13_000, 13_733) == schedule.trapezoidal(13_000, 13_733)


def test_decay_and_adam():
    with torch.device("meta"):
        model = pretrain_run.LanguageModel("kla-45m")
    groups = {g["name"]: g for g in pretrain_run.build_groups(recipe("kla-45m"), model)}
    decay = {name: group["weight_decay"] for name, group in groups.items()}
    assert decay == {"embedding": 0, "head": 0.1, "hidden": 0.1, "vector": 0, "state_space": 0}
    assert {(g["betas"], g["eps"]) for g in groups.values()} == {((0.8, 0.95), 1e-10)}


def test_the_plan_beside_the_paper():
    rows = {row[0]: row[1:] for row in budget_rows(make_budget(recipe("kla-45m")))}
    assert rows["updates"] == ["13,733", "-"]  # the paper does not print it
    assert rows["peak rate: hidden"] == ["0.002489", "2.5e-3"]
    assert rows["parameters"] == ["45,309,104", "45M"]
    assert rows["without token embedding"] == [f"{45_309_104 - 32_768 * 496:,}", "-"]
    assert rows["epochs over the data"] == ["no data yet", "-"]
    other = {row[0]: row[1:] for row in budget_rows(make_budget(recipe("gpt-45m")))}
    assert other["peak rate: hidden"][1] == other["d_model"][1] == "-"
    assert other["tokens"][1] == "1.8B"
    assert all(row[2] == "-" for row in budget_rows(make_budget(recipe("nano"))))


def test_work_and_memory_of_a_plan():
    plan = make_budget(small(), vocab_size=300, train_tokens=192)
    tokens = 6 * 64
    table = 300 * 128
    assert plan.flops == 6 * (plan.parameters - table) * tokens
    assert plan.state_bytes == 16 * (plan.parameters - table) + 8 * table
    assert dict(row[:2] for row in budget_rows(plan))["epochs over the data"] == "2.00"
    attention = make_budget(recipe("gpt-nano", seq_len=512, micro_batch=16))
    per_token = attention.flops / attention.tokens
    extra = 6 * 512 * 112 * 4
    assert per_token == 6 * (attention.parameters - attention.embedding) + extra
    saving = make_budget(small(gradient_checkpointing=True), vocab_size=300)
    assert saving.activation_bytes < plan.activation_bytes


def test_estimated_memory_is_that_of_the_model():
    # Count what a real forward pass keeps, without weights, and compare.
    chosen = small(seq_len=128, batch_tokens=256, tokens=256)
    model = pretrain_run.build_model(chosen, 300)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def keep(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    tokens = torch.zeros(2, 128, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        found = model.loss(tokens, tokens)
    estimate = make_budget(chosen, vocab_size=300).activation_bytes
    logits = 3 * 4 * 2 * 128 * 300
    assert sum(kept.values()) == pytest.approx(estimate - logits, rel=0.15)
    del found


@pytest.mark.parametrize("name", [*NAMES, *ALIASES])
def test_every_recipe_is_whole(name):
    chosen = recipe(name)
    assert chosen.batch_tokens == chosen.accumulate * chosen.micro_batch * chosen.seq_len
    assert json.loads(json.dumps(chosen.to_dict()))["model"] in PRESETS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_tokens": 100}, "nearest multiple is 96 tokens"),
        ({"tokens": 0}, "tokens must be at least 1"),
    ],
)
def test_recipes_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        small(**changes)


def test_unknown_and_unfit_models():
    with pytest.raises(ValueError, match="unknown preset"):
        recipe("kla-1b")
    with pytest.raises(ValueError, match="needs KLA as the last mixer"):
        recipe("gpt-nano", loss="marginal")


def test_parts(data):
    found = ShardedTokens(data)
    model = pretrain_run.build_model(small(), 300)
    assert model.embedding.weight.dtype == torch.bfloat16
    assert {p.dtype for n, p in model.named_parameters() if n != "embedding.weight"} == {
        torch.float32
    }
    assert model.config.vocab_size == 300
    again = pretrain_run.build_model(small(), 300)
    assert equal(model.state_dict(), again.state_dict())
    assert not equal(model.state_dict(), pretrain_run.build_model(small(seed=2), 300).state_dict())
    window = pretrain_run.build_loader(small(), found)
    assert isinstance(window, WindowLoader)
    halves = pretrain_run.build_loader(small(micro_batch=1), found)
    assert torch.equal(next(window).inputs, torch.cat([next(halves).inputs for _ in range(2)]))
    packing = small(loader="packing")
    assert isinstance(pretrain_run.build_loader(packing, found), PackingLoader)


def test_loss_forgets_at_documents_when_asked(data):
    model = pretrain_run.build_model(small(embedding_dtype="float32"), 300)
    rows = small(micro_batch=8, batch_tokens=128)
    batch = next(pretrain_run.build_loader(rows, ShardedTokens(data)))
    generator = torch.Generator()
    assert batch.starts[:, 1:].any()
    crossing = pretrain_run.build_loss(small())(model, batch, generator)
    assert crossing == model.loss(batch.inputs, batch.targets)
    inputs, targets, borders = batch.packed()
    losses = [
        model.loss(inputs[:, a:b], targets[:, a:b]) * (b - a)
        for a, b in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True)
    ]
    reset = pretrain_run.build_loss(small(reset_state=True))(model, batch, generator)
    assert reset.item() == pytest.approx(sum(losses).item() / inputs.numel(), rel=1e-5)


@pytest.mark.parametrize(
    "changes",
    [{}, {"loader": "packing", "reset_state": True}, {"loss": "marginal", "num_samples": 2}],
    ids=["window", "packing", "marginal"],
)
def test_a_run_and_what_it_leaves(data, tmp_path, changes):
    chosen, folder = small(**changes), tmp_path / "run"
    result = pretrain(chosen, data, folder, progress=False)
    assert (result.step, result.reason) == (6, "max_steps")
    records = read_metrics(folder)
    assert [r["step"] for r in records if r["kind"] == "eval"] == [3, 6]
    found = load_checkpoint(folder)
    assert found.model.embedding.weight.dtype == torch.bfloat16
    assert equal(found.model.state_dict(), weights(folder / "last"))
    assert found.tokenizer.fingerprint == ShardedTokens(data).index.tokenizer
    summary = json.loads((folder / SUMMARY).read_text())
    assert summary["tokens"] == 6 * 64
    assert summary["bits_per_byte"] == records[-1]["bits_per_byte"]
    assert trained_on(folder) == data.resolve()
    assert newest_run(tmp_path) == folder


def test_interrupted_and_continued_it_is_the_same(data, tmp_path, monkeypatch):
    chosen = small(loader="packing")
    pretrain(chosen, data, tmp_path / "whole", progress=False)
    seen = []

    def stop(recipe, data):
        evaluate = build(recipe, data)

        def measured(model):
            seen.append(1)
            if len(seen) == 1:
                raise KeyboardInterrupt
            return evaluate(model)

        return measured

    build = pretrain_run.build_evaluation
    monkeypatch.setattr(pretrain_run, "build_evaluation", stop)
    short = dataclasses.replace(chosen, save_seconds=1e-9)  # a checkpoint after every update
    with pytest.raises(KeyboardInterrupt):
        pretrain(short, data, tmp_path / "cut", progress=False)
    assert load_checkpoint(tmp_path / "cut").model is not None  # the newest checkpoint of the run
    assert not (tmp_path / "cut" / WEIGHTS).exists()
    pretrain(chosen, data, tmp_path / "cut", progress=False)
    assert equal(weights(tmp_path / "whole"), weights(tmp_path / "cut"))
    without = [
        {k: v for k, v in r.items() if k != "seconds"} for r in read_metrics(tmp_path / "cut")
    ]
    assert without == [
        {k: v for k, v in r.items() if k != "seconds"} for r in read_metrics(tmp_path / "whole")
    ]


@pytest.mark.parametrize("form", ["run", "hf"])
def test_start_from_another_run(data, tmp_path, form):
    source = tmp_path / "first"
    pretrain(small(), data, source, progress=False)
    if form == "hf":
        pytest.importorskip("transformers")
        from kalman_attention.cli.main import main

        assert main(["export", str(source), "--to", "hf", str(tmp_path / "hf")]) == 0
        source = tmp_path / "hf"
    folder, chosen = tmp_path / "second", small(seed=2)
    pretrain(chosen, data, folder, progress=False, init=source)
    records = read_metrics(folder)
    assert records[0]["step"] == 1  # a schedule of its own
    assert json.loads((folder / RUN).read_text())["init"] == str(source)
    # Its first loss is that of the weights it was given, not of new ones.
    model = pretrain_run.build_model(chosen, ShardedTokens(data).tokenizer().vocab_size)
    pretrain_run.start_from(model, ShardedTokens(data).tokenizer(), source)
    batch = next(iter(pretrain_run.build_loader(chosen, ShardedTokens(data))))
    assert equal(load_checkpoint(source).model.blocks.state_dict(), model.blocks.state_dict())
    assert model.embedding.weight.dtype == torch.bfloat16
    with torch.no_grad():
        loss = pretrain_run.build_loss(chosen)(model, batch, torch.Generator())
    new = pretrain_run.build_model(chosen, model.config.vocab_size)
    with torch.no_grad():
        other = pretrain_run.build_loss(chosen)(new, batch, torch.Generator())
    assert abs(float(loss) - float(other)) > 1e-3
    with pytest.raises(ValueError, match="init"):  # it goes on only as the run it is
        pretrain(chosen, data, folder, progress=False)


def test_what_a_run_cannot_start_from(data, tmp_path):
    pretrain(small(), data, tmp_path / "first", progress=False)
    with pytest.raises(ValueError, match=r"a different model from that of the recipe: .*d_model"):
        pretrain(recipe("micro"), data, tmp_path / "b", progress=False, init=tmp_path / "first")
    (tmp_path / "corpus").mkdir()
    other = shards(tmp_path / "corpus", vocab_size=290)
    with pytest.raises(ValueError, match="trained with another tokenizer"):
        pretrain(small(), other, tmp_path / "c", progress=False, init=tmp_path / "first")
    assert not (tmp_path / "b").exists()
    assert not (tmp_path / "c").exists()


def test_a_run_of_another_config_is_refused(data, tmp_path):
    pretrain(small(), data, tmp_path, progress=False)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for changes, what in (
        ({"clip": 1.0}, "config.clip"),
        ({"loader": "packing"}, "about.loader"),
        ({"embedding_dtype": "float32"}, "model.embedding.weight"),
        ({"seed": 5}, "config.seed"),
    ):
        with pytest.raises(ValueError, match=rf"another run:\n(.*\n)*.*{what}.*\n(.*\n)*.*choose"):
            pretrain(small(**changes), data, tmp_path, progress=False)
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert before == after


def broken(data, tmp_path):
    copy = tmp_path / "broken"
    copy.mkdir()
    for path in data.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


def truncate(folder):
    path = folder / "train_00000.bin"
    path.write_bytes(path.read_bytes()[:-2])


def change(folder):
    path = folder / "train_00000.bin"
    found = bytearray(path.read_bytes())
    found[10] ^= 1
    path.write_bytes(found)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (truncate, "train_00000.bin is .* bytes long instead of"),
        (change, "train_00000.bin has changed since it was written: its checksum"),
        (lambda folder: (folder / TOKENIZER).unlink(), "no tokenizer in .*tokenizer.json is miss"),
        (lambda folder: (folder / "index.json").unlink(), "kla data"),
    ],
    ids=["truncated", "changed", "tokenizer", "index"],
)
def test_damaged_data_is_named_before_anything_is_written(data, tmp_path, harm, message):
    folder = broken(data, tmp_path)
    harm(folder)
    with pytest.raises(ValueError, match=message):
        pretrain(small(), folder, tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


class Full:
    """A disk that takes so many writes of checkpoints, and no more."""

    def __init__(self, monkeypatch, files):
        self.left, self.real = files, os.write
        monkeypatch.setattr(os, "write", self)

    def __call__(self, handle, data):
        if len(data) > 1000:  # weights and moments, not the small change
            if self.left == 0:
                self.real(handle, bytes(data[:100]))  # as far as it goes
                raise OSError(errno.ENOSPC, "No space left on device")
            self.left -= 1
        return self.real(handle, data)


def test_a_full_disk_loses_nothing(data, tmp_path, monkeypatch):
    pretrain(small(), data, tmp_path / "whole", progress=False)
    with monkeypatch.context() as patch:
        Full(patch, 4)
        with pytest.raises(CheckpointError, match=r"No space left on device.*is intact"):
            pretrain(small(save_seconds=1e-9), data, tmp_path / "run", progress=False)
    kept = checkpoints(tmp_path / "run" / "checkpoints")
    assert kept
    assert not list((tmp_path / "run" / "checkpoints").glob(".part*"))
    assert not (tmp_path / "run" / WEIGHTS).exists()
    pretrain(small(), data, tmp_path / "run", progress=False)
    assert equal(weights(tmp_path / "whole"), weights(tmp_path / "run"))


def test_a_disk_that_is_full_from_the_start(data, tmp_path, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match=r"the disk is full: .*tokenizer") as caught:
            pretrain(small(), data, tmp_path, progress=False)
    assert str(caught.value).count("the disk is full") == 1
    assert not list(tmp_path.iterdir())
    assert pretrain(small(), data, tmp_path, progress=False).step == 6


@pytest.mark.parametrize("which", [METRICS, WEIGHTS])
def test_a_full_disk_elsewhere(data, tmp_path, monkeypatch, which):
    # When lines of metrics, or the model at the end, cannot be written.
    from kalman_attention.evaluation import checkpoint
    from kalman_attention.train import metrics

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        if which == METRICS:
            patch.setattr(metrics.MetricsLog, "write", full)
        else:
            patch.setattr(checkpoint, "save_model", full)
        with pytest.raises(OSError, match=r"the disk is full.*step-.* is intact.*same command"):
            pretrain(small(), data, tmp_path, progress=False)
    assert not (tmp_path / WEIGHTS).exists()
    assert (tmp_path / RUN).is_file()
    assert pretrain(small(), data, tmp_path, progress=False).step == 6
    assert (tmp_path / WEIGHTS).is_file()
