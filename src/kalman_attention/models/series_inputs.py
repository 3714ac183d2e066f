"""What models of series read: tokens from channels or images, filters and summaries of channels."""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kalman_attention._typing import Mask
from kalman_attention.models.series_config import SeriesConfig
from kalman_attention.nn.float32 import KeepsFloat32
from kalman_attention.ops.kla_scan import kla_scan
from kalman_attention.ops.smooth import kla_smooth

_IMAGES = 100  # images per call, so that the output of a convolution stays in the cache


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
            over_time = pooled(means, mask)
            last = pooled(log_vars, mask)[:, means.shape[-1] :]
            parts += [_hats(over_time, self.knots), _hats(1.33 * last + 2.0, self.knots)]
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


def pooled(z: Tensor, mask: Mask | None) -> Tensor:
    """Mean over instants and the value at the last one, ``[B, T, D]`` to ``[B, 2 D]``."""
    if mask is None:
        return torch.cat([z.mean(1), z[:, -1]], -1)
    weight = mask.unsqueeze(-1).to(z.dtype)
    mean = (z * weight).sum(1) / weight.sum(1).clamp_min(1.0)
    place = torch.arange(z.shape[1], device=z.device) * mask  # 0 at padding
    last = place.argmax(1)[:, None, None].expand(-1, 1, z.shape[-1])
    return torch.cat([mean, z.gather(1, last).squeeze(1)], -1)
