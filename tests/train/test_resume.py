"""A run that is cut anywhere ends with the same bits as one that is not."""

import json

import pytest
import torch

from kalman_attention import load_model
from kalman_attention.train.checkpoint import checkpoints, read_checkpoint
from kalman_attention.train.data import TensorBatches
from kalman_attention.train.loop import fit
from kalman_attention.train.objective import token_loss
from kalman_attention.train.optim import param_groups
from kalman_attention.train.seeds import derive_seed, own_randomness, seed_global
from kalman_attention.train.snapshot import load_weights
from tests.models.small import small, text
from tests.train.toy import build, records, run, same, weights

pytestmark = pytest.mark.usefixtures("no_flush")


class PowerCut(Exception):
    pass


def cut_at(step, accumulate=1):
    """A loss that fails in the middle of the given update."""
    calls = iter(range(1000))
    _, _, loss, _, _ = build()

    def cut(model, batch, generator):
        if next(calls) == step * accumulate + accumulate - 1:
            raise PowerCut
        return loss(model, batch, generator)

    return cut


CASES = {
    "plain": {},
    "accumulated": {"accumulate": 2, "max_steps": 4},
    "rarely saved": {"save_every": 3},
    "early stopping": {"patience": 1, "eval_every": 2, "lr": 0.3, "max_steps": 30},
    "falling rate": {"schedule": "cosine", "patience": 2, "max_steps": 5},
    "bfloat16": {"dtype": "bfloat16", "max_steps": 3},
}


@pytest.mark.parametrize("case", CASES)
def test_cut_at_every_step(case, tmp_path):
    options = CASES[case]
    model, result = run(tmp_path / "whole", **options)
    whole, lines = weights(model), records(tmp_path / "whole")
    for step in range(result.step):
        folder = tmp_path / str(step)
        with pytest.raises(PowerCut):
            run(folder, loss=cut_at(step, options.get("accumulate", 1)), **options)
        other, found = run(folder, seed=99, **options)  # other weights at first: all are loaded
        assert same(weights(other), whole)
        assert records(folder) == lines
        assert (found.step, found.reason) == (result.step, result.reason)
        assert found.best[:3] == result.best[:3]
    if case == "early stopping":
        assert result.reason == "patience"
        assert result.step < 30


def test_cut_at_every_step_of_one_run(tmp_path):
    model, _ = run(tmp_path / "whole")
    for _ in range(6):
        with pytest.raises(PowerCut):
            run(tmp_path / "cut", loss=cut_at(1))
    other, _ = run(tmp_path / "cut")
    assert same(weights(model), weights(other))
    assert records(tmp_path / "whole") == records(tmp_path / "cut")
    a, b = (checkpoints(tmp_path / x / "checkpoints")[0] for x in ("whole", "cut"))
    assert (a / "optimiser.safetensors").read_bytes() == (b / "optimiser.safetensors").read_bytes()


@pytest.mark.parametrize("tied", [False, True])
def test_with_the_papers_groups_frozen_and_tied_weights(tied, tmp_path):
    def train(folder, loss, seed=0):
        model = small("attention + kla", seed=seed, tie_embeddings=tied)
        model.norm.weight.requires_grad_(False)
        _, batches, _, config, _ = build(monitor=None)
        groups = param_groups(model)
        fit(model, batches, loss, config, folder=folder, groups=groups, progress=False)
        return model

    whole = train(tmp_path / "whole", token_loss())
    with pytest.raises(PowerCut):
        train(tmp_path / "cut", cut_at(5))
    resumed = train(tmp_path / "cut", token_loss(), seed=5)
    again = train(tmp_path / "other", cut_at(99), seed=0)
    assert not same(weights(whole), weights(again))  # another loss: the comparison can fail
    with pytest.raises(PowerCut):
        train(tmp_path / "cut2", cut_at(5))
    assert same(weights(again), weights(train(tmp_path / "cut2", cut_at(99))))
    assert (resumed.head.weight is resumed.embedding.weight) == tied
    assert set(records(tmp_path / "cut")[0]) > {"lr/embedding", "lr/hidden", "lr/state_space"}
    loaded = load_model(tmp_path / "cut" / "last")
    assert same(weights(resumed), weights(loaded))


