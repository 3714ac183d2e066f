"""Communication between the ranks of a group, with gradients where needed."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class RankGroup:
    """A group of ranks that communicate, including this process.

    Attributes:
        rank: rank of this process in the group, from 0.
        size: number of ranks in the group.
        handle: torch's process group; None for all ranks.
    """

    rank: int
    size: int
    handle: dist.ProcessGroup | None = None

    def gather(self, x: Tensor) -> Tensor:
        """Stack the tensors of all ranks, all of one shape: ``[size, ...]``; no gradient."""
        x = x.detach().contiguous()
        found = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(found, x, group=self.handle)
        return torch.stack(found)

    def add(self, x: Tensor) -> Tensor:
        """Sum over all ranks; no gradient."""
        x = x.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=self.handle)
        return x

    def largest(self, x: Tensor) -> Tensor:
        """Largest value over all ranks, element by element; no gradient."""
        x = x.detach().clone()
        dist.all_reduce(x, dist.ReduceOp.MAX, group=self.handle)
        return x


def gather_with_gradient(x: Tensor, group: RankGroup) -> Tensor:
    """``RankGroup.gather`` with a gradient: the sum of the gradients of all ranks.

    The backward pass communicates too: it must run on every rank, or on none.
    """
    found: Tensor = _Gather.apply(x, group)  # type: ignore[no-untyped-call]
    return found


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: RankGroup) -> Tensor:
        ctx.group = group
        return group.gather(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.group.add(grad)[ctx.group.rank], None
