"""How many heads a mixer has and how wide they are."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class HeadSizes:
    """Sizes of a mixer whose heads have keys of K and values of V channels.

    Attributes:
        d_model: width of input and output.
        num_heads: heads.
        expand_k: width of all keys together, in units of d_model.
        expand_v: width of all values together, in units of d_model.
    """

    d_model: int
    num_heads: int = 4
    expand_k: float = 0.5
    expand_v: float = 1.0

    def __post_init__(self) -> None:
        if self.num_heads < 1:
            raise ValueError(f"num_heads must be at least 1, got {self.num_heads}.")
        for name in ("expand_k", "expand_v"):
            size = self.d_model * getattr(self, name) / self.num_heads
            if size < 1 or abs(size - round(size)) > 1e-6:
                raise ValueError(
                    f"{name} = {getattr(self, name)} of d_model = {self.d_model} does not split "
                    f"into {self.num_heads} heads of whole channels: {size} each. Choose another "
                    f"{name} or num_heads."
                )

    @property
    def key_dim(self) -> int:
        """Key channels per head."""
        return round(self.d_model * self.expand_k / self.num_heads)

    @property
    def value_dim(self) -> int:
        """Value channels per head."""
        return round(self.d_model * self.expand_v / self.num_heads)

    @property
    def state_size(self) -> int:
        """Numbers in the recurrent matrices of one layer."""
        return self.num_heads * self.key_dim * self.value_dim
