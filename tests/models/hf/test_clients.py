"""What people do to a model of transformers: quantise, offload, checkpoint, pad, resize."""

import pytest
import torch
from transformers import TorchAoConfig

from kalman_attention.hf import KLAForCausalLM
from tests.models.hf.small import PAD, VOCABULARY, padded, small, text
from tests.models.hf.test_training import train

EVERY = "mamba + gla + gated_deltanet + mlstm + attention + kla"
plans = pytest.mark.parametrize("plan", ["kla*2", "attention + kla", EVERY])


@plans
@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_int8(plan):
    model, ids = small(plan, hidden_size=64), text(2, 6)
    short = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    assert not [m for m in short.modules() if type(m) is torch.nn.Linear]
    exact, found = (m(ids).logits.softmax(-1) for m in (model, short))
    assert float((exact - found).detach().abs().max()) < 0.05
    tokens = short.generate(ids, max_new_tokens=4, do_sample=False)
    steps = short.native().generate(ids, max_new_tokens=4).tokens
    assert torch.equal(tokens[:, 6:], steps)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning:torchao")
@pytest.mark.parametrize("plan", ["kla*2", "attention + kla"])
@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"])
def test_int8_by_torchao(plan, kind, tmp_path):
    ao = pytest.importorskip(
        "torchao.quantization", reason="pip install 'kalman_attention[int8]'", exc_type=ImportError
    )
    model, ids = small(plan, hidden_size=64), text(2, 6)
    model.save_pretrained(tmp_path / "long")
    quantized = TorchAoConfig(getattr(ao, kind)())
    short = KLAForCausalLM.from_pretrained(tmp_path / "long", quantization_config=quantized)
    mixer = short.model.blocks[1].mixer
    assert "Int8Tensor" in type(mixer.out_proj.weight).__name__
    assert type(mixer.prior.log_a) is torch.nn.Parameter  # the dynamics stay as they are
    exact, found = (m(ids).logits.softmax(-1) for m in (model, short))
    assert 0 < float((exact - found).detach().abs().max()) < 0.01
    tokens = short.generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(tokens[:, 6:], short.native().generate(ids, max_new_tokens=4).tokens)
    short.save_pretrained(tmp_path / "short")
    again = KLAForCausalLM.from_pretrained(tmp_path / "short")
    assert torch.equal(again(ids).logits, short(ids).logits)


@plans
def test_weights_on_disk(plan, tmp_path):
    pytest.importorskip("accelerate")
    model, ids = small(plan), text(2, 6)
    model.save_pretrained(tmp_path / "model")
    places = {"model.embedding": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    places |= {f"model.blocks.{i}": "disk" for i in range(len(model.model.blocks))}
    found = KLAForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "disk"
    )
    assert found.model.blocks[0].norm.weight.is_meta
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(found.generate(ids, max_new_tokens=4, do_sample=False), expected)


@plans
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("loss", ["mean", "marginal"])
def test_gradient_checkpointing(plan, reentrant, loss):
    model, ids = small(plan, loss=loss).train(), text(2, 6)

    def gradients():
        torch.manual_seed(3)
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    expected, ran = gradients(), []
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for block in model.model.blocks:
        block.norm.register_forward_hook(lambda *_: ran.append(1))
    for name, value in gradients().items():
        assert torch.equal(value, expected[name]), name
    held = loss == "marginal"  # the last block keeps what it computed
    assert len(ran) == 2 * len(model.model.blocks) - held


def test_variances_have_gradients_also_with_checkpoints():
    model, ids = small("kla*2").train(), text(2, 6)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    sum(v.sum() for v in model(ids, output_variances=True).variances).backward()
    assert bool((model.model.blocks[0].mixer.in_proj.weight.grad != 0).any())


@pytest.mark.parametrize("loss", ["mean", "marginal"])
def test_padding_on_the_left_does_not_make_the_loss_smaller(loss):
    model = small("kla*2", loss=loss)
    prompts, rows, mask = padded([4, 7])
    labels = rows.masked_fill(mask == 0, -100)
    counted = (labels[:, 1:] != -100).sum()  # as transformers' trainer does
    assert counted == 10  # 9 tokens have one before them, and one has padding
    with torch.no_grad():
        torch.manual_seed(0)
        alone = model(rows, attention_mask=mask, labels=labels).loss
        torch.manual_seed(0)
        found = model(rows, attention_mask=mask, labels=labels, num_items_in_batch=counted).loss
        torch.testing.assert_close(found, alone)
        if loss == "mean":
            each = [model(prompt, labels=prompt).loss * (prompt.shape[1] - 1) for prompt in prompts]
            torch.testing.assert_close(found, sum(each) / 9)


def test_the_trainer_says_the_same_loss_for_left_padding(tmp_path):
    def left(rows, longest=20):
        ids = torch.full((len(rows), longest), PAD)
        for row, one in zip(ids, rows, strict=True):
            row[longest - 12 :] = one["input_ids"]
        mask = torch.arange(longest).ge(longest - 12).long().expand_as(ids)
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "labels": ids.masked_fill(mask == 0, -100),
        }

    plain, other = (
        train(small("kla*2"), tmp_path / name, collator, max_steps=3)
        for name, collator in (("plain", None), ("left", left))
    )
    assert plain == pytest.approx(other, rel=1e-3)


def test_a_resized_head_does_not_start_again():
    model = small("kla*2")
    model.resize_token_embeddings(VOCABULARY + 3, mean_resizing=False)
    before = {name: p.clone() for name, p in model.named_parameters()}
    model.post_init()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name


def test_attention_weights():
    model = small("attention + kla + attention")
    _, rows, mask = padded((6, 4))
    with torch.no_grad():
        fused = model(rows, attention_mask=mask)
        found = model(rows, attention_mask=mask, output_attentions=True)
        model.set_attn_implementation("eager")
        eager = model(rows, attention_mask=mask)
    assert fused.attentions is None
    assert eager.attentions is None
    for other in (found, eager):
        real = mask.bool()
        torch.testing.assert_close(other.logits[real], fused.logits[real], rtol=1e-4, atol=1e-5)
    first, last = found.attentions
    assert first.shape == last.shape == (2, 2, 6, 6)
    torch.testing.assert_close(first.sum(-1), torch.ones(2, 2, 6))
    assert not bool(first.triu(1).any())
    assert not bool(first[1, :, 2:, :2].any())  # padding
    for block in model.model.blocks:  # nothing is left behind
        assert not [m for m in block.modules() if m._forward_hooks]


def test_attention_weights_while_generating():
    model, ids = small("attention + kla", attn_implementation="eager"), text(1, 4)
    options = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True}
    found = model.generate(ids, output_attentions=True, **options)
    assert [step[0].shape[-2:] for step in found.attentions] == [(4, 4), (1, 5), (1, 6)]
    model.set_attn_implementation("sdpa")
    assert torch.equal(found.sequences, model.generate(ids, **options).sequences)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_step_by_step_attention_trains(reentrant):
    model, ids = small("attention + kla").train(), text(2, 6)
    expected = torch.autograd.grad(model(ids, labels=ids).loss, [*model.parameters()])
    model.set_attn_implementation("eager")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model(ids, labels=ids).loss.backward()
    for value, (name, parameter) in zip(expected, model.named_parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, value, rtol=1e-4, atol=1e-6, msg=name)


def test_attention_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="no attention blocks"):
        small("kla*2")(text(1, 4), output_attentions=True)
    model = small("attention + kla")
    with pytest.raises(ValueError, match=r"not 'paged\|eager'"):
        model.set_attn_implementation("paged|eager")
