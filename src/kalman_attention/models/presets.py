"""Language models by name: ``<model>-<size>``, such as ``kla-45m`` or ``gpt+kla-micro``.

The paper's sizes, 45m and 180m (``app:lm-details``, ``tab:lm-pretrain-hparams``): 12 blocks and
untied embeddings of 32,768 tokens. It gives the widths of KLA only; all others are ours, chosen so
that "parameter-matched" holds within 1 % and a block's memory is close to KLA's.

- KLA: d_model 496 and 1360, d_state 32, no MLP. Value from the stream and precision at full width
  are not stated but follow from the counts, 45.3 M and 180.6 M (0.7 % and 0.4 % off); the other
  three combinations, with a precision rank of d_model / 8, miss by up to 12.7 %, 8.9 % and 3.4 %.
  A block remembers 64 d_model numbers, mean and variance.
- GPT: heads of 64 channels and a ReLU^2 MLP, d_model 384 and 896, the MLP's width set to meet the
  count (a factor of 4 would give 46.4 M and 174.3 M).
- Mamba: its published expansion of 2 with KLA's 32 slots, which is 64 d_model numbers too;
  d_model 444 and 1160, no MLP.
- Gated DeltaNet: square heads of 64 channels, 8 and 21 of them, which remember 3 % more and 1 %
  less than KLA's blocks; d_model 464 and 1232, no MLP.
- GPT+KLA, and likewise GPT+Mamba and GPT+GDN: the last attention mixer is replaced and its MLP
  stays. Width and parameters are those of the GPT; only next to Mamba, which is larger than what
  it replaces, the MLPs are a little narrower.

Ours alone, for two cores: nano (1.35 M parameters, minutes) and micro (2.0 M, an hour). Same rules
at 16 slots, heads of 28 to 36 channels and 4,096 tokens; pretraining gives them the vocabulary of
the data. Models of one size differ by less than 2 %. They have 4 blocks: at equal parameters fewer
and wider ones are faster on a CPU, and half of the vocabulary's parameters costs no arithmetic.
"""

from typing import Any

from kalman_attention.baselines.attention import AttentionConfig
from kalman_attention.baselines.gated_deltanet import GatedDeltaNetConfig
from kalman_attention.baselines.mamba import MambaConfig
from kalman_attention.models.config import LanguageModelConfig
from kalman_attention.nn.config import KLALayerConfig

PAPER_VOCABULARY, SMALL_VOCABULARY = 32_768, 4_096
ALIASES = {"nano": "kla-nano", "micro": "kla-micro"}
"""Short names."""

# Embedding and head start as in the training recipe that the paper follows: its embedding rate of
# 0.3 is meant for entries of size 1, and a small head starts at the entropy of the vocabulary.
_START: dict[str, Any] = {"embedding_std": 1.0, "head_std": 0.001}


def _model(d_model: int, plan: str, vocabulary: int, **options: Any) -> LanguageModelConfig:
    return LanguageModelConfig(
        vocab_size=vocabulary, d_model=d_model, plan=plan, **options, **_START
    )


def _delta(d_model: int, heads: int, head_dim: int) -> GatedDeltaNetConfig:
    expand = heads * head_dim / d_model
    return GatedDeltaNetConfig(d_model=d_model, num_heads=heads, expand_k=expand, expand_v=expand)


def _kla(d_model: int) -> LanguageModelConfig:
    kla = KLALayerConfig(d_model=d_model, d_state=32)
    return _model(d_model, "kla*12", PAPER_VOCABULARY, kla=kla)


def _mamba(d_model: int) -> LanguageModelConfig:
    mamba = MambaConfig(d_model=d_model, d_state=32)
    return _model(d_model, "mamba*12", PAPER_VOCABULARY, mamba=mamba)


def _gdn(d_model: int, heads: int) -> LanguageModelConfig:
    options = _delta(d_model, heads, 64)
    return _model(d_model, "gated_deltanet*12", PAPER_VOCABULARY, gated_deltanet=options)


