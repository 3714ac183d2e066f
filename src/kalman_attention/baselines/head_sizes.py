"""How wide the heads of a mixer are."""

from typing import Protocol


class _Heads(Protocol):
    @property
    def d_model(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def expand_k(self) -> float: ...
    @property
    def expand_v(self) -> float: ...


def head_sizes(config: _Heads) -> tuple[int, int]:
    """Channels of a key and of a value of one head; a ValueError if they do not come out even."""
    if config.num_heads < 1:
        raise ValueError(f"num_heads must be at least 1, got {config.num_heads}.")
    sizes = []
    for name in ("expand_k", "expand_v"):
        size = config.d_model * getattr(config, name) / config.num_heads
        if size < 1 or abs(size - round(size)) > 1e-6:
            raise ValueError(
                f"{name} = {getattr(config, name)} of d_model = {config.d_model} does not split "
                f"into {config.num_heads} heads of whole channels: {size} each. Choose another "
                f"{name} or num_heads."
            )
        sizes.append(round(size))
    return sizes[0], sizes[1]
