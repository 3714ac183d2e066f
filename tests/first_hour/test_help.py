"""What ``kla --help`` says: everything, in plain text, and at once."""

import argparse
import subprocess
import sys

import pytest

import kalman_attention
from kalman_attention.cli.main import main
from kalman_attention.cli.verbs.reproduce import FIGURES
from kalman_attention.cli.verbs.sizes import PAPER_TABLES
from kalman_attention.models.matching import PAPER_MODELS
from kalman_attention.models.names import ALIASES, MODELS, NAMES, SIZES
from kalman_attention.models.presets import PRESETS
from kalman_attention.recipes.registry import EXPERIMENTS
from tests.first_hour.test_numbers import parsers

PARSERS = dict(parsers())


@pytest.mark.parametrize("name", PARSERS)
def test_every_option_is_explained(name):
    parser = PARSERS[name]
    text = parser.format_help()
    assert "``" not in text
    recipe = [g for g in parser._action_groups if g.title == "what differs from the recipe"]
    elsewhere = [action for group in recipe for action in group._group_actions]
    for action in parser._actions:
        assert action.help or isinstance(action, argparse._SubParsersAction), action
        takes_a_value = action.option_strings and action.nargs != 0
        if takes_a_value and action not in elsewhere:  # whose defaults are those of the recipe
            shown = parser._get_formatter()._get_help_string(action)
            assert "default" in shown, action


def test_names_are_explained_in_tables(capsys):
    def helped(verb):
        with pytest.raises(SystemExit, match="0"):
            main([verb, "--help"])
        return capsys.readouterr().out.splitlines()

    lines = helped("reproduce")
    for name, text in (EXPERIMENTS | FIGURES).items():
        assert any(line.split() == [name, *text.split()] for line in lines)
    for verb in ("pretrain", "sizes"):
        lines = helped(verb)
        for name, text in (MODELS | SIZES).items():
            assert any(line.split() == [name, *text.split()] for line in lines)


def test_names_are_those_of_what_they_name():
    assert set(NAMES) == set(PRESETS)
    assert set(ALIASES.values()) <= set(NAMES)
    assert tuple(PAPER_MODELS) == PAPER_TABLES


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"kla {kalman_attention.__version__}\n"


def test_help_waits_for_no_library():
    # Torch alone takes seconds. A test of the cause, which unlike a clock is never in doubt.
    verbs = [name.split()[1:] for name in PARSERS]
    program = f"""
import contextlib, os, sys
from kalman_attention.cli.main import main
for verb in {verbs!r} + [["--version"]]:
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(open(os.devnull, "w")):
        main([*verb, "--help"])
print(*(name for name in sys.modules if "." not in name))
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert "kalman_attention" in loaded
    assert not loaded & {"torch", "numpy", "tokenizers", "datasets", "matplotlib", "safetensors"}
