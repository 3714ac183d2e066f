"""The KLA layer as a drop-in mixer in a model of your own.

A tiny regressor predicts the next value of a noisy sine. The layer's state makes streaming exact.
"""

import torch
from torch import Tensor, nn

from kalman_attention import KLA


class Forecaster(nn.Module):
    """Project, mix over time with KLA, project back."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.encode = nn.Linear(1, width)
        self.filter = KLA(d_model=width, d_state=8)
        self.decode = nn.Linear(width, 1)

    def forward(self, x: Tensor, state=None):
        """Predictions, and the state to continue from."""
        y, _, state = self.filter.mix(h := self.encode(x), state)
        return self.decode(h + y), state


def waves(batch: int, length: int) -> Tensor:
    """Sines of random period and phase, with noise, ``[B, T, 1]``."""
    period = 10 + 30 * torch.rand(batch, 1)
    phase = 6.28 * torch.rand(batch, 1)
    clean = torch.sin(6.28 * torch.arange(length) / period + phase)
    return (clean + 0.1 * torch.randn(batch, length)).unsqueeze(-1)


def main() -> None:
    """Train for a moment, then stream."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # small tensors: more threads only wait for each other
    model = Forecaster()
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(150):
        x = waves(16, 65)
        loss = (model(x[:, :-1])[0] - x[:, 1:]).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 50 == 49:
            print(f"step {step:3d}  mean squared error {loss.item():.4f}")
    with torch.no_grad():
        x = waves(1, 200)
        whole, _ = model(x)
        state, parts = None, []
        for part in x.split([1, 7, 64, 128], 1):  # as the data comes in
            y, state = model(part, state)
            parts.append(y)
    print(f"streamed and whole differ by {(torch.cat(parts, 1) - whole).abs().max():.1e}")


if __name__ == "__main__":
    main()
