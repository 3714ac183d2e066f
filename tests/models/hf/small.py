"""Small models behind transformers' interfaces, and padded batches for them."""

import torch

from kalman_attention.hf import KLAForCausalLM, KLAHFConfig
from tests.models.small import PLANS, VOCABULARY, text

PAD = 0
__all__ = ["PAD", "PLANS", "VOCABULARY", "config", "padded", "small", "text"]


def config(plan="kla*2", **options):
    defaults = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "state_size": 4,
        "num_attention_heads": 2,
        "head_initializer_range": None,
    }
    if "mamba" in plan:
        defaults["mixer_options"] = {"mamba": {"d_state": 4}}
    return KLAHFConfig(layer_types=plan, **{**defaults, **options})


def small(plan="kla*2", seed=0, **options):
    torch.manual_seed(seed)
    return KLAForCausalLM(config(plan, **options)).eval()


def padded(lengths, left=True):
    """Prompts of these lengths, and the same ones padded to one batch, with its mask."""
    prompts = [text(1, n, seed=n).clamp(min=1) for n in lengths]
    longest = max(lengths)
    rows = torch.full((len(lengths), longest), PAD)
    mask = torch.zeros_like(rows)
    for i, prompt in enumerate(prompts):
        n = prompt.shape[1]
        place = slice(longest - n, longest) if left else slice(0, n)
        rows[i, place], mask[i, place] = prompt[0], 1
    return prompts, rows, mask
