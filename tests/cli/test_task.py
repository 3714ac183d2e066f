"""``kla task``: what it prints is what the generators give."""

import re

import pytest

from kalman_attention.cli.main import main
from kalman_attention.tasks.registry import TASKS, make_task
from kalman_attention.tasks.task import IGNORE


def said(capsys, *arguments):
    assert main(["task", *arguments]) == 0
    return capsys.readouterr().out


def test_list_names_every_task(capsys):
    lines = {line.split()[0]: line for line in said(capsys, "list").splitlines()[2:]}
    assert list(lines) == list(TASKS)
    assert re.search(r"16 +127 +12,800 +1,280 +12\.50 % +values whose key", lines["recall"])
    assert re.search(r"256 +32 +256 +1,280", lines["memorization"])


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("name", TASKS)
def test_show_prints_one_sequence(capsys, monkeypatch, name, split):
    monkeypatch.setenv("COLUMNS", "100")
    text = said(capsys, "show", name, "--short", "--split", split, "--seed", "3", "--index", "2")
    task = make_task(name, **TASKS[name].SHORT)
    rows, names = task.generate(split, seed=3, count=3), task.token_names()
    first, second = text.splitlines()
    assert first.split() == ["input", *(names[t] for t in rows.inputs[2].tolist())]
    targets = ["_" if t == IGNORE else names[t] for t in rows.targets[2].tolist()]
    assert second.split() == ["target", *targets]
    assert len(first) == len(second) <= 100  # aligned, and on one line


def test_long_sequences_are_wrapped(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    lines = said(capsys, "show", "recall").splitlines()
    assert max(map(len, lines)) <= 60
    inputs = [token for line in lines if line.startswith("input") for token in line.split()[1:]]
    names = make_task("recall").token_names()
    assert inputs == [names[t] for t in make_task("recall").generate("test").inputs[0].tolist()]


def test_an_index_that_is_not_there(capsys):
    assert main(["task", "show", "recall", "--index", "1280"]) == 1
    assert "between 0 and 1279, got 1280" in capsys.readouterr().err
    assert main(["task", "show", "selective-copying"]) == 1
    assert "did you mean 'selective_copying'?" in capsys.readouterr().err
