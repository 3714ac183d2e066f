"""First part of ``kla demo``: filter noisy signals with a gap in them, and draw the belief."""

from pathlib import Path

import torch
from torch import Tensor

from kalman_attention import ScanOutput, discretise, kla_scan
from kalman_attention.cli.table import render

NOISE = 0.4
GAP = slice(170, 230)


def show_belief(folder: Path) -> Path | None:
    """Filter, print how good the belief is, draw it; None if there is nothing to draw with."""
    a_bar, p_bar = (x.view(1, 1) for x in discretise(*torch.tensor([0.02, 0.15, 1.0])))
    signal = sample_prior(a_bar, p_bar)
    values, precision = observe(signal)
    out = filter_signals(values, precision, a_bar, p_bar)
    rows, T, _ = signal.shape
    print(f"{rows} random signals of {T} tokens, seen through noise of deviation {NOISE}, and not")
    print(f"at all from token {GAP.start} to {GAP.stop - 1}. What KLA believes after each token:\n")
    header = ["tokens", "rms error, raw", "rms error, KLA", "KLA expected", "truth inside 95 %"]
    print(render(header, _score(out, signal, values)))
    return _draw(folder, signal, values, out)


def sample_prior(a_bar: Tensor, p_bar: Tensor, rows: int = 1000, T: int = 400) -> Tensor:
    """Signals drawn from the prior that the filter assumes, ``[rows, T, 1]``."""
    noise = torch.randn(T + 1, rows, generator=torch.Generator().manual_seed(6))
    z, path = noise[0], []
    for t in range(T):
        z = a_bar[0, 0] * z + p_bar[0, 0].sqrt() * noise[t + 1]
        path.append(z)
    return torch.stack(path, dim=1).unsqueeze(-1)


def observe(signal: Tensor) -> tuple[Tensor, Tensor]:
    """Noisy values and the precision of each; precision 0 says "not observed"."""
    noise = torch.randn(signal.shape, generator=torch.Generator().manual_seed(2))
    precision = torch.full_like(signal, NOISE**-2)
    precision[:, GAP] = 0.0
    return signal + NOISE * noise, precision


def filter_signals(v: Tensor, lam_v: Tensor, a_bar: Tensor, p_bar: Tensor) -> ScanOutput:
    """The op itself, with one slot (N = 1) and one channel (D = 1)."""
    ones = torch.ones_like(v)
    return kla_scan(ones, ones, v, lam_v, a_bar, p_bar, return_variance=True)


def _score(out: ScanOutput, signal: Tensor, values: Tensor) -> list[list[str]]:
    assert out.y_var is not None
    gap = torch.zeros(signal.shape[1], dtype=torch.bool)
    gap[GAP] = True
    error, deviation = out.y - signal, out.y_var.sqrt()
    rows = []
    for name, where in (("observed", ~gap), ("in the gap", gap)):
        raw = "-" if name == "in the gap" else f"{_rms((values - signal)[:, where]):.3f}"
        inside = (error.abs() < 1.96 * deviation)[:, where].float().mean()
        expected = f"{_rms(deviation[:, where]):.3f}"
        rows.append([name, raw, f"{_rms(error[:, where]):.3f}", expected, f"{100 * inside:.1f} %"])
    return rows


def _rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


def _draw(folder: Path, signal: Tensor, values: Tensor, out: ScanOutput) -> Path | None:
    try:
        from kalman_attention.plots.belief import draw_belief
    except ModuleNotFoundError:
        return None
    assert out.y_var is not None
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "belief.png"
    observed = torch.ones(signal.shape[1], dtype=torch.bool)
    observed[GAP] = False
    first = (x[0, :, 0] for x in (signal, values, out.y, out.y_var))
    draw_belief(path, *first, observed=observed)
    return path
