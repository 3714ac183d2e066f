"""Train a KLA model with transformers' Trainer on bytes of the standard library."""

import argparse
import os
import tempfile
from pathlib import Path

import torch
from transformers import Trainer, TrainingArguments

from kalman_attention.hf import KLAForCausalLM, KLAHFConfig

LENGTH = 96


class Bytes(torch.utils.data.Dataset):
    """Rows of ``LENGTH`` bytes of Python's own source code."""

    def __init__(self, files: int = 20) -> None:
        paths = sorted(Path(os.__file__).parent.glob("*.py"))[:files]
        data = torch.tensor(list(b"".join(path.read_bytes() for path in paths)))
        self.rows = data[: len(data) // LENGTH * LENGTH].view(-1, LENGTH)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def main() -> None:
    """A hundred steps in a few seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--loss", choices=("mean", "marginal"), default="mean")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # small tensors: more threads only wait for each other
    size = {"vocab_size": 256, "hidden_size": 96, "state_size": 8, "num_hidden_layers": 2}
    config = KLAHFConfig(**size, loss=args.loss)
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=args.steps,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        logging_steps=max(1, args.steps // 10),
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(KLAForCausalLM(config), arguments, train_dataset=Bytes())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"loss fell from {losses[0]:.2f} to {losses[-1]:.2f} nats per byte")


if __name__ == "__main__":
    main()
