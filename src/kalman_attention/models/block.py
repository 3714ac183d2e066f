"""One block: norm, mixer, residual; then, optionally, norm, MLP, residual."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kalman_attention._typing import Mask
from kalman_attention.models.config import LanguageModelConfig
from kalman_attention.models.mixers import MIXERS
from kalman_attention.nn.decoding import project
from kalman_attention.nn.kla import KLA
from kalman_attention.nn.mixer import Mixer, from_table, kept, kept_rows
from kalman_attention.nn.norms import RMSNorm
from kalman_attention.nn.readout import Readout


class MLP(nn.Module):
    """Channel mixer: ``swiglu``, SiLU(x A) (x B) C, or ``relu2``, relu(x A)^2 C.

    Args:
        d_model: width of input and output.
        hidden: width in between.
        kind: ``"swiglu"`` or ``"relu2"``.
    """

    def __init__(self, d_model: int, hidden: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.in_proj = nn.Linear(d_model, 2 * hidden if kind == "swiglu" else hidden, bias=False)
        self.out_proj = nn.Linear(hidden, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Mix the channels of ``[..., d_model]``."""
        h = project(self.in_proj, x)
        if self.kind == "swiglu":
            gate, value = h.chunk(2, -1)
            h = nn.functional.silu(gate) * value
        else:
            h = nn.functional.relu(h).square()
        return project(self.out_proj, h)


class BlockOutput(NamedTuple):
    """Output of a block; ``models.stack.walk`` returns the same type for all blocks together.

    Attributes:
        y: the residual stream after the block, ``[B, T, d_model]`` or ``[B, d_model]``.
        state: state of the mixer; for several blocks, a tuple of one state each.
        readout: the posterior of the mixer's read-out; None for a mixer without one, and for a
            single token when neither variance nor samples are requested.
    """

    y: Tensor
    state: Any
    readout: Readout | None


class Block(nn.Module):
    """A pre-norm residual block around one mixer.

    Args:
        config: options of the model.
        mixer: its name in a plan, such as ``"kla"``.
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
        generator: torch.Generator | None = None,
        hold: bool = False,
        ids: Tensor | None = None,
        keep: Mask | None = None,
    ) -> BlockOutput:
        """Run a sequence ``[B, T, d_model]``, or one token ``[B, d_model]``, through the block.

        Args:
            x: the residual stream; one token needs a state.
            state: state of the previous call on the same rows; None for the initial state.
            mask: ``[B, T]`` or ``[B]`` bool, False for padding.
            cu_seqlens: document boundaries in one packed row (B = 1), ``[n + 1]`` int.
            return_variance: also return the variance of the read-out.
            sample: pass on a posterior sample instead of the mean, if there is a posterior.
            generator: source of randomness.
            hold: stop at the posterior: ``y`` is the unchanged x, and ``resume`` continues.
            ids: ``[B, T]`` int; x is then a table ``[V, d_model]`` of which they name the rows.
            keep: ``[B, T]`` bool; ``y`` and the read-out are then ``[1, n, ...]``, these n
                positions only.
        """
        table, x = x, kept_rows(x, ids, keep)
        with_variance = return_variance or sample or hold
        if x.dim() == 2 and not with_variance and isinstance(self.mixer, KLA):
            decoded = self.mixer.decode(x, state, mask, self.norm)
            if decoded is not None:
                return BlockOutput(self._channels(decoded.y), decoded.state, None)
        if isinstance(self.mixer, KLA):
            options: dict[str, Any] = {"ids": ids, "keep": keep, "return_variance": with_variance}
            read = self.mixer.read(self.norm(table), state, mask, cu_seqlens, **options)
            read = read._replace(context=(*read.context, x))
            if hold:
                return BlockOutput(x, read.state, read)
            latent = read.sample(1, generator)[0] if sample else read.mean
            return BlockOutput(self._go_on(latent, *read.context), read.state, read)
        if hold:
            raise ValueError(
                f"this block has no posterior: its mixer is {self.kind}. Samples and the "
                "marginal likelihood need KLA as the last mixer of the plan, as in "
                "'attention*11 + kla'."
            )
        if x.dim() == 2:
            found = self.mixer.step(self.norm(x), state, mask=mask)
        elif self.mixer.picks and mask is None and cu_seqlens is None:
            picked: dict[str, Any] = {"ids": ids, "keep": keep}
            found = self.mixer.mix(self.norm(table), state, **picked)
        else:
            found = self.mixer.mix(from_table(self.norm(table), ids), state, mask, cu_seqlens)
            found = found._replace(y=kept(found.y, keep))
        return BlockOutput(self._channels(x + found.y), found.state, None)

    def resume(self, latent: Tensor, *context: Tensor) -> Tensor:
        """Continue from the mean or from samples of the read-out, ``[..., T, d_inner]``.

        This is cheap: gate, output projection, residual and MLP, all per token.

        Args:
            latent: the read-out; leading axes broadcast.
            *context: ``Readout.context``: what the mixer's ``write`` needs, and the residual.
        """
        return self._go_on(latent, *context)

    def _go_on(self, latent: Tensor, *context: Tensor) -> Tensor:
        # Separate from ``resume``, which ``parallel`` wraps to gather sharded weights: inside
        # ``forward`` they are gathered already.
        assert isinstance(self.mixer, KLA)
        *inner, residual = context
        return self._channels(residual + self.mixer.write(latent, *inner))

    def _channels(self, x: Tensor) -> Tensor:
        if self.mlp is None or self.mlp_norm is None:
            return x
        y: Tensor = x + self.mlp(self.mlp_norm(x))
        return y

    @torch.no_grad()
    def scale_residuals(self, factor: float) -> None:
        """Scale the initial weights that write into the residual stream."""
        self.mixer.out_proj.weight.mul_(factor)
        if self.mlp is not None:
            self.mlp.out_proj.weight.mul_(factor)
