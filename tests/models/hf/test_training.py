"""The Trainer, as users call it."""

import pytest
import torch
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from tests.models.hf.small import VOCABULARY, small


class Words(torch.utils.data.Dataset):
    """Rows that repeat a random word of three tokens four times over."""

    def __init__(self, rows=64):
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randint(VOCABULARY, (rows, 3), generator=generator).repeat(1, 4)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def train(model, folder, collator=None, resume=None, **options):
    settings = {
        "max_steps": 12,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 0,
        **options,
    }
    arguments = TrainingArguments(output_dir=str(folder), **settings)
    trainer = Trainer(model, arguments, train_dataset=Words(), data_collator=collator)
    trainer.train(resume_from_checkpoint=resume)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(
    ("plan", "model", "options"),
    [
        ("kla*2", {}, {}),
        ("attention + kla", {"loss": "marginal", "loss_samples": 3}, {}),
        ("kla*2", {"tie_word_embeddings": True}, {"gradient_checkpointing": True}),
        ("attention + kla", {}, {"bf16": True}),
        ("kla*2", {}, {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}),
    ],
    ids=["pure", "marginal", "checkpointed and tied", "bfloat16 autocast", "accumulated"],
)
def test_the_trainer_lowers_the_loss(tmp_path, plan, model, options):
    net = small(plan, hidden_size=32, **model)
    losses = train(net, tmp_path, **options)
    assert losses[-1] < 0.9 * losses[0]
    assert all(bool(p.isfinite().all()) for p in net.parameters())


def test_accumulated_batches_equal_one_batch(tmp_path):
    curves = []
    for n in (1, 2):
        options = {"gradient_accumulation_steps": n, "per_device_train_batch_size": 8 // n}
        model = small(hidden_size=32)
        curves.append(train(model, tmp_path, max_steps=3, **options))
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)


def test_flattened_batches_keep_documents_apart(tmp_path):
    # transformers' padding-free training: documents in one row, told apart by position_ids.
    model, rows = small("attention + kla"), Words(3)
    batch = DataCollatorWithFlattening(return_tensors="pt")([rows[i] for i in range(3)])
    loss = model(**batch).loss
    expected = torch.stack([model(x[None], labels=x[None]).loss for x in rows.rows]).mean()
    torch.testing.assert_close(loss, expected)
    losses = train(small(hidden_size=32), tmp_path, DataCollatorWithFlattening())
    assert losses[-1] < 0.9 * losses[0]


def test_evaluation_and_prediction(tmp_path):
    arguments = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, disable_tqdm=True)
    model, data = small("attention + kla"), Words(16)
    trainer = Trainer(model, arguments, eval_dataset=data)
    expected = model(data.rows, labels=data.rows)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected.loss.item(), rel=1e-5)
    found = torch.from_numpy(trainer.predict(data).predictions)
    torch.testing.assert_close(found, expected.logits, rtol=1e-5, atol=1e-5)


def test_checkpoints_resume(tmp_path):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = train(small(hidden_size=32), tmp_path, **options)
    other = small(hidden_size=32, seed=1)
    resumed = train(other, tmp_path / "again", resume=str(tmp_path / "checkpoint-2"), max_steps=4)
    assert resumed == pytest.approx(whole, rel=1e-4)
