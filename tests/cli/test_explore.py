"""``kla explore``: a page from a text or a task, and what is refused."""

import re
import sys

import pytest
import torch

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from kalman_attention import LanguageModel, save_model
from kalman_attention.cli.main import main
from kalman_attention.cli.verbs import explore
from kalman_attention.tasks.registry import make_task
from tests.evaluation.checkpoints import checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(checkpoint(tmp_path_factory.mktemp("explore") / "tiny"))


def test_a_page_of_a_text(folder, tmp_path, capsys):
    out = tmp_path / "new" / "page.html"
    assert main(["explore", folder, "the filter sees", "--out", str(out)]) == 0
    page = out.read_text()
    assert page.startswith("<!doctype html>")
    assert "<title>tiny - kla explore</title>" in page
    assert "<textarea" not in page
    assert str(out) in capsys.readouterr().out


def recall(tmp_path):
    options = make_task("recall").SHORT
    task = make_task("recall", **options)
    torch.manual_seed(0)
    model = LanguageModel(vocab_size=task.vocab_size, d_model=16, plan="kla")
    save_model(model, tmp_path / "model")
    return str(tmp_path / "model"), [f"--option={name}={n}" for name, n in options.items()]


def test_a_page_of_a_task(tmp_path, capsys):
    model, options = recall(tmp_path)
    out = tmp_path / "page.html"
    assert main(["explore", model, "--task", "recall", *options, "--out", str(out)]) == 0
    assert re.search("recall, test sequence 0 of seed 0", out.read_text())
    assert main(["explore", model, "--task", "mqar", "--out", str(out)]) == 1
    assert "trained on another task" in capsys.readouterr().err
    assert main(["explore", model, "--task", "recal", "--out", str(out)]) == 1
    assert "did you mean 'recall'?" in capsys.readouterr().err
    given = ["--task", "recall", "--option", "seq_len=many"]
    assert main(["explore", model, *given, "--out", str(out)]) == 1
    assert "NAME=N" in capsys.readouterr().err


def test_serving(folder, monkeypatch, capsys):
    import kalman_attention.explorer.server as server

    made = []

    class Server(server.ExplorerServer):
        def serve_forever(self, poll_interval=0.5):
            made.append(self.page.decode())
            assert self.look("the filter")["tokens"][1:]
            raise KeyboardInterrupt

    monkeypatch.setattr(server, "ExplorerServer", Server)
    assert main(["explore", folder, "--serve", "--port", "0"]) == 130
    assert "http://127.0.0.1:" in capsys.readouterr().out
    assert "<textarea" in made[0]
    assert explore.START.split()[-1] in made[0]
    assert main(["explore", folder, "--serve", "--task", "recall"]) == 1
    assert "not --task" in capsys.readouterr().err


def test_refusals(folder, tmp_path, capsys, monkeypatch):
    with pytest.raises(SystemExit):
        main(["explore", folder, "text", "--task", "recall"])
    assert "not allowed with" in capsys.readouterr().err
    assert main(["explore", folder, "", "--out", str(tmp_path / "p.html")]) == 1
    assert "no text to look at" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert main(["explore", folder, "the", "--out", str(tmp_path / "p.html")]) == 1
    assert "pip install 'kalman_attention[report]'" in capsys.readouterr().err
    assert not (tmp_path / "p.html").exists()
