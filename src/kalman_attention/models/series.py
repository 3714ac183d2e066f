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

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from kalman_attention._reading import from_dict
from kalman_attention._typing import Mask
from kalman_attention.models.block import MLP
from kalman_attention.nn.config import KLAConfig
from kalman_attention.nn.float32 import KeepsFloat32
from kalman_attention.nn.kla import KLA
from kalman_attention.nn.norms import RMSNorm
from kalman_attention.ops.kla_scan import kla_scan
from kalman_attention.ops.smooth import kla_smooth

_IMAGES = 100  # images per call, so that the output of a convolution stays in the cache


@dataclass(frozen=True, kw_only=True)
class SeriesConfig:
    """Options of a ``SeriesModel``.

    Attributes:
        channels: number of values that may be observed at an instant; for images, their height
            and width.
        outputs: number of predicted values, or of classes.
        d_model: width of the residual stream.
        num_layers: number of layers, each with an MLP.
        head: ``"gaussian"``, a mean and a variance for each output at every instant, or
            ``"classes"``, one logit per class for the whole series.
        images: observations are images, ``[B, T, channels, channels]``, each observed entirely or
            not at all; a small convolutional network turns them into tokens.
        channel_memories: number of filters per channel, from the fastest to the slowest; their
            means and variances are part of the token. 0 for none. Values should have mean 0 and
            standard deviation 1, which is the prior of the filters.
        mixer: ``"kla"``, or ``"gru"``, a gated recurrent unit, which receives gaps as an input.
        kla: options of the KLA layers that differ from ``SERIES_LAYER``; ``smooth`` makes the model
            bidirectional, for a GRU as well.
        use_time: False treats all gaps as equal, as a control that ignores the time stamps.
        time_scale: the time that is one unit for the layers; a typical gap is a good choice.
        tell_gaps: also give each token the time since the last instant with an observation.
        tell_variance: give the head the posterior variance of the last KLA layer.
        mlp_width: hidden width of the MLPs; None means twice d_model.
        dropout: dropout rate of the outputs of layers and MLPs, of the hidden units of the tokens,
            and of the input of a classification head.
        variance_floor: smallest predicted variance.
        summary_knots: for classes, adds an additive model of summaries of each channel to the
            logits (``ChannelSummaries``), with this many knots per summary; 0 for none. Values
            should have mean 0 and standard deviation 1.
    """

    channels: int
    outputs: int
    d_model: int = 32
    num_layers: int = 2
    head: Literal["gaussian", "classes"] = "gaussian"
    images: bool = False
    channel_memories: int = 0
    mixer: Literal["kla", "gru"] = "kla"
    kla: dict[str, Any] = field(default_factory=dict)
    use_time: bool = True
    time_scale: float = 1.0
    tell_gaps: bool = False
    tell_variance: bool = True
    mlp_width: int | None = None
    dropout: float = 0.0
    variance_floor: float = 1e-4
    summary_knots: int = 0

    def __post_init__(self) -> None:
        for name in ("channels", "outputs", "d_model", "num_layers", "mlp_width"):
            given = getattr(self, name)
            if given is not None and given < 1:
                raise ValueError(f"{name} must be at least 1, got {given}.")
        for name, words in _WORDS.items():
            if getattr(self, name) not in words:
                known = " or ".join(repr(word) for word in words)
                raise ValueError(f"{name} must be {known}, got {getattr(self, name)!r}.")
        if not (self.time_scale > 0.0 and self.variance_floor > 0.0 and 0.0 <= self.dropout < 1.0):
            raise ValueError(
                "time_scale and variance_floor must be positive and dropout in [0, 1), got "
                f"{self.time_scale}, {self.variance_floor}, {self.dropout}."
            )
        if self.channel_memories < 0 or (self.channel_memories and self.images):
            raise ValueError(
                "channel_memories must be at least 0, and 0 for images; got "
                f"{self.channel_memories} with images={self.images}."
            )
        knots, apply = self.summary_knots, self.head == "classes" and not self.images
        if knots and (knots < 2 or not apply):
            raise ValueError(
                "summary_knots must be 0, or at least 2 for classes and without images; got "
                f"{knots} with head={self.head!r} and images={self.images}."
            )
        if self.images and self.channels % 8:
            raise ValueError(
                f"images are halved three times: channels must be a multiple of 8, got "
                f"{self.channels}."
            )
        _ = self.layer  # raises an error for incompatible options

    @property
    def layer(self) -> KLAConfig:
        """Options of every KLA layer."""
        return from_dict(
            KLAConfig,
            {"d_model": self.d_model, **SERIES_LAYER, **self.kla},
            "kla of a SeriesConfig",
        )

    def to_dict(self) -> dict[str, Any]:
        """As nested dictionaries of plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(
        cls, data: object, where: str = "the configuration of a series model"
    ) -> "SeriesConfig":
        """The inverse of ``to_dict``, also after a round trip through JSON.

        Args:
            data: nested dictionaries; names and types are checked.
            where: source of the data, such as a file, for error messages.
        """
        return from_dict(cls, data, where)


SERIES_LAYER: dict[str, Any] = {
    "conv_kernel": None,  # neighbouring tokens may be far apart in time
    "shared_slots": 2,
    "frequencies": (0.02, 0.6),
    "evidence_bias": True,
    "gate_bias": 1.0,
    "prior": "learned",
    "dt_min": 0.02,
    "dt_max": 0.6,
}
"""Default options of the KLA layers: oscillators with memories of 2 to 50 units of time."""

_WORDS = {"head": ("gaussian", "classes"), "mixer": ("kla", "gru")}


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
            return SeriesOutput(self.head(self.dropout(_pooled(z, mask))), None, hidden)
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


class ChannelEncoder(nn.Module):
    """Tokens from the observed channels, the mask of observations and the filters of all channels.

    Args:
        config: options of the model.
    """

    def __init__(self, config: SeriesConfig) -> None:
        super().__init__()
        channels, d_model = config.channels, config.d_model
        self.memory = ChannelFilter(config) if config.channel_memories else None
        width = 2 * channels * (1 + config.channel_memories)
        self.in_proj = nn.Linear(width, 2 * d_model)
        self.out_proj = nn.Linear(2 * d_model, d_model)
        self.skip = nn.Linear(width, d_model, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, values: Tensor, observed: Mask, dt: Tensor, mask: Mask | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Encode ``[B, T, channels]`` as ``[B, T, d_model]``; unobserved values are not read.

        The output of the filters is returned as well: means and log variances, or nothing.
        """
        known = values.where(observed, values.new_zeros(()))
        filtered = () if self.memory is None else self.memory(known, observed, dt, mask)
        x = torch.cat([known, observed.to(known.dtype), *filtered], -1)
        h = self.dropout(nn.functional.silu(self.in_proj(x)))
        return self.skip(x) + self.out_proj(h), filtered


