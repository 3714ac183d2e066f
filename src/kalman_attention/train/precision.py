"""Matrix products in bfloat16 at full speed, also on processors without instructions for them."""

import contextlib
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_PRODUCTS = (_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default)


class RoundedProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which bfloat16 matrices are multiplied in float32 and the product is rounded.

    Processors with instructions for bfloat16 compute the same, except for the order of sums. On
    others, PyTorch multiplies such matrices many times as slowly as in float32.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call an operation, in float32 if it is a product of bfloat16 matrices."""
        kwargs = kwargs or {}
        if func not in _PRODUCTS or args[0].dtype != torch.bfloat16:
            return func(*args, **kwargs)
        return func(*(x.float() for x in args), **kwargs).to(torch.bfloat16)


def product_context(dtype: str, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """The context of forward and backward passes, around that of autocast.

    Args:
        dtype: dtype of the computation, ``"float32"`` or ``"bfloat16"``.
        device: device of the model.
    """
    if dtype == "bfloat16" and device.type == "cpu" and not has_bfloat16():
        return RoundedProducts()  # type: ignore[no-untyped-call]
    return contextlib.nullcontext()


def has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in vector instructions."""
    # Private, but what PyTorch itself asks before it passes such a product to oneDNN.
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