def _gpt(d_model: int, mlp_width: int, last: str = "attention") -> LanguageModelConfig:
    options: dict[str, Any] = {
        "attention": None,
        "kla": KLALayerConfig(d_model=d_model, d_state=32),
        "mamba": MambaConfig(d_model=d_model, d_state=32),
        "gated_deltanet": _delta(d_model, d_model // 64, 64),
    }
    return _model(
        d_model,
        "attention*12" if last == "attention" else f"attention*11 + {last}",
        PAPER_VOCABULARY,
        mlp="relu2",
        mlp_width=mlp_width,
        **{last: options[last]},
    )


def _small(d_model: int, mixer: str, options: Any) -> LanguageModelConfig:
    return _model(d_model, f"{mixer}*4", SMALL_VOCABULARY, **{mixer: options})


def _small_gpt(d_model: int, mlp_width: int, last: str = "attention") -> LanguageModelConfig:
    options: dict[str, Any] = {
        "attention": AttentionConfig(d_model=d_model, num_heads=4),
        "kla": KLALayerConfig(d_model=d_model),
        "mamba": MambaConfig(d_model=d_model),
        "gated_deltanet": _delta(d_model, 4, d_model // 4),
    }
    return _model(
        d_model,
        "attention*4" if last == "attention" else f"attention*3 + {last}",
        SMALL_VOCABULARY,
        mlp="relu2",
        mlp_width=mlp_width,
        **{name: options[name] for name in ("attention", last)},
    )


PRESETS = {
    "kla-45m": _kla(496),
    "kla-180m": _kla(1360),
    "gpt-45m": _gpt(384, 1408),
    "gpt-180m": _gpt(896, 3840),
    "mamba-45m": _mamba(444),
    "mamba-180m": _mamba(1160),
    "gdn-45m": _gdn(464, 8),
    "gdn-180m": _gdn(1232, 21),
    "gpt+kla-45m": _gpt(384, 1408, "kla"),
    "gpt+kla-180m": _gpt(896, 3840, "kla"),
    "gpt+mamba-45m": _gpt(384, 1360, "mamba"),
    "gpt+mamba-180m": _gpt(896, 3808, "mamba"),
    "gpt+gdn-45m": _gpt(384, 1408, "gated_deltanet"),
    "gpt+gdn-180m": _gpt(896, 3840, "gated_deltanet"),
    "kla-nano": _small(128, "kla", KLALayerConfig(d_model=128)),
    "gpt-nano": _small_gpt(112, 264),
    "mamba-nano": _small(117, "mamba", MambaConfig(d_model=117)),
    "gdn-nano": _small(124, "gated_deltanet", _delta(124, 4, 32)),
    "gpt+kla-nano": _small_gpt(112, 264, "kla"),
    "gpt+mamba-nano": _small_gpt(112, 232, "mamba"),
    "gpt+gdn-nano": _small_gpt(112, 264, "gated_deltanet"),
    "kla-micro": _small(176, "kla", KLALayerConfig(d_model=176)),
    "gpt-micro": _small_gpt(144, 424),
    "mamba-micro": _small(160, "mamba", MambaConfig(d_model=160)),
    "gdn-micro": _small(164, "gated_deltanet", _delta(164, 6, 32)),
    "gpt+kla-micro": _small_gpt(144, 424, "kla"),
    "gpt+mamba-micro": _small_gpt(144, 392, "mamba"),
    "gpt+gdn-micro": _small_gpt(144, 408, "gated_deltanet"),
}
"""Configurations by name."""


def preset(name: str) -> LanguageModelConfig:
    """The configuration of a model by its name; ``nano`` and ``micro`` mean those of KLA."""
    full = ALIASES.get(name, name)
    if full not in PRESETS:
        known = ", ".join((*PRESETS, *ALIASES))
        raise ValueError(f"unknown preset {name!r}. Known presets: {known}.")
    return PRESETS[full]
