"""One run on one process and on many: torchrun --nproc-per-node=2 examples/scale_out.py."""

import argparse
import json
import sysconfig
from operator import sub
from pathlib import Path

import torch

from kalman_attention import KLAConfig, LanguageModel, LanguageModelConfig
from kalman_attention.parallel import Parallel, from_environment
from kalman_attention.plots.common import save_figure
from kalman_attention.plots.training import plot_scale_out
from kalman_attention.recipes.machine import about
from kalman_attention.train import TensorBatches, TrainConfig, fit, token_loss

WAYS = {"DDP": ("ddp", 1), "FSDP2": ("fsdp", 1), "sequences split": ("ddp", None)}


def train(folder: Path, steps: int, parallel: Parallel | None) -> list[float]:
    """Train a byte-level model on Python's own sources; the loss of every update."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(path.read_bytes() for path in files)[: 257 * 4096]
    rows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().view(-1, 257)
    torch.manual_seed(0)
    kla = KLAConfig(d_model=64, d_state=8)
    model = LanguageModel(LanguageModelConfig(vocab_size=256, d_model=64, plan="kla*2", kla=kla))
    config = TrainConfig(max_steps=steps, lr=2e-3, clip=1.0, log_every=1, threads=1)
    batches = TensorBatches([rows], batch_size=8)
    options = {"folder": folder, "parallel": parallel, "progress": False}
    done = fit(model, batches, token_loss(), config, **options)
    return [record["loss"] for record in done.history if record["kind"] == "train"]


def main() -> None:
    """Train in every way, compare, draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--runs", type=Path, default=Path("runs/scale-out"))
    parser.add_argument("--out", type=Path, default=Path("results/scale-out"))
    parser.add_argument("--figure", type=Path, default=Path("docs/images/scale_out.png"))
    args = parser.parse_args()
    with from_environment("ddp") as ranks:
        alone = train(args.runs / "one", args.steps, None) if ranks.main else []
        curves = {"one process": alone}
        for name, (kind, context) in WAYS.items():
            many = Parallel(kind, context or ranks.size)
            curves[f"{ranks.size} ranks, {name}"] = train(args.runs / name, args.steps, many)
        if ranks.main:
            apart = {n: max(map(abs, map(sub, c, alone))) for n, c in curves.items()}
            found = {"about": about(), "ranks": ranks.size, "apart": apart, "curves": curves}
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / "curves.json").write_text(json.dumps(found, indent=1) + "\n")
            print(*(f"{n:26s} at most {d:.1e} apart" for n, d in apart.items()), sep="\n")
            save_figure(plot_scale_out(curves), args.figure)


if __name__ == "__main__":
    main()
