"""``kla generate``: text, repeatability, colours, and what stops it."""

import io
import re
import sys

import pytest
import torch

pytest.importorskip("tokenizers")

from kalman_attention.cli.main import main
from kalman_attention.cli.verbs import generate as verb
from tests.evaluation.checkpoints import checkpoint, model, tokenizer

SHORT = ["--max-new-tokens", "8"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(checkpoint(tmp_path_factory.mktemp("checkpoint")))


def said(capsys, *given):
    assert main(["generate", *given]) == 0
    return capsys.readouterr().out


def test_greedy_text_is_that_of_the_model(folder, capsys):
    text = tokenizer()
    prompt = "the filter"
    ids = torch.tensor([[text.bos, *text.encode(prompt)]])
    want = model().generate(ids, max_new_tokens=8, stop_token=text.bos).tokens[0].tolist()
    found = said(capsys, folder, prompt, *SHORT, "--temperature", "0")
    piece = text.stream()
    assert found == prompt + "".join(piece(i) for i in want if i != text.bos) + "\n"


def test_the_engine_is_the_users_choice(folder, capsys, monkeypatch):
    from kalman_attention.ops import engines

    used = []
    resolve = engines.resolve
    monkeypatch.setattr(
        "kalman_attention.ops.kla_scan.resolve",
        lambda *args, **options: used.append(resolve(*args, **options)) or used[-1],
    )
    plain = said(capsys, folder, "the filter", *SHORT, "--temperature", "0")
    before, used[:] = set(used), []
    given = [folder, "the filter", *SHORT, "--temperature", "0", "--engine", "reference"]
    assert said(capsys, *given) == plain
    assert set(used) == {"reference"} != before
    assert main(["generate", folder, "the", "--engine", "refrence"]) == 1
    assert "did you mean 'reference'?" in capsys.readouterr().err


def test_weights_in_bfloat16(folder, capsys):
    text = tokenizer()
    ids = torch.tensor([[text.bos, *text.encode("the filter")]])
    short = model().bfloat16()
    want = short.generate(ids, max_new_tokens=8, stop_token=text.bos).tokens[0].tolist()
    found = said(capsys, folder, "the filter", *SHORT, "--temperature", "0", "--dtype", "bfloat16")
    piece = text.stream()
    assert found == "the filter" + "".join(piece(i) for i in want if i != text.bos) + "\n"


def test_the_same_seed_gives_the_same_text(folder, capsys):
    given = [folder, "the", *SHORT, "--top-k", "50", "--top-p", "0.9", "--seed"]
    first = said(capsys, *given, "1")
    assert first == said(capsys, *given, "1")
    assert first != said(capsys, *given, "2")


def test_prompt_from_standard_input(folder, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("values, them\n"))
    assert said(capsys, folder, *SHORT).startswith("values, them")


@pytest.mark.parametrize("kind", ["entropy", "aleatoric", "epistemic"])
def test_uncertainty_in_numbers_where_there_are_no_colours(folder, capsys, kind):
    found = said(capsys, folder, "the", *SHORT, "--seed", "3", "--uncertainty", kind)
    legend, _, text = found.partition("\n")
    assert legend == f"{kind} of each token in nats, in braces after the token"
    assert "{" in text
    assert "\x1b" not in found


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("setting", "code"), [("truecolor", "38;2;"), ("", "38;5;")])
def test_uncertainty_in_colours(folder, monkeypatch, setting, code):
    monkeypatch.setenv("COLORTERM", setting)
    monkeypatch.delenv("NO_COLOR", raising=False)
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    assert main(["generate", folder, "the", *SHORT, "--uncertainty", "--seed", "3"]) == 0
    found = screen.getvalue()
    assert found.startswith("entropy in nats, from lowest to highest: ")
    assert found.count(f"\x1b[{code}") == found.count("\x1b[0m") > 5


def test_colours_span_what_is_shown(monkeypatch):
    """Values far from any fixed scale still differ, and the legend says where colours begin."""
    monkeypatch.setenv("COLORTERM", "truecolor")
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    shown = verb.Coloured("epistemic", "start ", 3)
    for text, value in [("a", 0.002), ("b", 0.003), ("c", 0.012)]:
        shown.show(text, value)
    assert screen.getvalue() == ""
    shown.finish()
    legend, _, text = screen.getvalue().partition("\n")
    colour = dict(re.findall(r"\x1b\[38;2;([\d;]+)m([^\x1b]+)", text))
    by_text = {token: code for code, token in colour.items()}
    marks = re.findall(r"\x1b\[38;2;([\d;]+)m([\d.]+)\+", legend)
    assert [start for _, start in marks] == ["0.002", "0.004", "0.006", "0.008", "0.01"]
    assert text.startswith("start \x1b")
    assert by_text == {"b": marks[0][0], "c": marks[4][0]}  # a has the colour of b
    assert legend.endswith("(up to 0.012)")


def test_interrupted_colours_show_what_there_is(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    verb.Coloured("entropy", "start", 3).finish()
    assert screen.getvalue().endswith("start\n")


def test_no_color_is_respected(folder, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    assert main(["generate", folder, "the", *SHORT, "--uncertainty"]) == 0
    assert "\x1b" not in screen.getvalue()


def test_interrupted(folder, capsys, monkeypatch):
    import kalman_attention.models.generation as generation

    real = generation.stream

    def stream(*args, **options):
        yield next(real(*args, **options))
        raise KeyboardInterrupt

    monkeypatch.setattr(generation, "stream", stream)
    assert main(["generate", folder, "the", *SHORT]) == 130
    found = capsys.readouterr()
    assert found.out.startswith("the")
    assert found.out.endswith("\n")
    assert found.err == "interrupted\n"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--temperature", "-1"], "is not a number, 0 or more"),
        (["--top-k", "0"], "is not a whole number, 1 or more"),
        (["--top-p", "1.5"], "is not a number above 0 up to 1"),
    ],
)
def test_refused_options(folder, capsys, given, message):
    with pytest.raises(SystemExit, match="2"):
        main(["generate", folder, "the", *given])
    assert message in capsys.readouterr().err
