"""Parameters that stay float32 whatever the rest of the model is converted to."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Float32Module(nn.Module):
    """A module whose parameters stay float32 when the model is converted to a shorter type.

    For dynamics: a decay of 0.9999 has no bfloat16. A conversion to float64 goes through.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        def at_least_float32(x: Tensor) -> Tensor:
            moved = fn(x)
            if moved.is_floating_point() and moved.dtype.itemsize < 4:
                return x.to(device=moved.device, dtype=torch.float32)
            return moved

        return super()._apply(at_least_float32, recurse)  # type: ignore[no-untyped-call]
