"""How sure is the model? Variance, Kalman gain, and entropy split into two kinds of doubt.

A model learns sequences that repeat a random word of three letters. While the word is new it cannot
know what comes; once it has come round, it can.
"""

import argparse
from pathlib import Path

import torch

from kalman_attention import KLAConfig, LanguageModel, LanguageModelConfig
from kalman_attention.evaluation.uncertainty import attention_maps, format_table, token_table

LETTERS = "abcdefgh"


def batch(rows: int) -> torch.Tensor:
    """Random words, each four times over, ``[rows, 12]``."""
    return torch.randint(len(LETTERS), (rows, 3)).repeat(1, 4)


def main() -> None:
    """Train with the marginal likelihood, then look inside."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plots", type=Path, default=None, help="folder for two figures")
    parser.add_argument("--steps", type=int, default=150)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # small tensors: more threads only wait for each other
    kla = KLAConfig(d_model=48, d_state=8, diffusion=0.5)
    config = LanguageModelConfig(vocab_size=len(LETTERS), d_model=48, plan="kla*2", kla=kla)
    model = LanguageModel(config)
    optimiser = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(args.steps):
        tokens = batch(16)
        loss = model.loss(tokens[:, :-1], tokens[:, 1:], kind="marginal", num_samples=4)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 50 == 0:
            print(f"step {step:3d}  marginal loss {loss.item():.3f} nats")
    tokens = batch(1)
    word = [LETTERS[i] for i in tokens[0].tolist()]
    found = model.uncertainty(tokens, num_samples=32)
    print(format_table(token_table(found, word)))
    if args.plots is not None:
        from kalman_attention.plots.beliefs import plot_attention_maps, plot_posterior_variance

        args.plots.mkdir(parents=True, exist_ok=True)
        figure = plot_posterior_variance(found.variance[-1][0], found.gain[-1][0], word)
        figure.savefig(args.plots / "posterior_variance.png", dpi=150)
        maps = attention_maps(model, tokens, block=-1, channels=range(3))
        plot_attention_maps(maps[0], tokens=word).savefig(args.plots / "maps.png", dpi=150)


if __name__ == "__main__":
    main()
