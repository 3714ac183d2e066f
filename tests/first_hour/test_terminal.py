"""Terminals, pipes and closed streams: nothing obeys foreign control codes, nothing crashes."""

import contextlib
import os
import pty
import subprocess
import sys

import pytest

pytest.importorskip("tokenizers")

from kalman_attention._text import visible
from tests.evaluation.checkpoints import checkpoint
from tests.processes import KLA, assert_refused, kla

EVIL = "\x1b]0;owned\x07\x9b2J\r"
SHOWN = "\\x1b]0;owned\\x07\\x9b2J\\x0d"
SHORT = ("--max-new-tokens", "40", "--seed", "1")
C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("terminal")
    checkpoint(folder / "m")
    return folder


def on_a_terminal(*given, cwd):
    """What a terminal receives from ``kla``, both outputs."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [*KLA, *given], cwd=cwd, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        found = b""
        with contextlib.suppress(OSError):  # how Linux says that the other end was closed
            while piece := os.read(ours, 65536):
                found += piece
    os.close(ours)
    return process.returncode, found.decode("utf-8", "replace").replace("\r\n", "\n")


def test_visible():
    assert visible(f"a\tb\n{EVIL}\u00e4") == f"a\tb\n{SHOWN}\u00e4"


def test_prompts_and_what_is_generated(folder):
    code, found = on_a_terminal("generate", "m", f"{EVIL}the", *SHORT, cwd=folder)
    assert code == 0
    assert found.startswith(f"{SHOWN}the")
    controls = {c for c in found if ord(c) < 32 or 127 <= ord(c) < 160}
    assert controls <= {"\n", "\t"}
    piped = kla("generate", "m", f"{EVIL}the", *SHORT, cwd=folder, text=False)
    assert piped.stdout.startswith(f"{EVIL}the".encode())  # a pipe gets the bytes as they are
    assert visible(piped.stdout.decode()).replace("\n", "") == found.replace("\n", "")


def test_names_of_files(folder):
    (folder / f"{EVIL}.txt").write_text("the filter")
    code, found = on_a_terminal("eval", "m", "--text", f"{EVIL}.txt", f"{EVIL}no", cwd=folder)
    assert code == 1
    assert f"error: {SHOWN}no does not exist." in found
    code, found = on_a_terminal("eval", "m", "--text", f"{EVIL}.txt", cwd=folder)
    assert code == 0
    assert SHOWN in found
    assert "\x07" not in found


@pytest.mark.parametrize("settings", [{"PYTHONIOENCODING": "ascii"}, C_LOCALE], ids=["io", "C"])
def test_only_ascii(folder, settings):
    done = kla(
        "generate", "m", "\u00e4h \u4f60", *SHORT, cwd=folder, env=settings, encoding="utf-8"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("\\xe4h \\u4f60")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_closed_streams(folder, closed):
    command = f'exec "$@" {closed}'
    given = ("generate", "m") if closed == "<&-" else ("task", "list")
    done = subprocess.run(
        ["sh", "-c", command, "sh", *KLA, *given],
        cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if closed == "2>&-":
        assert done.returncode == 0
        assert "recall" in done.stdout
    else:
        assert_refused(done, "is closed", code=(1,))


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
def test_a_full_device(folder):
    with open("/dev/full", "w") as full:
        done = kla(
            "task", "list", cwd=folder, capture_output=False, stdout=full, stderr=subprocess.PIPE
        )
    assert_refused(done, "error: No space left on device", code=(1,))


def test_a_prompt_that_is_no_text(folder):
    done = kla("generate", "m", cwd=folder, stdin=None, text=False, input=b"\xff\xfe")
    assert done.returncode == 1
    assert b"the prompt is not UTF-8 text" in done.stderr
