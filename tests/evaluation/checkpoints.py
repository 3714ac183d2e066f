"""A tiny model with a tokenizer, for tests of what needs both."""

import torch

from kalman_attention import AttentionConfig, KLAConfig, LanguageModel, LanguageModelConfig
from kalman_attention.data.tokenizer import train_tokenizer
from kalman_attention.evaluation.checkpoint import save_checkpoint
from tests.data.small import text


def tokenizer():
    return train_tokenizer([text(i, 40) for i in range(30)], 300)


def model(plan="kla*2", seed=0, **options):
    torch.manual_seed(seed)
    return LanguageModel(
        LanguageModelConfig(
            vocab_size=300,
            d_model=16,
            plan=plan,
            kla=KLAConfig(d_model=16, d_state=4),
            attention=AttentionConfig(d_model=16, num_heads=2),
            embedding_std=1.0,
            **options,
        )
    ).eval()


def checkpoint(folder, **options):
    save_checkpoint(model(**options), tokenizer(), folder)
    return folder