class ChannelFilter(KeepsFloat32):
    """Kalman filters of single channels, each an Ornstein-Uhlenbeck process of variance 1.

    A channel that was not observed brings no evidence to its filters: the longer nothing is
    observed, the closer they return to mean 0 and variance 1. Forgetting takes exp(-log_a) units of
    time, and observations have the precision exp(log_lam_v), both learned.

    Args:
        config: options of the model; with ``smooth``, the filters are smoothers.
    """

    parameter_group: ClassVar[str] = "state_space"

    def __init__(self, config: SeriesConfig) -> None:
        super().__init__()
        self.config = config
        shape = (config.channel_memories, config.channels)
        self.log_a, self.log_lam_v = (nn.Parameter(torch.empty(shape)) for _ in range(2))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise memories of 2 to 50 units, evenly spaced in the logarithm, and precision 1."""
        if self.log_a.is_meta:
            return  # nothing to initialise, and torch would import its compiler
        spread = torch.linspace(-math.log(2.0), -math.log(50.0), len(self.log_a))
        self.log_a.copy_(spread.unsqueeze(1).expand_as(self.log_a))
        self.log_lam_v.zero_()

    def forward(
        self, values: Tensor, observed: Mask, dt: Tensor, mask: Mask | None = None
    ) -> tuple[Tensor, Tensor]:
        """Posterior means and log variances, ``[B, T, memories * channels]`` each."""
        memories, dtype = self.config.channel_memories, values.dtype
        log_a, log_lam_v = (x.flatten().to(dtype) for x in (self.log_a, self.log_lam_v))
        a = log_a.exp().unsqueeze(0)  # [1, D]
        one = values.new_ones(*values.shape[:2], 1)
        filtered = kla_smooth if self.config.layer.smooth else kla_scan
        options: dict[str, Any] = {} if self.config.layer.smooth else {"return_variance": True}
        found = filtered(
            *(one, one, values.repeat(1, 1, memories)),
            observed.repeat(1, 1, memories) * log_lam_v.exp(),
            *(torch.exp(-a), -torch.expm1(-2.0 * a)),
            dt=dt.to(dtype),
            mask=mask,
            **options,
        )
        assert found.y_var is not None
        return found.y, found.y_var.clamp_min(1e-6).log()


class ImageEncoder(nn.Module):
    """A token from an image, by two small convolutions.

    The network is that of RKN and its successors, except that the first convolution has a stride
    of 2 where theirs has a stride of 1 and pooling, which takes three times as long on a CPU.

    Args:
        config: options of the model.
        hidden: width before the token.
    """

    def __init__(self, config: SeriesConfig, hidden: int = 30) -> None:
        super().__init__()
        size, d_model = config.channels, config.d_model
        self.net = nn.Sequential(
            nn.Conv2d(1, 12, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2d(12, 12, 3, stride=2, padding=1),
            nn.MaxPool2d(2),  # before the ReLU: same result on a quarter of the numbers
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(12 * (size // 8) ** 2, hidden),
            nn.ReLU(),
            nn.Linear(hidden, d_model),
        )
        self.net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(
        self, images: Tensor, observed: Mask, dt: Tensor, mask: Mask | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Encode ``[B, T, size, size]`` as ``[B, T, d_model]``; unobserved images are not read."""
        dtype = next(self.parameters()).dtype
        x = images.to(dtype) / 255.0 if images.dtype == torch.uint8 else images.to(dtype)
        x = x.where(observed[..., None, None], x.new_zeros(())).flatten(0, 1).unsqueeze(1)
        tokens = torch.cat([self.net(part) for part in torch.split(x, _IMAGES)])
        return torch.unflatten(tokens, 0, images.shape[:2]), ()


