"""Teach one KLA layer to recall: key-value pairs, then the keys again in another order.

Stop it with Ctrl-C or kill it, and run it again: it ends with the weights of a run never stopped.
"""

import argparse
from pathlib import Path

import torch

from kalman_attention import KLAConfig, LanguageModel, LanguageModelConfig
from kalman_attention.train import StreamBatches, TrainConfig, fit, token_evaluation, token_loss

KEYS = VALUES = 8


def make(generator: torch.Generator, rows: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of ``k v k v ... k v k v``; only a value whose key came before is a target."""
    first, second = (torch.rand(rows, KEYS, generator=generator).argsort(1) for _ in range(2))
    value_of = KEYS + torch.randint(VALUES, (rows, KEYS), generator=generator)
    keys = torch.cat([first, second], dim=1)
    values = value_of.gather(1, keys)
    inputs = torch.stack([keys, values], dim=2).flatten(1)
    targets = torch.stack([values, torch.full_like(values, -100)], dim=2).flatten(1)
    targets[:, : 2 * KEYS] = -100
    return inputs, targets


def main() -> None:
    """Train, and say how well the best model recalls."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--folder", type=Path, default=Path("runs/toy_recall"))
    args = parser.parse_args()
    torch.manual_seed(0)
    options = LanguageModelConfig(
        vocab_size=KEYS + VALUES, d_model=64, plan="kla", kla=KLAConfig(d_model=64, d_state=8)
    )
    config = TrainConfig(
        max_steps=args.steps, lr=5e-3, clip=5.0, schedule="cosine",
        eval_every=50, monitor="accuracy", target=0.99, threads=1,
    )  # fmt: skip
    held_out = [StreamBatches(make, seed=1).batch(i) for i in range(4)]
    result = fit(
        LanguageModel(options), StreamBatches(make, seed=0), token_loss(), config,
        folder=args.folder, evaluate=token_evaluation(held_out), about=options.to_dict(),
    )  # fmt: skip
    assert result.best is not None
    print(f"stopped by {result.reason} after {result.step} updates")
    print(f"best accuracy {result.best.value:.3f} (chance {1 / VALUES}), in {result.best.folder}")


if __name__ == "__main__":
    main()
