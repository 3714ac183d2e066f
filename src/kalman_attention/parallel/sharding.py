"""Weights sharded over ranks by FSDP2, and gathered again for a checkpoint.

FSDP takes more than a second to import, so it is imported where it is used.
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
    """Shard the parameters of a model over a mesh: block by block, then everything else.

    Args:
        model: the model, modified in place; its parameters become ``DTensor``.
        mesh: a one-dimensional mesh.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    if isinstance(model, FSDPModule):
        return
    if isinstance(model, BlockStack):
        for block in model.stack():
            fully_shard(block, mesh=mesh)
            _gather_for(block, _BLOCK_METHODS)
    # FSDP requires one dtype per unit, so an embedding in bfloat16 is a unit of its own; its
    # gradients are reduced in float32.
    for child in model.children():
        if {p.dtype for p in child.parameters()} == {torch.bfloat16}:
            fully_shard(
                child, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32)
            )
    fully_shard(model, mesh=mesh)
    _gather_for(model, _MODEL_METHODS)


def _gather_for(module: nn.Module, methods: tuple[str, ...]) -> None:
    """Gather the weights for these methods too, not only for ``forward``."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    for name in methods:
        if hasattr(module, name):
            register_fsdp_forward_method(module, name)


def is_spread(x: Any) -> bool:
    """Whether a tensor is a ``DTensor``, of which this rank holds a shard."""
    return hasattr(x, "full_tensor")


def whole(x: Tensor) -> Tensor:
    """The full tensor of one that may be sharded; all ranks must call this."""
    full: Tensor = x.full_tensor() if is_spread(x) else x  # type: ignore[attr-defined]
    return full


def collect(tensors: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """Full tensors on the CPU, gathered one at a time; all ranks take part.

    Args:
        tensors: tensors by name, with the same names on every rank.
        keep: whether this rank keeps the result; the others return nothing.
    """
    found: dict[str, Tensor] = {}
    for name, x in tensors.items():
        full = whole(x)
        if keep:
            found[name] = full.cpu() if is_spread(x) else full
    return found


def like(value: Tensor, target: Tensor) -> Tensor:
    """Shard a full tensor like another one; return it unchanged if that one is not sharded."""
    if not is_spread(target):
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(target, DTensor)
    value = value.to(target.device)
    return distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)


@torch.no_grad()
def copy_weights(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy weights by name into a model whose parameters may be sharded.

    Weights without a value are left unchanged: shared weights are stored under one name.
    """
    own = model.state_dict(keep_vars=True)
    if not any(map(is_spread, own.values())):
        model.load_state_dict(dict(tensors), strict=False)
        return
    for name, value in tensors.items():
        own[name].copy_(like(value, own[name]))


def broadcast_weights(model: nn.Module) -> None:
    """Copy the weights of rank 0 to all ranks."""
    for x in model.state_dict(keep_vars=True).values():
        if not is_spread(x):
            dist.broadcast(x.detach(), 0)
