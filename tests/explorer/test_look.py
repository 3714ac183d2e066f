"""What the page is given is what the model computes, and the page holds no foreign markup."""

import base64
import json
import re

import numpy as np
import pytest
import torch

pytest.importorskip("tokenizers")

from kalman_attention import LanguageModel
from kalman_attention.explorer.look import look, task_subject, text_subject
from kalman_attention.explorer.page import render
from kalman_attention.tasks.registry import make_task
from tests.evaluation.checkpoints import model, tokenizer
from tests.models.small import small

TEXT = "the filter sees 1234 noisy values, \u00e4h! \u4f60\u597d\nbelieves them"


def seen(plan="kla*2", text=TEXT, **options):
    return look(model(plan), text_subject(tokenizer(), text, **options), title="tiny")


def test_numbers_of_a_text():
    found, text, lm = seen("attention + kla"), tokenizer(), model("attention + kla")
    ids = torch.tensor([[text.bos, *text.encode(TEXT)]])
    log_probs = lm(ids).logits[0, :-1].log_softmax(-1).detach()
    nll = -log_probs.gather(-1, ids[0, 1:, None])[:, 0]
    assert found["scores"]["nll"][0] is None
    np.testing.assert_allclose(found["scores"]["nll"][1:], nll, atol=2e-5)
    np.testing.assert_allclose(found["scores"]["max_prob"][1:], log_probs.exp().amax(-1), atol=2e-5)
    belief = lm.uncertainty(ids)
    np.testing.assert_allclose(found["scores"]["entropy"][1:], belief.entropy[0, :-1], atol=2e-5)
    assert found["layers"][0] == {"kind": "attention"}
    np.testing.assert_allclose(found["layers"][1]["gain"], belief.gain[1][0].mean(-1), atol=2e-5)
    assert "".join(found["tokens"][1:]) == TEXT
    assert len(found["top"]) == len(found["tokens"]) == ids.shape[1]
    assert found["top"][3][0][1] == pytest.approx(float(log_probs[2].exp().max()), abs=2e-5)
    assert found["wanted"][1:] == [text.decode([i]) for i in ids[0, 1:].tolist()]


def test_the_beginning_of_a_long_text():
    found = seen(text="the filter " * 300, most=50)
    assert len(found["tokens"]) == 51
    assert "the first of" in found["about"]
    with pytest.raises(ValueError, match="text is empty"):
        seen(text="")


def test_evidence_is_float32():
    layer = seen()["layers"][0]
    precision = np.frombuffer(base64.b64decode(layer["precision"]), "<f4")
    assert precision.shape == (layer["channels"] * len(seen()["tokens"]),)
    assert (precision > 0).all()


def test_a_task():
    task = make_task("recall", **make_task("recall").SHORT)
    torch.manual_seed(0)
    lm = LanguageModel(vocab_size=task.vocab_size, d_model=16, plan="kla").eval()
    found = look(lm, task_subject(task, "recall", index=2), title="x")
    sequence = task.generate("test", count=3)
    scored = (sequence.targets[2] >= 0).tolist()
    assert [x is not None for x in found["scores"]["nll"]] == scored
    assert [x is not None for x in found["wanted"]] == scored
    assert found["kind"] == "task"
    with pytest.raises(ValueError, match="numbered from 0"):
        task_subject(task, "recall", index=10**6)


def test_another_vocabulary_is_refused():
    with pytest.raises(ValueError, match="trained on something else"):
        look(small(), text_subject(tokenizer(), TEXT), title="x")


def test_markup_stays_text():
    pytest.importorskip("jinja2")
    nasty = '</script><script>alert(1)</script><img src=x onerror="alert(2)"> & \u2028'
    page = render({**seen(text=nasty), "title": nasty})
    assert page.count("<script") == 2  # data and program
    assert "<img" not in page
    assert "alert(1)</script>" not in page
    held = re.search(r'id="data">(.*?)</script>', page, re.DOTALL).group(1)
    assert "".join(json.loads(held)["tokens"][1:]) == nasty


def test_nothing_is_loaded_from_elsewhere():
    pytest.importorskip("jinja2")
    page = render(seen())
    assert not re.findall(r'(?:src|href)="(?!data:,")', page)
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", page)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page).group(1)
    assert policy.startswith("default-src &#39;none&#39;;")
    assert "unsafe" not in policy
    assert "connect-src &#39;none&#39;" in policy
    assert "connect-src &#39;self&#39;" in render(seen(), live=True)
