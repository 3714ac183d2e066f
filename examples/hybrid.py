"""Pure and hybrid stacks from one line of configuration.

The task is recall: after pairs of key and value, a key comes again and its value is wanted.
"""

import argparse

import torch

from kalman_attention import KLAConfig, LanguageModel, LanguageModelConfig

KEYS, PAIRS = 8, 4


def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens ``[rows, 2 PAIRS + 1]`` and the value that belongs to the last key."""
    keys = torch.rand(rows, KEYS).argsort(1)[:, :PAIRS]
    values = torch.randint(KEYS, 2 * KEYS, (rows, PAIRS))
    pairs = torch.stack([keys, values], 2).flatten(1)
    asked = torch.randint(PAIRS, (rows, 1))
    return torch.cat([pairs, keys.gather(1, asked)], 1), values.gather(1, asked)[:, 0]


def train(plan: str, steps: int) -> tuple[float, int]:
    """Accuracy of the recalled value, and the size of the model."""
    torch.manual_seed(0)
    kla = KLAConfig(d_model=64, d_state=8)
    model = LanguageModel(
        LanguageModelConfig(vocab_size=2 * KEYS, d_model=64, plan=plan, kla=kla, mlp="swiglu")
    )
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        tokens, answer = batch(64)
        logits = model(tokens, logits_to_keep=1).logits[:, 0]
        loss = torch.nn.functional.cross_entropy(logits, answer)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    with torch.no_grad():
        tokens, answer = batch(1000)
        hits = model(tokens, logits_to_keep=1).logits[:, 0].argmax(-1) == answer
    return hits.float().mean().item(), model.num_parameters()


def main() -> None:
    """Train three stacks on the same task."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=250)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)  # small tensors: more threads only wait for each other
    for plan in ("kla*2", "attention*2", "attention + kla"):
        accuracy, size = train(plan, steps)
        print(f"{plan:16s} {size:7,} parameters  recalls {accuracy:.0%} (chance {1 / KEYS:.0%})")


if __name__ == "__main__":
    main()
