"""Names of the language models, ``<model>-<size>``: known without torch, for help and messages."""

from kalman_attention._text import unknown

MODELS = {
    "kla": "Kalman linear attention",
    "gpt": "attention with MLPs",
    "mamba": "Mamba",
    "gdn": "Gated DeltaNet",
    "gpt+kla": "attention with MLPs, the last mixer is KLA",
    "gpt+mamba": "attention with MLPs, the last mixer is Mamba",
    "gpt+gdn": "attention with MLPs, the last mixer is Gated DeltaNet",
}
"""What stands before the dash, and what it is."""

SIZES = {
    "nano": "1.35 M parameters; minutes on two cores",
    "micro": "2.0 M parameters; an hour on two cores",
    "45m": "45 M parameters, as in the paper",
    "180m": "180 M parameters, as in the paper",
}
"""What stands after the dash, and what it means."""

ALIASES = {"nano": "kla-nano", "micro": "kla-micro"}
"""Short names."""

NAMES = tuple(f"{model}-{size}" for size in SIZES for model in MODELS)
"""All names but the short ones."""


def full_name(name: str) -> str:
    """The name of a model without shortcuts; one that is not known is an error."""
    full = ALIASES.get(name, name)
    if full not in NAMES:
        raise ValueError(unknown("preset", name, (*NAMES, *ALIASES)))
    return full
