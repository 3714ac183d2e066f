"""Models of series with irregular time stamps and missing channels, as a stack of KLA layers.

::

    values, observed, times -> filters per channel          what is known about each so far
    all of these -> a token per instant                     [B, T, d_model]
    gaps between times -> dt of every layer                 time enters the model only here
    (norm, KLA, residual; norm, MLP, residual) per layer    filtering, or smoothing
    hidden (and the posterior variance of the last layer) -> head
    summaries of values and filters -> additive model       for classes, on request

Some of this is exact and some is learned. A channel that was not observed is never read, and no
placeholder is put in its place. An instant without any observation has evidence of precision 0 in
every layer: time passes and the state is read, which is how predictions are requested. Gaps are
those of the process itself: inserting an instant without observations changes no other prediction.
The filters of single channels (``channel_memories``) are exact as well: precision 0 for a channel
that was not observed, whatever the other channels do. What is learned is how the channels of one
instant become evidence for the layers: the token is computed from the values, from which of them
were observed and from the output of the filters, and the value, precision and key of each layer
are functions of the token.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from kalman_attention._typing import Mask
from kalman_attention.models.block import MLP
from kalman_attention.models.series_config import SeriesConfig
from kalman_attention.models.series_inputs import (
    ChannelEncoder,
    ChannelSummaries,
    ImageEncoder,
    pooled,
)
from kalman_attention.nn.kla import KLA
from kalman_attention.nn.norms import RMSNorm


class SeriesOutput(NamedTuple):
    """Output of a ``SeriesModel``.

    Attributes:
        mean: predicted mean at every instant, ``[B, T, outputs]``, or logits, ``[B, outputs]``.
        variance: of the same shape; None for logits.
        hidden: the residual stream that the head reads, ``[B, T, d_model]``.
        paths: with ``summary_knots``, the logits of the layers and those of the summaries, whose
            mean is ``mean``, ``[2, B, outputs]``; None otherwise.
    """

    mean: Tensor
    variance: Tensor | None
    hidden: Tensor
    paths: Tensor | None = None


class SeriesModel(nn.Module):
    """A model of irregular series for regression, interpolation, forecasting and classification.

    Args:
        config: options.
    """

    def __init__(self, config: SeriesConfig) -> None:
        super().__init__()
        self.config = config
        told = config.tell_gaps or config.mixer == "gru"
        self.encoder = ImageEncoder(config) if config.images else ChannelEncoder(config)
        self.gap_proj = nn.Linear(1, config.d_model, bias=False) if told else None
        self.blocks = nn.ModuleList(SeriesBlock(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.tells_variance = config.tell_variance and config.mixer == "kla"
        width = config.d_model + (config.layer.width if self.tells_variance else 0)
        self.head = nn.Linear(width * (1 + (config.head == "classes")), self._answers)
        self.summaries = ChannelSummaries(config) if config.summary_knots else None

    def forward(
        self,
        values: Tensor,
        observed: Mask | None,
        times: Tensor,
        mask: Mask | None = None,
    ) -> SeriesOutput:
        """Predict at every instant, or for the whole series.

        Args:
            values: ``[B, T, channels]``, or images ``[B, T, channels, channels]``, numbers from 0
                to 1 or bytes. Values that were not observed may be anything, even NaN.
            observed: which of them were observed, bool of the shape of values, ``[B, T]`` for
                images; None for all. An instant without observations requests a prediction there.
            times: time stamps, ``[B, T]``, that do not decrease along a row.
            mask: ``[B, T]`` bool, False for padding.
        """
        if observed is None:
            observed = times.new_ones(values.shape[: 2 if self.config.images else 3]).bool()
        self._check(values, observed, times)
        seen = observed if self.config.images else observed.any(-1)
        if mask is not None:
            seen = seen & mask
        gaps, since = self._gaps(times, seen, mask)
        x, filtered = self.encoder(values, observed, gaps, mask)
        if self.gap_proj is not None:
            x = x + self.gap_proj(since.log1p().unsqueeze(-1).to(x.dtype))
        variance = None
        for i, block in enumerate(self.blocks, 1):
            wanted = self.tells_variance and i == self.config.num_layers
            x, variance = block(x, gaps, seen, mask, return_variance=wanted)
        found = self._answer(self.norm(x), variance, mask)
        if self.summaries is None:
            return found
        paths = torch.stack([found.mean, self.summaries(values, observed, filtered, mask)])
        return found._replace(mean=paths.mean(0), paths=paths)

    @property
    def _answers(self) -> int:
        """Output width of the head."""
        return self.config.outputs * (1 + (self.config.head == "gaussian"))

    def _answer(self, hidden: Tensor, variance: Tensor | None, mask: Mask | None) -> SeriesOutput:
        z = hidden
        if self.tells_variance and variance is not None:
            z = torch.cat([z, variance.clamp_min(1e-6).log()], -1)  # padding has variance 0
        if self.config.head == "classes":
            return SeriesOutput(self.head(self.dropout(pooled(z, mask))), None, hidden)
        mean, raw = self.head(z).chunk(2, -1)
        floor = self.config.variance_floor
        return SeriesOutput(mean, nn.functional.softplus(raw) + floor, hidden)

    def _gaps(self, times: Tensor, seen: Mask, mask: Mask | None) -> tuple[Tensor, Tensor]:
        """Units of time before each token, and since the last observation, ``[B, T]`` each."""
        config = self.config
        if not config.use_time:
            there = torch.ones_like(times) if mask is None else mask.to(times.dtype)
            times = there.cumsum(1)
        real = torch.ones_like(seen) if mask is None else mask
        scale = config.time_scale if config.use_time else 1.0
        return _since(times, real, real) / scale, _since(times, seen, real) / scale

    def _check(self, values: Tensor, observed: Mask, times: Tensor) -> None:
        config, shape = self.config, tuple(times.shape)
        size = (config.channels,) * (2 if config.images else 1)
        if times.dim() != 2 or tuple(values.shape) != shape + size:
            raise ValueError(
                f"values are {list(values.shape)} and times {list(shape)}, but this model expects "
                f"values [B, T, {', '.join(map(str, size))}] and times [B, T]."
            )
        wanted = shape if config.images else tuple(values.shape)
        if observed.dtype != torch.bool or tuple(observed.shape) != wanted:
            raise ValueError(
                f"observed is {observed.dtype} {list(observed.shape)} but must be bool "
                f"{list(wanted)}: True where a value was observed."
            )


class SeriesBlock(nn.Module):
    """A mixer over time and an MLP over channels, each with a norm and a residual connection.

    Args:
        config: options of the model.
    """

    def __init__(self, config: SeriesConfig) -> None:
        super().__init__()
        self.norm, self.mlp_norm = RMSNorm(config.d_model), RMSNorm(config.d_model)
        self.mixer = KLA(config.layer) if config.mixer == "kla" else GRU(config)
        self.mlp = MLP(config.d_model, config.mlp_width or 2 * config.d_model, "swiglu")
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        dt: Tensor,
        seen: Mask,
        mask: Mask | None = None,
        *,
        return_variance: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The residual stream after the block, and the posterior variance of its read-out."""
        h, variance = self.norm(x), None
        if isinstance(self.mixer, KLA):
            found = self.mixer.mix(h, None, mask, dt=dt, seen=seen, return_variance=return_variance)
            y, variance = found.y, found.variance
        else:
            y = self.mixer(h, mask)
        x = x + self.dropout(y)
        return x + self.dropout(self.mlp(self.mlp_norm(x))), variance


