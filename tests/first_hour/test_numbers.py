"""Every number on the command line has a domain; outside of it nothing is computed."""

import argparse
import math

import pytest

pytest.importorskip("tokenizers")

from kalman_attention.cli import numbers
from kalman_attention.cli.main import build_parser, main
from kalman_attention.models.generation import Sampling
from kalman_attention.recipes.pretrain import recipe
from kalman_attention.train.optim import Rates
from tests.data.small import shards
from tests.evaluation.checkpoints import checkpoint
from tests.processes import assert_refused, kla


def parsers(parser=None):
    """The parser of every verb and of every verb below one, by what a user types."""
    parser = parser or build_parser()
    yield parser.prog, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                yield from parsers(sub)


def test_all_options_are_read_by_the_same_readers():
    kinds = {
        f"{name} {action.option_strings}": action.type
        for name, parser in parsers()
        for action in parser._actions
    }
    assert len(kinds) > 100
    assert not {name for name, kind in kinds.items() if kind in (int, float)}
    for name, kind in kinds.items():
        if any(
            word in name for word in ("seed", "tokens", "threads", "lengths", "jobs", "samples")
        ):
            assert kind.__module__ == numbers.__name__, name


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7), ("16k", 16_000), ("16Ki", 16_384), ("0.5Mi", 2**19), ("2M", 2_000_000),
        ("1.8B", 1_800_000_000), ("1e3", 1000), ("131_072", 131_072),
        ("9007199254740993", 2**53 + 1),
    ],
)  # fmt: skip
def test_whole_numbers(text, value):
    assert numbers.positive_int(text) == value


@pytest.mark.parametrize(
    ("kind", "text", "told"),
    [
        ("positive_int", "0", "is not a whole number, 1 or more"),
        ("positive_int", "1.5", "is not a whole number"),
        ("positive_int", "16K", "16Ki is 16,384"),
        ("positive_int", "nan", "is not a whole number"),
        ("positive_int", "inf", "is not a whole number"),
        ("positive_int", "1e999999999", "is not a whole number"),
        ("positive_int", "", "is not a whole number"),
        ("nonnegative_int", "-1", "is not a whole number, 0 or more"),
        ("seed", str(2**63), "is not a whole number"),
        ("workers", "1025", "from 1 to 1,024"),
        ("positive_float", "0", "is not a number above 0"),
        ("positive_float", "inf", "is not a number above 0"),
        ("nonnegative_float", "-1e-9", "is not a number, 0 or more"),
        ("nonnegative_float", "nan", "is not a number, 0 or more"),
        ("fraction", "1.01", "from 0 up to 1"),
        ("probability", "0", "above 0 up to 1"),
    ],
)
def test_outside_of_a_domain(kind, text, told):
    with pytest.raises(argparse.ArgumentTypeError, match=told):
        getattr(numbers, kind)(text)


@pytest.mark.parametrize(
    "line",
    [
        "pretrain nano --lr -1", "pretrain nano --lr nan", "pretrain nano --warmdown 2",
        "pretrain nano --tokens 0", "pretrain nano --seed -1", "pretrain nano --threads 0",
        "pretrain nano --context 0", "generate x --max-new-tokens -3",
        "generate x --num-samples -2",
        "generate x --top-p 0", "generate x --temperature inf", "eval x --limit 0",
        "eval x --stride 0", "eval x --batch-size 0", "compare x --seconds -1",
        "data x --shard-tokens 0", "data x --workers 0", "data x --validation -1",
        "reproduce mad --jobs 0", "task show recall --index -1", "bench scan --lengths 0",
        "bench scan --batch 0", "bench layer --repeats 0", "bench mixers --patience 0",
        "bench decode --contexts 16 0", "bench gpu --slots -1",
    ],
)  # fmt: skip
def test_refused_before_any_work(line, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(line.split())
    assert "is not a" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda: Rates(hidden=-1.0), "hidden must be 0 or more"),
        (lambda: Rates(weight_decay=math.nan), "weight_decay must be 0 or more"),
        (lambda: Rates(betas=(0.9, 1.0)), "betas must be"),
        (lambda: Rates(eps=0.0), "eps must be positive"),
        (lambda: recipe("nano", num_samples=0), "num_samples must be at least 1"),
        (lambda: recipe("nano", warmdown=1.5), "warmdown must be between 0 and 1"),
        (lambda: recipe("nano", clip=-1.0), "clip must be positive"),
        (lambda: recipe("nano", log_every=0), "log_every must be"),
        (lambda: Sampling(temperature=-1.0), "temperature must be 0 or more"),
        (lambda: Sampling(top_k=0), "top_k must be at least 1"),
        (lambda: Sampling(top_p=1.5), "top_p must be a probability"),
    ],
)
def test_the_library_checks_its_own_domains(wrong, told):
    with pytest.raises(ValueError, match=told):
        wrong()


def test_nothing_to_score(tmp_path, capsys):
    folder, text = checkpoint(tmp_path / "m"), tmp_path / "a.txt"
    text.write_text("")
    assert main(["eval", str(folder), "--text", str(text)]) == 1
    said = capsys.readouterr()
    assert "a.txt is empty: there is nothing to score" in said.err
    assert "nan" not in said.out


def test_as_a_user_meets_it(tmp_path):
    checkpoint(tmp_path / "m")
    shards(tmp_path)
    done = kla("pretrain", "nano", "--shards", "shards", "--lr", "-1", "--out", "run", cwd=tmp_path)
    assert_refused(done, "argument --lr: '-1' is not a number above 0", code=(2,))
    assert not (tmp_path / "run").exists()
