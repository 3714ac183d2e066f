"""One block: norm, mixer, residual; then, if wanted, norm, MLP, residual."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kalman_attention._typing import Mask
from kalman_attention.models.config import LanguageModelConfig
from kalman_attention.models.mixers import MIXERS
from kalman_attention.nn.kla import KLA, Readout
from kalman_attention.nn.mixer import LayerOutput, Mixer
from kalman_attention.nn.norms import RMSNorm


class MLP(nn.Module):
    """Channel mixer: ``swiglu``, SiLU(x A) (x B) C, or ``relu2``, relu(x A)^2 C.

    Args:
        d_model: width of input and output.
        hidden: width in between.
        kind: which of the two.
    """

    def __init__(self, d_model: int, hidden: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.in_proj = nn.Linear(d_model, 2 * hidden if kind == "swiglu" else hidden, bias=False)
        self.out_proj = nn.Linear(hidden, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Mix the channels of ``[..., d_model]``."""
        h = self.in_proj(x)
        if self.kind == "swiglu":
            gate, value = h.chunk(2, -1)
            h = nn.functional.silu(gate) * value
        else:
            h = nn.functional.relu(h).square()
        y: Tensor = self.out_proj(h)
        return y


class HeldReadout(NamedTuple):
    """A block stopped at the posterior of its mixer: what ``Block.resume`` goes on from.

    Attributes:
        readout: the posterior of the read-out.
        residual: the block's input, ``[B, T, d_model]``.
    """

    readout: Readout
    residual: Tensor

    @property
    def context(self) -> tuple[Tensor, Tensor, Tensor]:
        """What ``Block.resume`` needs beside the read-out: stream, gate, residual."""
        return self.readout.stream, self.readout.gate, self.residual


class Block(nn.Module):
    """A pre-norm residual block around one mixer.

    Args:
        config: options of the model.
        mixer: its word in a plan, such as ``"kla"``.
    """

    def __init__(self, config: LanguageModelConfig, mixer: str) -> None:
        super().__init__()
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.kind = mixer
        self.mixer: Mixer = MIXERS[mixer].module(config.mixer_options(mixer))
        self.mlp_norm = self.mlp = None
        if config.mlp != "none":
            self.mlp_norm = RMSNorm(config.d_model, config.norm_eps)
            self.mlp = MLP(config.d_model, config.mlp_hidden, config.mlp)

    def forward(
        self,
        x: Tensor,
        state: Any = None,
        mask: Mask | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        return_variance: bool = False,
        sample: bool = False,
    ) -> LayerOutput:
        """The block's output; ``sample`` passes on a posterior sample instead of the mean."""
        if sample and isinstance(self.mixer, KLA):
            held = self.hold(x, state, mask, cu_seqlens, return_variance=True)
            y = self.resume(held.readout.sample(), *held.context)
            return LayerOutput(y, held.readout.variance, held.readout.state)
        h = self.norm(x)
        found = self.mixer(h, state, mask, cu_seqlens, return_variance=return_variance)
        return LayerOutput(self._channels(x + found.y), found.variance, found.state)

    def step(
        self,
        x: Tensor,
        state: Any,
        *,
        mask: Mask | None = None,
        return_variance: bool = False,
        sample: bool = False,
    ) -> LayerOutput:
        """One token, ``[B, d_model]``."""
        if sample and isinstance(self.mixer, KLA):
            held = self.hold_step(x, state, mask=mask, return_variance=True)
            y = self.resume(held.readout.sample(), *held.context)
            return LayerOutput(y, held.readout.variance, held.readout.state)
        found = self.mixer.step(self.norm(x), state, mask=mask, return_variance=return_variance)
        return LayerOutput(self._channels(x + found.y), found.variance, found.state)

    def hold(
        self,
        x: Tensor,
        state: Any = None,
        mask: Mask | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        return_variance: bool = True,
    ) -> HeldReadout:
        """Run up to the posterior of the mixer's read-out, and stop there."""
        mixer = self._filter()
        h = self.norm(x)
        found = mixer.read(h, state, mask, cu_seqlens, return_variance=return_variance)
        return HeldReadout(found, x)

    def hold_step(
        self, x: Tensor, state: Any, *, mask: Mask | None = None, return_variance: bool = True
    ) -> HeldReadout:
        """``hold`` for one token, ``[B, d_model]``."""
        mixer = self._filter()
        found = mixer.read_step(self.norm(x), state, mask=mask, return_variance=return_variance)
        return HeldReadout(found, x)

    def resume(self, latent: Tensor, stream: Tensor, gate: Tensor, residual: Tensor) -> Tensor:
        """Go on from the mean or from samples of the read-out, ``[..., T, d_inner]``.

        Cheap: gate, output projection, residual and MLP, all per token. The other arguments are
        ``HeldReadout.context``.
        """
        return self._channels(residual + self._filter().write(latent, stream, gate))

    def _channels(self, x: Tensor) -> Tensor:
        if self.mlp is None or self.mlp_norm is None:
            return x
        y: Tensor = x + self.mlp(self.mlp_norm(x))
        return y

    def _filter(self) -> KLA:
        if isinstance(self.mixer, KLA):
            return self.mixer
        raise ValueError(
            f"this block holds no posterior: its mixer is {self.kind}. Samples and the marginal "
            "likelihood need KLA as the last mixer of the plan, as in 'attention*11 + kla'."
        )

    @torch.no_grad()
    def scale_residuals(self, factor: float) -> None:
        """Multiply what the block adds to the residual stream, at initialisation."""
        self.mixer.out_proj.weight.mul_(factor)
        if self.mlp is not None:
            self.mlp.out_proj.weight.mul_(factor)
