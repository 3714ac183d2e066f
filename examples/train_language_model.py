"""Train a small KLA language model on Python's own standard library, byte by byte."""

import argparse
import sysconfig
import time
from pathlib import Path

import torch

from kalman_attention import KLAConfig, LanguageModel, LanguageModelConfig, save_model
from kalman_attention.train.optim import Rates, param_groups


def corpus(size: int = 2_000_000) -> torch.Tensor:
    """The first bytes of the standard library's sources."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(path.read_bytes() for path in files)[:size]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def main() -> None:
    """Train, print the loss, continue a prompt."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, default=None, help="folder to save the model in")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # small tensors: more threads only wait for each other
    data = corpus()
    config = LanguageModelConfig(
        vocab_size=256, d_model=96, plan="kla*2", kla=KLAConfig(d_model=96, d_state=8)
    )
    model = LanguageModel(config)
    rates = Rates(embedding=5e-3, head=5e-3, hidden=5e-3, vector=5e-3)
    optimiser = torch.optim.AdamW(param_groups(model, rates=rates), lr=5e-3)
    print(f"{model.num_parameters():,} parameters, {len(data):,} bytes")
    start = time.perf_counter()
    for step in range(args.steps):
        at = torch.randint(len(data) - 129, (4,))
        rows = torch.stack([data[i : i + 129] for i in at.tolist()])
        loss = model.loss(rows[:, :-1], rows[:, 1:])
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 3.0)
        optimiser.step()
        if step % 100 == 0 or step == args.steps - 1:
            seconds = time.perf_counter() - start
            print(f"step {step:4d}  loss {loss.item():.3f} nats per byte  {seconds:.0f} s")
    prompt = torch.tensor([list(b"def main(")])
    found = model.generate(prompt, max_new_tokens=60, temperature=0.7, top_k=20)
    print("def main(" + bytes(found.tokens[0].tolist()).decode(errors="replace"))
    if args.out is not None:
        save_model(model, args.out)


if __name__ == "__main__":
    main()
