"""Names of the language models, ``<model>-<size>``, available without torch for help texts."""

from kalman_attention._text import unknown

MODELS = {
    "kla": "Kalman linear attention, the paper's block",
    "kla-text": "the same with our options for text",
    "gpt": "attention with MLPs",
    "mamba": "Mamba",
    "mamba-norm": "the same with a norm of the read-out",
    "gdn": "Gated DeltaNet",
    "gpt+kla": "attention with MLPs, the last mixer is KLA",
    "gpt+mamba": "attention with MLPs, the last mixer is Mamba",
    "gpt+gdn": "attention with MLPs, the last mixer is Gated DeltaNet",
}
"""The part of a name before the dash, and its meaning."""

SIZES = {
    "nano": "1.35 M parameters; minutes on two cores",
    "micro": "2.0 M parameters; an hour on two cores",
    "45m": "45 M parameters, as in the paper",
    "180m": "180 M parameters, as in the paper",
}
"""The part of a name after the dash, and its meaning."""

ALIASES = {"nano": "kla-nano", "micro": "kla-micro"}
"""Short names."""

NAMES = tuple(f"{model}-{size}" for size in SIZES for model in MODELS)
"""All full names, without the shortcuts."""


def full_name(name: str) -> str:
    """The full name of a model; raises an error if the name is unknown."""
    full = ALIASES.get(name, name)
    if full not in NAMES:
        raise ValueError(unknown("preset", name, (*NAMES, *ALIASES)))
    return full
