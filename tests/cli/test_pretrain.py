"""``kla pretrain``: the plan, a run, what follows it, and what stops it."""

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

pytest.importorskip("tokenizers")

from kalman_attention.cli.main import main, parse
from kalman_attention.cli.paths import RUNS
from kalman_attention.cli.verbs.pretrain import chosen_recipe
from kalman_attention.evaluation.checkpoint import load_checkpoint
from kalman_attention.recipes import pretrain_run
from kalman_attention.recipes.pretrain import recipe
from kalman_attention.train.metrics import read_metrics
from tests.data.small import shards
from tests.parallel.launch import torchrun

PAGE = Path(__file__).parents[2] / "docs" / "pretraining.md"
TINY = ["--tokens", "256", "--batch-tokens", "64", "--seq-len", "16", "--micro-batch", "4"]
TINY += ["--eval-every", "2", "--log-every", "1"]

pytestmark = pytest.mark.usefixtures("no_flush")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with shards where ``kla data`` would put them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["kla", "pretrain", "nano"])
    Path("runs").mkdir()
    shards(tmp_path).rename("runs/data")
    return tmp_path


def parsed(*given):
    return parse(["pretrain", *given])


def test_the_plan_of_the_papers_models_needs_no_data(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, updates in (("kla-45m", "13,733"), ("kla-180m", "20,790")):
        assert main(["pretrain", name, "--dry-run"]) == 0
        said = capsys.readouterr().out
        assert "paper (tab:lm-pretrain-hparams)" in said
        assert re.search(rf"^updates +{updates} +-$", said, re.MULTILINE)
        assert re.search(r"^vocabulary +32,768 +32,768$", said, re.MULTILINE)
    assert not list(tmp_path.iterdir())


def test_the_plan_with_data(here, capsys):
    assert main(["pretrain", "gpt+kla-nano", "--dry-run", "--shards", "runs/data"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^vocabulary +300$", said, re.MULTILINE)
    assert "no data yet" not in said
    assert "paper" not in said
    assert not Path(RUNS).exists()


def curve(folder, name):
    return [record[name] for record in read_metrics(Path(folder)) if record["kind"] == "train"]


def test_two_processes_train_as_one_does(here):
    assert main(["pretrain", "nano", *TINY, "--quiet", "--out", "alone"]) == 0
    alone = load_checkpoint("alone").model.state_dict()
    for name, how in {"context": ["ddp", "--context", "2"], "spread": ["fsdp"]}.items():
        options = ["--out", here / name, "--shards", here / "runs/data", "--parallel", *how]
        torchrun(2, "kalman_attention", "pretrain", "nano", *TINY, *options)
        assert curve(name, "loss") == pytest.approx(curve("alone", "loss"), abs=1e-5)
        # Adam hides a wrong scale of the gradients from the loss; their norm does not.
        assert curve(name, "grad_norm") == pytest.approx(curve("alone", "grad_norm"), rel=1e-3)
        found = load_checkpoint(name).model.state_dict()
        assert {k: (x.shape, x.dtype) for k, x in found.items()} == {
            k: (x.shape, x.dtype) for k, x in alone.items()
        }


def test_context_needs_processes(here, capsys):
    assert main(["pretrain", "nano", "--context", "2"]) == 1
    assert "--context needs --parallel" in capsys.readouterr().err


def test_train_evaluate_generate_without_arguments(here, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    assert main(["pretrain", "nano", *TINY, "--quiet"]) == 0
    said = capsys.readouterr().out
    run = RUNS / "nano"
    assert "val bits per byte" in said
    assert f"next: kla eval {run}" in said
    for name in ("curve.png", "curve.svg", "summary.json", "model.safetensors", "tokenizer.json"):
        assert (run / name).stat().st_size > 0
    assert main(["eval", "--out", "result.json"]) == 0
    said = capsys.readouterr().out
    assert "bits per byte" in said
    assert f"kla eval {run} --task-data DIR" in said
    result = json.loads(Path("result.json").read_text())
    assert result["checkpoint"] == str(run)
    assert len(result["texts"]) == 1
    monkeypatch.setattr(sys, "stdin", None)  # nothing is read
    assert main(["generate", "--max-new-tokens", "4", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.endswith("\n")
    assert main(["generate", str(run), "the", "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().out.startswith("the")


def test_the_newest_run_is_meant(here, capsys):
    for name in ("nano", "gpt-nano", "nano"):  # the third only says again what the first did
        assert main(["pretrain", name, *TINY, "--quiet"]) == 0
    capsys.readouterr()
    assert main(["eval", "--limit", "1"]) == 0
    assert "kla eval runs/pretrain/nano --task-data" in capsys.readouterr().out


def test_without_matplotlib(here, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in ("common", "training"):
        monkeypatch.delitem(sys.modules, f"kalman_attention.plots.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["pretrain", "nano", *TINY, "--quiet"]) == 0
    assert "pip install 'kalman_attention[plot]'" in capsys.readouterr().out


def test_interrupted_it_says_how_to_continue(here, capsys, monkeypatch):
    build = pretrain_run.build_evaluation

    def interrupted(chosen, data):
        def evaluate(model):
            os.kill(os.getpid(), signal.SIGINT)
            return build(chosen, data)(model)

        return evaluate

    monkeypatch.setattr(pretrain_run, "build_evaluation", interrupted)
    assert main(["pretrain", "nano", *TINY]) == 130
    said = capsys.readouterr().err
    assert "stopped and saved at step 2 of 4" in said
    assert "To continue, run\n  kla pretrain nano" in said
    assert main(["eval", "--limit", "1"]) == 0  # an unfinished run can be looked at
    monkeypatch.setattr(pretrain_run, "build_evaluation", build)
    assert main(["pretrain", "nano", *TINY]) == 0
    assert "resuming runs/pretrain/nano at step 2 of 4" in capsys.readouterr().err
    assert [r["step"] for r in read_metrics(RUNS / "nano") if r["kind"] == "train"] == [1, 2, 3, 4]


def test_a_file_system_that_is_full(here, capsys):
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, hard))  # no weights fit into half a MiB
    try:
        assert main(["pretrain", "nano", *TINY, "--quiet"]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "error: cannot write checkpoint" in capsys.readouterr().err
    assert not list((RUNS / "nano" / "checkpoints").iterdir())
    assert main(["pretrain", "nano", *TINY, "--quiet"]) == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["kla-1b"], "unknown preset 'kla-1b'"),
        (["nano", "--shards", "nowhere"], "there is no folder nowhere"),
        (["nano", "--shards", "runs"], "has no index.json"),
        (["nano", "--batch-tokens", "100"], "not a whole number of micro-batches"),
        (["gpt-nano", "--loss", "marginal"], "needs KLA as the last mixer"),
    ],
)
def test_errors_are_one_sentence(here, capsys, given, message):
    assert main(["pretrain", *given]) == 1
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said


def test_no_run_to_evaluate(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for verb in ("eval", "generate"):
        assert main([verb]) == 1
        assert "kla pretrain nano" in capsys.readouterr().err


def test_data_that_went_away(here, capsys):
    assert main(["pretrain", "nano", *TINY, "--quiet"]) == 0
    Path("runs/data").rename("runs/moved")
    assert main(["eval"]) == 1
    assert "--shards" in capsys.readouterr().err
    assert main(["eval", "--shards", "runs/moved", "--limit", "1"]) == 0


def test_everything_can_be_changed():
    given = "--tokens 2M --batch-tokens 16Ki --seq-len 512 --micro-batch 4 --threads 2 --seed 7"
    given += " --loader packing --reset-state --loss marginal --num-samples 3 --clip 1"
    given += " --warmup-steps 5 --warmdown 0.2 --eval-every 9 --eval-tokens 10k --log-every 2"
    given += " --save-seconds 30 --dtype bfloat16 --embedding-dtype float32"
    given += " --gradient-checkpointing --lr 0.01 --embedding-lr 0.2 --weight-decay 0"
    found = chosen_recipe(parsed("nano", *given.split()))
    assert (found.tokens, found.batch_tokens, found.accumulate) == (2_000_000, 16_384, 8)
    assert found.rates.hidden == found.rates.head == found.rates.vector == 0.01
    assert (found.rates.embedding, found.rates.weight_decay) == (0.2, 0.0)
    standard = recipe("nano")
    same = [n for n, value in found.to_dict().items() if value == standard.to_dict()[n]]
    assert same == ["model", "tokens", "architecture"]  # the last is for experiments
    assert chosen_recipe(parsed("nano")) == standard


def test_commands_of_the_page_exist():
    blocks = re.findall(r"```\n(.*?)```", PAGE.read_text(), re.DOTALL)
    lines = [line.split("#")[0].split() for b in blocks for line in b.splitlines()]
    commands = [words[1:] for words in lines if words[:1] == ["kla"]]
    assert len(commands) > 5
    for words in commands:
        args = parse(words)
        if words[0] == "pretrain":
            chosen_recipe(args)
