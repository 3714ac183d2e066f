"""The same byte-level model with attention and with KLA: loss, time, and memory of decoding."""

import argparse
import sysconfig
import time
from pathlib import Path

import torch
from torch import Tensor

from kalman_attention import LanguageModel
from kalman_attention.nn.mixer import state_tensors

PLANS = ("attention*2", "attention + kla", "kla*2")
LENGTH = 256


def corpus(size: int = 2_000_000) -> Tensor:
    """The first bytes of the standard library's sources."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(path.read_bytes() for path in files)[:size]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def train(model: LanguageModel, data: Tensor, steps: int) -> tuple[float, float]:
    """Mean loss of the last tenth of the updates in nats per byte, and milliseconds per update."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, start = [], time.perf_counter()
    for _ in range(steps):
        at = torch.randint(len(data) - LENGTH - 1, (4,))
        rows = torch.stack([data[i : i + LENGTH + 1] for i in at.tolist()])
        loss = model.loss(rows[:, :-1], rows[:, 1:])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    last = losses[-max(1, steps // 10) :]
    return sum(last) / len(last), 1e3 * (time.perf_counter() - start) / steps


def main() -> None:
    """Train every plan on the same text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)  # small tensors: more threads only wait for each other
    data = corpus()
    for plan in PLANS:
        torch.manual_seed(0)
        model = LanguageModel(vocab_size=256, d_model=96, plan=plan, mlp="swiglu")
        loss, milliseconds = train(model, data, steps)
        with torch.no_grad():
            states = model.prefill(data[:4096][None]).states
        kept = sum(x.nbytes for state in states for _, x in state_tensors(state))
        print(f"{plan:16s} loss {loss:.2f}  {milliseconds:4.0f} ms per update", end="  ")
        print(f"{kept / 1024:6.0f} KiB of state after 4,096 tokens")


if __name__ == "__main__":
    main()