def test_a_finished_run_stays_finished(tmp_path):
    model, result = run(tmp_path)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    other, again = run(tmp_path, seed=3)
    assert same(weights(model), weights(other))
    assert again == result
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_a_constant_rate_can_go_on_for_longer(tmp_path):
    options = {"schedule": "constant", "monitor": None}
    model, _ = run(tmp_path / "whole", **options)
    run(tmp_path / "short", **options, max_steps=5)
    other, result = run(tmp_path / "short", **options)
    assert result.step == 7
    assert same(weights(model), weights(other))


def test_evaluation_and_saving_do_not_touch_training(tmp_path):
    model, _ = run(tmp_path / "a")
    other, _ = run(tmp_path / "b", eval_every=1, save_every=7, log_every=3)
    assert same(weights(model), weights(other))


def test_the_callers_randomness_is_left_alone(tmp_path):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    model, batches, loss, config, evaluate = build()
    torch.manual_seed(7)
    fit(model, batches, loss, config, folder=tmp_path, evaluate=evaluate, progress=False)
    assert torch.equal(torch.rand(3), expected)


def test_best_is_kept_and_loads(tmp_path):
    model, result = run(tmp_path, eval_every=1, lr=0.05)
    evals = [r for r in result.history if r["kind"] == "eval"]
    assert [r["step"] for r in evals] == list(range(1, 8))
    assert result.best.value == min(r["loss"] for r in evals)
    assert result.best.step < 7
    assert (tmp_path / "best").resolve() == result.best.folder
    _, _, _, _, evaluate = build()
    load_weights(model, tmp_path / "best")
    with own_randomness(torch.device("cpu")), torch.no_grad():
        seed_global(derive_seed(0, "evaluation"), torch.device("cpu"))
        assert evaluate(model.eval())["loss"] == result.best.value
    kept = {read_checkpoint(path).step for path in checkpoints(tmp_path / "checkpoints")}
    assert kept == {7, 6, result.best.step}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0.5}, r"config.lr: 0.01 there, 0.5 here"),
        ({"max_steps": 20}, r"config.max_steps: 7 there, 20 here"),
        ({"eps": 1e-9, "accumulate": 2}, r"accumulate: 1 there, 2 here\n  config.eps: 1e-08 there"),
        ({"about": {"task": "b"}}, r"about.task: a there, b here"),
    ],
)
def test_another_run_is_refused(options, message, tmp_path):
    run(tmp_path, about={"task": "a"})
    files = sorted(tmp_path.rglob("*"))
    about = options.pop("about", {"task": "a"})
    model, batches, loss, config, evaluate = build(**options)
    with pytest.raises(ValueError, match=message):
        fit(model, batches, loss, config, folder=tmp_path, evaluate=evaluate, about=about,
            progress=False)  # fmt: skip
    assert sorted(tmp_path.rglob("*")) == files


def test_another_model_or_other_batches_are_refused(tmp_path):
    run(tmp_path)
    _, batches, loss, config, evaluate = build()
    options = {"folder": tmp_path, "evaluate": evaluate, "progress": False}
    with pytest.raises(ValueError, match=r"model\.blocks.*there, nothing here"):
        fit(small("kla", between_blocks="sample"), batches, loss, config, **options)
    other = TensorBatches([text(8, 6)], batch_size=3, seed=1)
    with pytest.raises(ValueError, match="belongs to other batches"):
        fit(small(between_blocks="sample"), other, loss, config, **options)
    with pytest.raises(ValueError, match="already contains a run, at step 7"):
        fit(small(), batches, loss, config, resume=False, **options)


def test_a_changed_machine_is_noted(tmp_path, capsys):
    with pytest.raises(PowerCut):
        run(tmp_path, loss=cut_at(5))
    run(tmp_path, progress=True, threads=torch.get_num_threads() + 1)
    shown = capsys.readouterr().err
    assert "resuming" in shown
    assert "at step 5 of 7" in shown
    assert "threads:" in shown


def test_metrics_after_a_torn_line(tmp_path):
    run(tmp_path / "whole")
    with pytest.raises(PowerCut):
        run(tmp_path / "cut", loss=cut_at(6), save_every=4)
    with (tmp_path / "cut" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    run(tmp_path / "cut", save_every=4)
    assert records(tmp_path / "cut") == records(tmp_path / "whole")
    for line in (tmp_path / "cut" / "metrics.jsonl").read_text().splitlines():
        assert json.loads(line)["seconds"] >= 0
