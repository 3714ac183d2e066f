"""One update of the weights: batches, loss, gradients, clipping, AdamW."""

import contextlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kalman_attention.parallel.batch import to_device
from kalman_attention.parallel.ranks import Parallel
from kalman_attention.parallel.sharding import whole
from kalman_attention.train.config import TrainConfig
from kalman_attention.train.data import Batches
from kalman_attention.train.nonfinite import keep_nonfinite
from kalman_attention.train.objective import Loss, Metrics
from kalman_attention.train.optim import flat_groups
from kalman_attention.train.precision import product_context
from kalman_attention.train.seeds import derive_seed, seed_global

_TAKEN = ("kind", "step", "loss", "grad_norm", "lr", "seconds")


class Updater:
    """Updates a model; each update is a function of seed, step, weights, moments and batches.

    Args:
        model: the model, on its device.
        batches: the data.
        loss: the loss to minimise.
        config: options of the training.
        groups: parameter groups for AdamW; None for one with the learning rate of the config.
        folder: folder of the run, where updates that are not finite are saved.
        parallel: the processes that train together.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Batches,
        loss: Loss,
        config: TrainConfig,
        groups: Sequence[dict[str, Any]] | None,
        folder: Path,
        parallel: Parallel,
    ) -> None:
        self.model, self.batches = model, batches
        self.config, self.folder, self.parallel = config, folder, parallel
        self.device = next(model.parameters()).device
        self.optimiser = _optimiser(model, groups, config)
        self._rates = [group["lr"] for group in self.optimiser.param_groups]
        self._all = list(model.parameters())
        self._parameters = _trained(model, self.optimiser)
        self._generator = torch.Generator(self.device)
        self._objective = parallel.objective(model, loss)

    def update(self, step: int, total: int) -> dict[str, float | Tensor]:
        """Make one update.

        Args:
            step: updates already made.
            total: updates of the whole run.

        Returns:
            Values to log: loss, norm of the gradients before clipping, learning rates, and the
            metrics of the loss, which stay on their device.
        """
        self._set_rates(self.config.factor(step, total))
        # Seeds depend on the step alone, so a resumed run draws the same random numbers.
        seed = derive_seed(self.config.seed, "step", step, *self.parallel.seed_parts)
        seed_global(seed, self.device)
        with self.products():
            batches, losses, metrics = self._backward(step)
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        sizes = [*losses, whole(norm).to(losses[0])]
        *values, size = torch.stack(sizes).tolist()  # the only synchronisation of an update
        if not (math.isfinite(size) and all(map(math.isfinite, values))):
            raise keep_nonfinite(
                self.folder, step, self.model, batches, values, size, seed, self.parallel
            )
        if self.config.clip is not None:
            nn.utils.clip_grads_with_norm_(self._parameters, self.config.clip, norm)
        self.optimiser.step()
        self.clear_gradients()
        mean = sum(values) / len(values)
        return {"loss": mean, "grad_norm": size, **self._named_rates(), **_average(metrics)}

    def clear_gradients(self) -> None:
        """Clear all gradients, including those of parameters that no group trains."""
        for parameter in self._all:
            parameter.grad = None

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which the model runs."""
        if self.config.dtype == "float32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def products(self) -> contextlib.AbstractContextManager[Any]:
        """The context of evaluations and of forward and backward passes, around autocast."""
        return product_context(self.config.dtype, self.device)

    def _backward(self, step: int) -> tuple[list[Any], list[Tensor], list[Metrics]]:
        """Accumulate the gradients of all batches of an update."""
        count = self.config.accumulate
        batches, losses, metrics = [], [], []
        for i in range(count):
            batch = next(self.batches)
            batch = batch if self.device.type == "cpu" else to_device(batch, self.device)
            parts = ("loss", step, i, *self.parallel.seed_parts)
            self._generator.manual_seed(derive_seed(self.config.seed, *parts))
            with self._objective.accumulating(last=i == count - 1):
                with self.autocast():
                    loss, extra = self._objective(batch, self._generator)
                # Divided here, so that accumulated gradients are those of the mean loss.
                torch.autograd.backward(loss if count == 1 else loss / count)
            batches.append(batch)
            losses.append(loss.detach())
            metrics.append(extra)
        return batches, losses, metrics

    def _set_rates(self, factor: float) -> None:
        for group, rate in zip(self.optimiser.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor

    def _named_rates(self) -> dict[str, float]:
        groups = self.optimiser.param_groups
        if len(groups) == 1:
            return {"lr": groups[0]["lr"]}
        return {f"lr/{group.get('name', i)}": group["lr"] for i, group in enumerate(groups)}


def _optimiser(
    model: nn.Module, groups: Sequence[dict[str, Any]] | None, config: TrainConfig
) -> torch.optim.AdamW:
    """AdamW with the given groups, or with one group."""
    # Fused: it is the fastest, and gives the same bits for every memory layout of the tensors.
    lr, decay, betas, eps = config.lr, config.weight_decay, config.betas, config.eps
    if groups is None:
        groups = flat_groups(model, lr=lr, weight_decay=decay, betas=betas, eps=eps)
    own = [dict(group) for group in groups]  # the optimiser writes into them
    return torch.optim.AdamW(own, lr=lr, weight_decay=decay, betas=betas, eps=eps, fused=True)


def _trained(model: nn.Module, optimiser: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The parameters that the optimiser trains, in the order of the model."""
    chosen = {id(p) for group in optimiser.param_groups for p in group["params"]}
    found = [p for p in model.parameters() if id(p) in chosen]
    if len(found) != len(chosen):
        raise ValueError(
            f"groups contain {len(chosen) - len(found)} parameters that are not part of the model, "
            "and would be missing from checkpoints: make their module a part of the model."
        )
    return found


def _average(metrics: Sequence[Metrics]) -> dict[str, float | Tensor]:
    """Mean over the batches of an update, still on their device."""
    found: dict[str, float | Tensor] = {}
    for name in metrics[0]:
        if name in _TAKEN:
            raise ValueError(
                f"the loss returns a metric {name!r}, a name that the loop uses itself. Rename it."
            )
        values = [each[name] for each in metrics]
        total = sum(v.detach() if isinstance(v, Tensor) else v for v in values)
        found[name] = total / len(values)
    return found