class GRU(nn.Module):
    """torch's gated recurrent unit over rows that may be padded, as a control.

    Args:
        config: options of the model; ``smooth`` of its layers reads rows in both directions.
    """

    def __init__(self, config: SeriesConfig) -> None:
        super().__init__()
        both = config.layer.smooth
        self.unit = nn.GRU(config.d_model, config.d_model, batch_first=True, bidirectional=both)
        self.out_proj = nn.Linear((2 if both else 1) * config.d_model, config.d_model, bias=False)

    def forward(self, x: Tensor, mask: Mask | None = None) -> Tensor:
        """Mix ``[B, T, d_model]``; padding is moved to the end of each row, and back."""
        if mask is None:
            return self.out_proj(self.unit(x)[0])  # type: ignore[no-any-return]
        order = torch.argsort(mask, dim=1, descending=True, stable=True).unsqueeze(-1)
        lengths = mask.sum(1).clamp_min(1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(
            torch.take_along_dim(x, order, 1), lengths, batch_first=True, enforce_sorted=False
        )
        h, _ = nn.utils.rnn.pad_packed_sequence(
            self.unit(packed)[0], batch_first=True, total_length=x.shape[1]
        )
        y = torch.take_along_dim(self.out_proj(h), order.argsort(1), 1)
        return y * mask.unsqueeze(-1)


def _since(times: Tensor, counted: Mask, real: Mask) -> Tensor:
    """Time since the last counted token before each real one; 0 where there is none."""
    never = torch.full_like(times, -torch.inf)
    last = torch.where(counted, times, never).cummax(1).values
    before = torch.cat([never[:, :1], last[:, :-1]], 1)
    return torch.where(real & before.isfinite(), times - before, torch.zeros_like(times))
