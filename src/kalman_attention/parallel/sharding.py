"""Weights spread over ranks by FSDP2, and whole again for a checkpoint.

What is behind FSDP takes more than a second to import; it is imported where it is used.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from kalman_attention.models.stack import BlockStack

_MODEL_METHODS = ("loss", "read", "write", "head_logits", "logits")
_BLOCK_METHODS = ("resume",)


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Spread the parameters of a model over a mesh: each block by itself, then all the rest.

    FSDP wants one dtype at a time, so an embedding in bfloat16 goes by itself too; its gradients
    are added up in float32.

    Args:
        model: changed in place; its parameters become ``DTensor``.
        mesh: of one dimension.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    if isinstance(model, FSDPModule):
        return
    if isinstance(model, BlockStack):
        for block in model.stack():
            fully_shard(block, mesh=mesh)
            _gather_for(block, _BLOCK_METHODS)
    for child in model.children():
        if {p.dtype for p in child.parameters()} == {torch.bfloat16}:
            fully_shard(
                child, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32)
            )
    fully_shard(model, mesh=mesh)
    _gather_for(model, _MODEL_METHODS)


def _gather_for(module: nn.Module, methods: tuple[str, ...]) -> None:
    """Have the weights there not only for ``forward``."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    for name in methods:
        if hasattr(module, name):
            register_fsdp_forward_method(module, name)


def is_spread(x: Any) -> bool:
    """Whether a tensor is a ``DTensor``, of which this rank holds a part."""
    return hasattr(x, "full_tensor")


def whole(x: Tensor) -> Tensor:
    """A tensor that may be spread over ranks, as one; all ranks must ask for it."""
    full: Tensor = x.full_tensor() if is_spread(x) else x  # type: ignore[attr-defined]
    return full


def collect(tensors: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """Tensors made whole, one after the other, on the CPU; all ranks take part.

    Args:
        tensors: the same names on every rank.
        keep: whether this rank wants the result; the others get nothing.
    """
    found: dict[str, Tensor] = {}
    for name, x in tensors.items():
        full = whole(x)
        if keep:
            found[name] = full.cpu() if is_spread(x) else full
    return found


def like(value: Tensor, target: Tensor) -> Tensor:
    """A whole tensor spread as another one is; as it is, if that one is whole."""
    if not is_spread(target):
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(target, DTensor)
    value = value.to(target.device)
    return distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)


@torch.no_grad()
def copy_weights(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give a model, whose parameters may be spread over ranks, weights by name.

    Names that are missing stay as they are: shared weights are stored under one name.
    """
    own = model.state_dict(keep_vars=True)
    if not any(map(is_spread, own.values())):
        model.load_state_dict(dict(tensors), strict=False)
        return
    for name, value in tensors.items():
        own[name].copy_(like(value, own[name]))


def broadcast_weights(model: nn.Module) -> None:
    """Give all ranks the weights of rank 0."""
    for x in model.state_dict(keep_vars=True).values():
        if not is_spread(x):
            dist.broadcast(x.detach(), 0)
