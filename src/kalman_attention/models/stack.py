"""What all models around a stack of blocks have."""

from torch import nn

from kalman_attention.models.block import Block


class BlockStack(nn.Module):
    """A model with blocks, first one first, in ``blocks``."""

    blocks: nn.ModuleList

    def stack(self) -> list[Block]:
        """The blocks, first one first."""
        return list(self.blocks)  # type: ignore[arg-type]

    def num_parameters(self) -> int:
        """Number of parameters, each counted once."""
        return sum(p.numel() for p in self.parameters())