class ChannelSummaries(nn.Module):
    """Logits from summaries of each channel: an additive model, beside the layers.

    The summaries of a channel are the mean, highest, lowest and standard deviation of its observed
    values, their number, and, for each of its filters, the mean over time, the last mean and the
    last variance. Each contributes a piecewise linear function, learned as its values at the
    knots. A layer mixes all channels into a few numbers, which loses what simple summaries say
    about a series; with few series to learn from, the mean of both is better than either.

    Args:
        config: options of the model.
    """

    def __init__(self, config: SeriesConfig) -> None:
        super().__init__()
        self.knots = config.summary_knots
        width = config.channels * (5 + 3 * config.channel_memories) * self.knots
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(width, config.outputs)
        nn.init.zeros_(self.head.weight)  # most summaries say nothing about the class

    def forward(
        self,
        values: Tensor,
        observed: Mask,
        filtered: tuple[Tensor, ...],
        mask: Mask | None = None,
    ) -> Tensor:
        """Logits, ``[B, outputs]``; a channel that was never observed only says so.

        Args:
            values: ``[B, T, channels]``.
            observed: which of them were observed.
            filtered: output of the channel filters: means and log variances, or nothing.
            mask: ``[B, T]`` bool, False for padding.
        """
        if mask is not None:
            observed = observed & mask.unsqueeze(-1)
        count, found = _summaries(values, observed)
        parts = [_hats(found, self.knots) * (count > 0)[:, None, :, None]]
        # The logarithms are moved to the range of the knots.
        parts.append(_hats(count.log1p() - 2.0, self.knots))
        if filtered:
            means, log_vars = filtered
            pooled = _pooled(means, mask)
            last = _pooled(log_vars, mask)[:, means.shape[-1] :]
            parts += [_hats(pooled, self.knots), _hats(1.33 * last + 2.0, self.knots)]
        x = torch.cat([part.flatten(1) for part in parts], -1)
        return self.head(self.dropout(x))  # type: ignore[no-any-return]


def _summaries(values: Tensor, observed: Mask) -> tuple[Tensor, Tensor]:
    """Number of the observed values ``[B, C]``; mean, extremes, deviation, ``[B, 4, C]``."""
    known = values.where(observed, values.new_zeros(()))
    count = observed.sum(1).to(known.dtype)
    some = count.clamp_min(1.0)
    mean = known.sum(1) / some
    spread = ((known - mean.unsqueeze(1)) * observed).square().sum(1) / some
    high = known.masked_fill(~observed, -torch.inf).amax(1)
    low = known.masked_fill(~observed, torch.inf).amin(1)
    # 0 to 4/3 standard deviations become -2 to 2, the range of the knots.
    return count, torch.stack([mean, high, low, 3.0 * spread.clamp_min(1e-12).sqrt() - 2.0], 1)


def _hats(x: Tensor, knots: int) -> Tensor:
    """Weights of linear interpolation between equally spaced knots on [-2, 2], ``[..., knots]``."""
    place = (x.clamp(-2.0, 2.0) + 2.0) * ((knots - 1) / 4.0)
    apart = place.unsqueeze(-1) - torch.arange(knots, dtype=x.dtype, device=x.device)
    return (1.0 - apart.abs()).clamp_min(0.0)


def _pooled(z: Tensor, mask: Mask | None) -> Tensor:
    """Mean over instants and the value at the last one, ``[B, T, D]`` to ``[B, 2 D]``."""
    if mask is None:
        return torch.cat([z.mean(1), z[:, -1]], -1)
    weight = mask.unsqueeze(-1).to(z.dtype)
    mean = (z * weight).sum(1) / weight.sum(1).clamp_min(1.0)
    place = torch.arange(z.shape[1], device=z.device) * mask  # 0 at padding
    last = place.argmax(1)[:, None, None].expand(-1, 1, z.shape[-1])
    return torch.cat([mean, z.gather(1, last).squeeze(1)], -1)


def _since(times: Tensor, counted: Mask, real: Mask) -> Tensor:
    """Time since the last counted token before each real one; 0 where there is none."""
    never = torch.full_like(times, -torch.inf)
    last = torch.where(counted, times, never).cummax(1).values
    before = torch.cat([never[:, :1], last[:, :-1]], 1)
    return torch.where(real & before.isfinite(), times - before, torch.zeros_like(times))
