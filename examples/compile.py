"""A model under torch.compile: one graph, the same numbers.

The scan is a registered operator, so a compiler sees one node and its gradient. The backend
``inductor`` needs a C++ compiler and a minute for the first call; ``aot_eager`` only traces.
"""

import argparse
import time

import torch

from kalman_attention import KLAConfig, LanguageModel, LanguageModelConfig


def milliseconds(run) -> float:
    """Best of three calls, after one to warm up."""
    run()
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return 1e3 * best


def main() -> None:
    """Compile, compare values, gradients and time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="inductor")
    backend = parser.parse_args().backend
    torch.manual_seed(0)
    kla = KLAConfig(d_model=128, d_state=8)
    model = LanguageModel(LanguageModelConfig(vocab_size=256, d_model=128, plan="kla*2", kla=kla))
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    tokens = torch.randint(256, (4, 128))

    def train(call):
        model.zero_grad()
        logits = call(tokens).logits
        torch.nn.functional.cross_entropy(logits[:, :-1].mT, tokens[:, 1:]).backward()
        return logits.detach(), model.embedding.weight.grad.clone()

    for name, plain, fast in zip(
        ("logits", "gradient"), train(model), train(compiled), strict=True
    ):
        difference = (plain - fast).abs().max().item()
        print(f"{name}: compiled and eager differ by {difference:.1e}")
        assert difference < 1e-4
    print(f"eager {milliseconds(lambda: train(model)):.1f} ms per step")
    print(f"{backend} {milliseconds(lambda: train(compiled)):.1f} ms per step")


if __name__ == "__main__":
    main()
