"""Checkpoints of both kinds, with the tokenizer beside the model."""

import pytest
import torch

pytest.importorskip("tokenizers")

from kalman_attention.data.tokenizer import train_tokenizer
from kalman_attention.evaluation.checkpoint import load_checkpoint
from tests.data.small import text
from tests.evaluation.checkpoints import checkpoint, model, tokenizer

IDS = torch.arange(20).view(2, 10)


def test_native(tmp_path):
    found = load_checkpoint(checkpoint(tmp_path))
    model_names = {"checksums.json", "config.json", "model.safetensors"}
    names = model_names | {"tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert torch.equal(found.model(IDS).logits, model()(IDS).logits)
    assert found.tokenizer.fingerprint == tokenizer().fingerprint
    assert not found.model.training


def test_huggingface(tmp_path):
    pytest.importorskip("transformers")
    from kalman_attention.models.hf import KLAForCausalLM

    KLAForCausalLM.from_native(model("attention + kla")).save_pretrained(tmp_path)
    tokenizer().save(tmp_path)
    found = load_checkpoint(tmp_path)
    assert torch.equal(found.model(IDS).logits, model("attention + kla")(IDS).logits)


def test_a_tokenizer_from_elsewhere(tmp_path):
    checkpoint(tmp_path / "model")
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "model/tokenizer.json").rename(tmp_path / "tokenizer/tokenizer.json")
    with pytest.raises(ValueError, match="no tokenizer in"):
        load_checkpoint(tmp_path / "model")
    found = load_checkpoint(tmp_path / "model", tokenizer=tmp_path / "tokenizer")
    assert found.tokenizer.bos == 291


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match="is not a checkpoint"):
        load_checkpoint(tmp_path)
    checkpoint(tmp_path)
    train_tokenizer([text(i, 40) for i in range(30)], 301).save(tmp_path)
    with pytest.raises(ValueError, match="trained with another tokenizer"):
        load_checkpoint(tmp_path)
