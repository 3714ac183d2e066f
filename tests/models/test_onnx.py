"""ONNX programs, run by a runtime that knows nothing of torch or of us."""

import pytest
import torch

from kalman_attention.cli.main import main
from kalman_attention.models.onnx import export_onnx
from tests.models.small import small, text

pytest.importorskip("onnxscript", reason="pip install 'kalman_attention[onnx]'")
runtime = pytest.importorskip("onnxruntime", reason="pip install 'kalman_attention[onnx]'")

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
# One group: each export takes seconds, and every worker would make them all.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("onnx")]


def session(path):
    return runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def run(program, *args):
    names = [x.name for x in program.get_inputs()]
    found = program.run(None, {n: x.numpy() for n, x in zip(names, args, strict=True)})
    return [torch.from_numpy(x) for x in found]


LEARNED = {"prior": "learned", "value": "project", "precision_rank": 2}
"""Of a layer that is not the default one."""


@torch.no_grad()
def learned():
    model = small("kla*2", mlp="swiglu", kla=LEARNED)
    for block in model.stack():
        block.mixer.prior.mean_0.normal_()
    return model


MODELS = {
    "learned": learned,
    "attention first": lambda: small("attention + kla"),
    "attention last": lambda: small("kla + attention"),
}


@pytest.fixture(scope="module", params=MODELS)
def exported(request, tmp_path_factory):
    model = MODELS[request.param]()
    files = export_onnx(model, tmp_path_factory.mktemp("onnx") / "new")
    return model, *map(session, files)


@pytest.mark.parametrize(("rows", "length"), [(1, 1), (2, 3), (3, 2), (4, 70)])
@torch.no_grad()
def test_prompts_and_tokens(exported, rows, length):
    model, prefill, step = exported
    tokens, whole = text(rows, length + 4), torch.ones(rows, length, dtype=torch.bool)
    found, *states = run(prefill, tokens[:, :length], whole)
    every = model(tokens).logits
    torch.testing.assert_close(found, every[:, :length], **CLOSE)
    for t in range(length, length + 4):
        found, *states = run(step, tokens[:, t], *states)
        torch.testing.assert_close(found, every[:, t], **CLOSE)


@torch.no_grad()
def test_padded_prompts(exported):
    model, prefill, step = exported
    tokens = text(2, 6)
    mask = torch.tensor([[False, False, True, True, True, True], [True] * 6])
    _, *states = run(prefill, tokens, mask)
    found, *_ = run(step, tokens[:, 0], *states)
    alone = torch.cat([tokens[:1, 2:], tokens[:1, :1]], 1)
    torch.testing.assert_close(found[:1], model(alone).logits[:, -1], **CLOSE)


def test_names_say_what_follows_what(exported):
    _, prefill, step = exported
    names = [x.name for x in step.get_inputs()[1:]]
    later = [f"{name}.next" for name in names]
    assert [x.name for x in prefill.get_outputs()] == ["logits", *later]
    assert [x.name for x in step.get_outputs()] == ["logits", *later]
    assert any(name.endswith(".belief.mean") for name in names)
    assert [x.name for x in prefill.get_inputs()] == ["tokens", "mask"]


def test_what_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(ValueError, match="blocks of mamba cannot be written as ONNX"):
        export_onnx(small("kla + mamba"), tmp_path)
    with pytest.raises(ValueError, match=r"this model is torch\.bfloat16"):
        export_onnx(small("kla*2").bfloat16(), tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_command(tmp_path, capsys):
    pytest.importorskip("tokenizers")
    from tests.evaluation.checkpoints import checkpoint, model

    folder = checkpoint(tmp_path / "run", plan="kla")
    assert main(["export", str(folder), "--to", "onnx", str(tmp_path / "onnx")]) == 0
    assert "prefill.onnx and step.onnx" in capsys.readouterr().out
    tokens = torch.tensor([[5, 7, 11, 13]])
    found, *_ = run(session(tmp_path / "onnx" / "prefill.onnx"), tokens, tokens > 0)
    torch.testing.assert_close(found, model("kla")(tokens).logits.detach(), **CLOSE)
