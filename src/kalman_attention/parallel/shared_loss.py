"""A loss over all ranks: sums and counts are added up, instead of averaging means."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kalman_attention.parallel.batch import share_rows
from kalman_attention.parallel.exchange import RankGroup

Found: TypeAlias = tuple[Tensor, Mapping[str, float | Tensor]]
LossFunction: TypeAlias = Callable[[nn.Module, Any, torch.Generator], Any]


@runtime_checkable
class SummedLoss(Protocol):
    """A loss that is a mean over items other than rows, such as tokens."""

    def total(self, model: nn.Module, batch: Any, generator: torch.Generator) -> tuple[Tensor, int]:
        """The sum of the terms of the mean, and their number, which may be 0."""
        ...

    def piece(self, batch: Any, index: int, count: int) -> Any:
        """The piece of a batch's sequences for one of the ``count`` ranks that share them."""
        ...


class Objective:
    """The loss of one process: whatever the given function returns."""

    def __init__(self, model: nn.Module, loss: LossFunction) -> None:
        self.model, self.loss = model, loss

    def __call__(self, batch: Any, generator: torch.Generator) -> Found:
        """The loss of a batch, and its metrics."""
        return _call(self.loss, self.model, batch, generator)

    def accumulating(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """The context of a batch whose gradients are accumulated."""
        return contextlib.nullcontext()


class SharedObjective(Objective):
    """The loss of a batch that is shared by all ranks.

    Its value is that of the whole batch, on every rank. Its gradient is the rank's own part, times
    the number of ranks, because DDP and FSDP average gradients instead of summing them.

    Args:
        model: a model prepared for its ranks.
        loss: the loss, as in one process.
        everyone: all ranks.
        context: the ranks that share sequences with this one.
        ddp: wrap the model in torch's DDP; False for a model sharded by FSDP.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction,
        everyone: RankGroup,
        context: RankGroup,
        *,
        ddp: bool,
    ) -> None:
        super().__init__(model, loss)
        if context.size > 1 and not isinstance(loss, SummedLoss):
            raise ValueError(
                "context parallelism needs a loss that can be split in time: token_loss, or one "
                "with the methods of parallel.shared_loss.SummedLoss."
            )
        self.everyone = everyone
        share = _Share(model, loss, everyone, context)
        self._ddp = _wrap(share) if ddp else None
        self._share = self._ddp or share

    def __call__(self, batch: Any, generator: torch.Generator) -> Found:
        """The loss of the whole batch, and its metrics."""
        total, count, metrics = self._share(batch, generator)
        own = [total.detach(), count, *(value * count for value in metrics.values())]
        sums = self.everyone.add(
            torch.stack([torch.as_tensor(x, device=total.device).double() for x in own])
        )
        value, *means = (sums / sums[1])[[0, *range(2, len(own))]].unbind()
        # DDP and FSDP average gradients over ranks, hence the factor; the value is corrected
        # without changing the gradient.
        part = total * (self.everyone.size / sums[1]).to(total.dtype)
        loss = part + (value.to(total.dtype) - part).detach()
        return loss, dict(zip(metrics, means, strict=True))

    def accumulating(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Gradients are exchanged only with the last batch of an update."""
        if self._ddp is None:
            self.model.set_requires_gradient_sync(last)  # type: ignore[operator]
        elif not last:
            return self._ddp.no_sync()
        return contextlib.nullcontext()


class _Share(nn.Module):
    """From a batch to the sum over this rank's share of it: what DDP wraps."""

    def __init__(
        self, model: nn.Module, loss: LossFunction, everyone: RankGroup, context: RankGroup
    ) -> None:
        super().__init__()
        self.model, self.loss, self.context = model, loss, context
        self.index = everyone.rank // context.size
        self.count = everyone.size // context.size

    def forward(
        self, batch: Any, generator: torch.Generator
    ) -> tuple[Tensor, int, Mapping[str, float | Tensor]]:
        own, rows = share_rows(batch, self.index, self.count)
        loss: Any = self.loss
        if isinstance(loss, SummedLoss):
            if self.context.size > 1:
                own = loss.piece(own, self.context.rank, self.context.size)
            total, count = loss.total(self.model, own, generator)
            return (total, count, {}) if rows else (total * 0.0, 0, {})
        mean, metrics = _call(loss, self.model, own, generator)
        plain = {k: v.detach() if isinstance(v, Tensor) else v for k, v in metrics.items()}
        return mean * rows, rows, plain


def _wrap(share: _Share) -> DistributedDataParallel:
    device = next(share.parameters()).device
    ids = None if device.type == "cpu" else [device.index]
    # All ranks have the weights of rank 0 already.
    return DistributedDataParallel(share, ids, init_sync=False)


def _call(loss: LossFunction, model: nn.Module, batch: Any, generator: torch.Generator) -> Found:
    found = loss(model, batch, generator)
    value, metrics = found if isinstance(found, tuple) else (found, {})
    if value.dim() != 0:
        raise ValueError(
            f"the loss must be a scalar, got shape {list(value.shape)}: take the mean over its "
            "terms."
        )
    return value, metrics
