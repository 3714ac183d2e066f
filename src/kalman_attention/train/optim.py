r"""Parameter groups: those of the paper's pretraining, and a single one for its tasks.

Pretraining (``app:lm-details``, ``tab:lm-pretrain-hparams``):

============  =================================================  =========  ============
 group         what                                               base rate  weight decay
============  =================================================  =========  ============
 embedding     token embedding (and the head, if tied)            0.3        0
 head          output matrix                                      0.004      0.1
 hidden        every other matrix                                 0.004      0.1
 vector        gains, biases, skips, depthwise filters            0.004      0
 state_space   the prior on the latent: decay rate, diffusion,    0.0004     0
               step size, initial belief
============  =================================================  =========  ============

The paper lists the last group as :math:`(\lambda, \Delta, q, A)`, in the notation of an older text
in which q is the process noise, not a projection. It states no learning rate for head and vectors:
we use the hidden one, which for the head is also the rate of the recipe that the paper follows.

All rates scale with sqrt(768 / d_model) and sqrt(batch tokens / 2^19).

A module declares the group of its parameters by an attribute ``parameter_group``. (Attributes of
parameters would not survive a copy of the model.)
"""

import math
from dataclasses import dataclass
from typing import Any

from torch import nn

_RATES = ("embedding", "head", "hidden", "vector")
GROUPS = (*_RATES, "state_space")
"""Names of the groups, in the order in which they are returned."""

# Where the base rates hold: the width and the tokens per update of the recipe the paper follows.
_WIDTH, _BATCH = 768, 2**19
_DECAYED = ("head", "hidden")


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Base learning rates and weight decay, at width 768 and 2^19 tokens per step.

    Attributes:
        embedding: rate of the embedding.
        head: rate of the head.
        hidden: rate of the matrices.
        vector: rate of the vectors.
        state_space_ratio: rate of the prior divided by the hidden rate.
        weight_decay: weight decay of head and matrices; nothing else decays.
        betas: Adam's betas.
        eps: Adam's epsilon.
    """

    embedding: float = 0.3
    head: float = 4e-3
    hidden: float = 4e-3
    vector: float = 4e-3
    state_space_ratio: float = 0.1
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.8, 0.95)
    eps: float = 1e-10

    def __post_init__(self) -> None:
        for name in (*_RATES, "state_space_ratio", "weight_decay"):
            value = getattr(self, name)
            if not 0.0 <= value < math.inf:
                raise ValueError(f"{name} must be 0 or more, and finite, got {value!r}.")
        if len(self.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {self.betas!r}.")
        if not 0.0 < self.eps < math.inf:
            raise ValueError(f"eps must be positive and finite, got {self.eps!r}.")


def group_names(model: nn.Module) -> dict[str, str]:
    """The group of every parameter by name; shared parameters appear under their first name."""
    found: dict[int, str] = {}
    names: dict[str, str] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in found:
                found[id(parameter)] = _group(module, parameter)
                names[f"{prefix}.{name}" if prefix else name] = found[id(parameter)]
    return names


def param_groups(
    model: nn.Module,
    *,
    d_model: int = _WIDTH,
    batch_tokens: int = _BATCH,
    rates: Rates | None = None,
) -> list[dict[str, Any]]:
    """Groups for ``torch.optim.AdamW``, with the paper's rates.

    Args:
        model: any model; parameters that need no gradient are left out.
        d_model: its width, for the width factor.
        batch_tokens: tokens per optimiser step, for the batch factor.
        rates: base rates; None for the paper's.

    Returns:
        One dictionary per group that has parameters: name, params, lr, weight_decay, betas, eps.
    """
    rates = rates or Rates()
    scale = math.sqrt(_WIDTH / d_model) * math.sqrt(batch_tokens / _BATCH)
    base = {name: getattr(rates, name) for name in _RATES}
    base["state_space"] = rates.state_space_ratio * rates.hidden
    members: dict[str, list[nn.Parameter]] = {name: [] for name in GROUPS}
    for name, group in group_names(model).items():
        parameter = model.get_parameter(name)
        if parameter.requires_grad:
            members[group].append(parameter)
    return [
        {
            "name": name,
            "params": members[name],
            "lr": base[name] * scale,
            "weight_decay": rates.weight_decay if name in _DECAYED else 0.0,
            "betas": rates.betas,
            "eps": rates.eps,
        }
        for name in GROUPS
        if members[name]
    ]


def flat_groups(
    model: nn.Module,
    *,
    lr: float = 1e-3,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> list[dict[str, Any]]:
    """One group for ``torch.optim.AdamW``; the defaults are those of the synthetic tasks.

    Args:
        model: any model; parameters that need no gradient are left out.
        lr: learning rate.
        weight_decay: weight decay.
        betas: Adam's betas.
        eps: Adam's epsilon.

    Returns:
        A list with one group: name, params, lr, weight_decay, betas, eps.
    """
    params = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {
            "name": "all",
            "params": params,
            "lr": lr,
            "weight_decay": weight_decay,
            "betas": betas,
            "eps": eps,
        }
    ]


def matrix_decay_groups(
    model: nn.Module,
    *,
    lr: float = 1e-3,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> list[dict[str, Any]]:
    """Two groups at one rate for ``torch.optim.AdamW``: only head and hidden matrices decay.

    Args:
        model: any model; parameters that need no gradient are left out.
        lr: learning rate of all parameters.
        weight_decay: weight decay of head and matrices.
        betas: Adam's betas.
        eps: Adam's epsilon.

    Returns:
        The groups, as ``param_groups`` returns them.
    """
    # Step sizes are stored through softplus: decay towards 0 would move them from 1e-4 to 4e-2 in
    # 1,500 updates, a memory of 25 tokens.
    members: dict[str, list[nn.Parameter]] = {"matrices": [], "others": []}
    for name, group in group_names(model).items():
        parameter = model.get_parameter(name)
        if parameter.requires_grad:
            members["matrices" if group in _DECAYED else "others"].append(parameter)
    common = {"lr": lr, "betas": betas, "eps": eps}
    return [
        {"name": name, "params": params, "weight_decay": decay, **common}
        for (name, params), decay in zip(members.items(), (weight_decay, 0.0), strict=True)
        if params
    ]


def _group(module: nn.Module, parameter: nn.Parameter) -> str:
    declared = getattr(module, "parameter_group", None)
    if isinstance(declared, str):
        return declared
    if isinstance(module, nn.Embedding):
        return "embedding"
    return "hidden" if parameter.dim() >= 2 else "vector"
