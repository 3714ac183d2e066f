"""One rotating KLA layer learns parity at up to 20 tokens, and is asked at up to 256.

The plain layer is trained in the same way; its state only decays, so it cannot follow parity.
"""

import argparse

import torch
from torch import Tensor

from kalman_attention import KLAConfig, LanguageModel, LanguageModelConfig
from kalman_attention.train.optim import matrix_decay_groups

WIDTH, LONGEST, SOLVED = 32, 20, 0.3
LAYERS = {
    "rotating": KLAConfig.tracking(d_model=WIDTH, num_reflections=1),
    "plain": KLAConfig(d_model=WIDTH),
}


def batch(rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Random bits ``[rows, length]``, and the parity of all bits up to each of them."""
    bits = torch.randint(2, (rows, length))
    return bits, bits.cumsum(1) % 2


def train(kla: KLAConfig, steps: int) -> LanguageModel:
    """Sequences grow by one token whenever the loss of a batch is below ``SOLVED``."""
    torch.manual_seed(0)
    config = LanguageModelConfig(vocab_size=2, d_model=WIDTH, plan="kla", kla=kla)
    model, length = LanguageModel(config), 4
    optimiser = torch.optim.AdamW(matrix_decay_groups(model, weight_decay=0.1))
    for step in range(steps):
        for group in optimiser.param_groups:  # the rate falls to 0 in the last 40 % of the updates
            group["lr"] = 3e-3 * min(1.0, (steps - step) / (0.4 * steps))
        loss = model.loss(*batch(64, length))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        length = min(LONGEST, length + (loss.item() < SOLVED))
    return model


def main() -> None:
    """Train both, and count the sequences in which every answer is right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)  # small tensors: more threads only wait for each other
    for name, kla in LAYERS.items():
        model = train(kla, steps)
        for length in (LONGEST, 64, 256):
            bits, parity = batch(200, length)
            with torch.no_grad():
                right = (model(bits).logits.argmax(-1) == parity).all(1).float().mean()
            print(f"{name:8s}  length {length:3d}  whole sequences right {right:.0%}")


if __name__ == "__main__":
    main()
