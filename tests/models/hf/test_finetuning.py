"""Adapters and fine-tuning with the libraries that people use for it."""

import pytest
import torch

from kalman_attention.hf import KLAForCausalLM
from tests.models.hf.small import small, text

peft = pytest.importorskip("peft", reason="pip install 'kalman_attention[finetune]'")
plans = pytest.mark.parametrize("plan", ["kla*2", "attention + kla"])


def adapted(model, **options):
    return peft.get_peft_model(
        model, peft.LoraConfig(r=4, lora_alpha=32, task_type="CAUSAL_LM", **options)
    )


@plans
def test_adapters_find_their_places(plan):
    model = adapted(small(plan))
    found = {name.split(".lora_")[0] for name, _ in model.named_parameters() if ".lora_" in name}
    blocks = {name.split("blocks.")[1] for name in found}
    expected = {"kla*2": {"0.mixer.in_proj", "0.mixer.evidence_proj", "0.mixer.out_proj"}}
    expected["attention + kla"] = {"0.mixer.qkv_proj", "0.mixer.out_proj"}
    own = {"1.mixer.in_proj", "1.mixer.evidence_proj", "1.mixer.out_proj"}
    assert blocks == expected[plan] | own
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert all(".lora_" in name for name in trained)


@plans
def test_train_merge_and_load_an_adapter(plan, tmp_path):
    base, ids = small(plan), text(4, 12)
    before = {name: p.clone() for name, p in base.named_parameters()}
    torch.manual_seed(0)
    model = adapted(base)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(15):
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.1
    model.eval()
    expected = model(input_ids=ids).logits
    tokens = model.generate(input_ids=ids, max_new_tokens=4, do_sample=False)
    model.save_pretrained(tmp_path)
    fresh = small(plan)
    for name, p in fresh.named_parameters():
        assert torch.equal(p, before[name]), name
    again = peft.PeftModel.from_pretrained(fresh, tmp_path).eval()
    torch.testing.assert_close(again(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-5)
    merged = again.merge_and_unload()
    assert type(merged) is KLAForCausalLM
    torch.testing.assert_close(merged(ids).logits, expected, rtol=1e-3, atol=1e-4)
    assert torch.equal(merged.generate(ids, max_new_tokens=4, do_sample=False), tokens)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_supervised_fine_tuning(tmp_path):
    trl = pytest.importorskip("trl", reason="pip install 'kalman_attention[finetune]'")
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["<pad>", "<end>", "a", "b", "c", "d"])}
    plain = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<end>", unk_token="<end>"
    )
    data = Dataset.from_dict({"text": ["a b c d a b c d", "b c d a b"] * 16})
    trainer = trl.SFTTrainer(
        model=small("attention + kla"),
        args=trl.SFTConfig(
            output_dir=str(tmp_path),
            max_steps=12,
            learning_rate=3e-2,
            per_device_train_batch_size=8,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=True,
        ),
        train_dataset=data,
        processing_class=tokenizer,
        peft_config=peft.LoraConfig(r=4, lora_alpha=32, task_type="CAUSAL_LM"),
    )
    trainer.train()
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    assert losses[-1] < 0.8 * losses[0]
