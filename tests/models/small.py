"""Small models for the tests."""

import torch

from kalman_attention import (
    AttentionConfig,
    KLAConfig,
    LanguageModel,
    LanguageModelConfig,
    MambaConfig,
)

VOCABULARY = 37

PLANS = {
    "pure": "kla*2",
    "hybrid": "attention + kla",
    "any": "kla + attention*2",
    "mamba": "mamba*2",
    "attention and mamba": "attention + mamba",
    "matrices": "gla + gated_deltanet + mlstm",
}

FILTERS = [
    {},
    {"prior": "learned", "initial_mean": 1.0},
    {"shared_slots": 2},
    {"step_rank": 2},
    {"shared_slots": 2, "num_reflections": 1},
]
"""Options of the layer, one row per kind of filter."""


def small(plan="kla*2", seed=0, d_state=4, **options):
    torch.manual_seed(seed)
    kla = KLAConfig(d_model=16, d_state=d_state, **options.pop("kla", {}))
    config = LanguageModelConfig(
        d_model=16,
        plan=plan,
        kla=kla,
        attention=AttentionConfig(d_model=16, num_heads=2),
        mamba=MambaConfig(d_model=16, d_state=d_state),
        **{"vocab_size": VOCABULARY, "embedding_std": 1.0, **options},
    )
    return LanguageModel(config)


def text(B, T, seed=1):
    return torch.randint(VOCABULARY, (B, T), generator=torch.Generator().manual_seed(seed))
