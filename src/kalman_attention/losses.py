r"""Two training losses: cross-entropy of the posterior mean, and the log marginal likelihood.

The latent posterior makes the read-out of every channel Gaussian, y ~ N(y, y_var), exactly:
:math:`y = \sum_n q_n z_n` is linear in the latent. The marginal likelihood averages the decoder's
probability of the target over that posterior, so it trains the variances too.

Both process the sequence in chunks and recompute each chunk in the backward pass: logits exist for
``chunk_size`` positions at a time, in either direction. The second draws samples only for targets
that count: if these are few, as in most synthetic tasks, it costs little more than the first. Small
results are kept instead of recomputed.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from kalman_attention._typing import Values
from kalman_attention.filtering.readout import sample_readout

Decoder = Callable[..., Tensor]
"""From read-outs ``[..., T, D]`` (and their context) to logits ``[..., T, V]``."""

# Temporaries of 8 MB stay in the cache and in the pool of the allocator, which doubles the speed on
# a CPU.
_SAMPLED_NUMBERS = 2**21
"""Numbers in a chunk of samples by default."""

# With everything between samples and logits this is about half a gigabyte. Chunks beyond that are
# recomputed, which takes half as long again.
_KEPT_NUMBERS = 2**24
"""Samples and logits that are kept for the backward pass."""

# Noise belongs to positions, not to chunks, so that the chunk size does not change the result. One
# seed per block instead of one per position keeps seeding cheap.
_NOISE_BLOCK = 256
"""Positions that share a random seed."""


def posterior_mean_cross_entropy(
    decoder: Decoder,
    y: Values,
    targets: Tensor,
    *,
    context: Sequence[Tensor] = (),
    chunk_size: int = 512,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Cross-entropy of the targets under the decoded posterior mean (App. ``app:loss``, loss i).

    Args:
        decoder: from ``[B, T, D]`` (and ``context``) to logits ``[B, T, V]``, position by position.
        y: read-out means, ``[B, T, D]``.
        targets: target class at every position, ``[B, T]`` int64.
        context: further arguments of the decoder at each position (a gate, a residual),
            ``[B, T, ...]`` each.
        chunk_size: positions decoded at a time; affects memory, not the result.
        ignore_index: positions with this target do not count.
        reduction: ``"mean"`` over the positions that count, ``"sum"`` or ``"none"``.

    Returns:
        The loss; ``[B, T]`` for ``"none"``, with 0 where a position does not count.
    """

    def nll(start: int, y: Tensor, targets: Tensor, *context: Tensor) -> Tensor:
        return _cross_entropy(decoder(y, *context), targets, ignore_index)

    _check(y, targets, chunk_size, reduction)
    losses = _by_chunks(nll, chunk_size, y, targets, *context)
    return _reduce(losses, targets, ignore_index, reduction)


def marginal_nll(
    decoder: Decoder,
    y: Values,
    y_var: Values,
    targets: Tensor,
    *,
    context: Sequence[Tensor] = (),
    num_samples: int = 10,
    generator: torch.Generator | None = None,
    chunk_size: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    r"""Negative log marginal likelihood of the targets (``eq:nmll_integral``).

    .. math:: -\log p(o_t) \approx \log S - \mathrm{logsumexp}_s \log p(o_t \mid y_t^{(s)}),
              \qquad y_t^{(s)} \sim N(y_t, y^{var}_t) \quad\text{(eq:nmll\_logsumexp)}

    Samples are reparameterised, so gradients reach ``y_var``; where the variance is exactly 0 its
    gradient is set to 0. With one sample and no variance this is cross-entropy.

    Args:
        decoder: from ``[S, 1, M, D]`` (and ``context``, ``[1, M, ...]``) to logits
            ``[S, 1, M, V]``, position by position; the M positions may be of any sequences.
        y: read-out means, ``[B, T, D]``.
        y_var: read-out variances, ``[B, T, D]``.
        targets: target class at every position, ``[B, T]`` int64.
        context: further arguments of the decoder at each position (a gate, a residual),
            ``[B, T, ...]`` each.
        num_samples: number S of Monte-Carlo samples.
        generator: random generator; None for torch's default one.
        chunk_size: positions decoded at a time, over all sequences; affects memory, not the result.
            None for about two million sampled numbers.
        ignore_index: positions with this target do not count, and are not sampled.
        reduction: ``"mean"`` over the positions that count, ``"sum"`` or ``"none"``.

    Returns:
        The loss; ``[B, T]`` for ``"none"``, with 0 where a position does not count.
    """
    _check_samples(y, y_var, num_samples)
    if chunk_size is None:
        chunk_size = max(1, _SAMPLED_NUMBERS // (num_samples * max(1, y.shape[-1])))
    _check(y, targets, chunk_size, reduction)
    flat = targets.flatten()
    counted = (flat != ignore_index).nonzero().squeeze(1)
    seeds = _draw_seeds(len(counted), generator)
    vocab_size = 0

    def nll(start: int, y: Tensor, y_var: Tensor, targets: Tensor, *context: Tensor) -> Tensor:
        noise = _noise(seeds, start, num_samples, y)
        logits = decoder(sample_readout(y, y_var, noise), *context)  # [S, B, chunk, V]
        nonlocal vocab_size
        vocab_size = logits.shape[-1]
        log_p = -_cross_entropy(logits, targets, ignore_index)
        return math.log(num_samples) - log_p.logsumexp(0)

    def kept() -> int:
        return _KEPT_NUMBERS // (num_samples * chunk_size * (y.shape[-1] + vocab_size))

    rows = [x.flatten(0, 1)[counted].unsqueeze(0) for x in (y, y_var, targets, *context)]
    found = _by_chunks(nll, chunk_size, *rows, kept=kept).squeeze(0)
    losses = found.new_zeros(len(flat)).index_put((counted,), found).view(targets.shape)
    return _reduce(losses, targets, ignore_index, reduction)


def _by_chunks(
    nll: Callable[..., Tensor],
    chunk_size: int,
    *tensors: Tensor,
    kept: Callable[[], int] = lambda: 0,
) -> Tensor:
    """Apply ``nll`` to pieces of ``[B, T, ...]`` tensors; only its inputs are kept for backward.

    ``kept``, called after the last piece, returns the number of other pieces to keep entirely.
    """
    # The last piece is always kept: it is the first in the backward pass, so recomputing it would
    # take time without saving memory.
    *pieces, last = zip(*(torch.split(x, chunk_size, dim=1) for x in tensors), strict=True)
    losses = [nll(len(pieces) * chunk_size, *last)]
    again = len(pieces) - kept()
    for i, piece in reversed(list(enumerate(pieces))):
        start = i * chunk_size
        if i < again:
            losses.append(checkpoint(nll, start, *piece, use_reentrant=False))
        else:
            losses.append(nll(start, *piece))
    return torch.cat(losses[::-1], dim=1)


def _cross_entropy(logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    """Cross-entropy ``[..., B, T]`` of logits ``[..., B, T, V]``, at least in float32."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    targets = targets.expand(logits.shape[:-1])
    flat = cross_entropy(
        logits.flatten(0, -2), targets.flatten(), ignore_index=ignore_index, reduction="none"
    )
    return flat.view(targets.shape)


def _reduce(losses: Tensor, targets: Tensor, ignore_index: int, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    total = losses.sum()
    return total / (targets != ignore_index).sum() if reduction == "mean" else total


def _draw_seeds(T: int, generator: torch.Generator | None) -> list[int]:
    """One random seed per block of positions: all that is needed to draw the noise again."""
    device = "cpu" if generator is None else generator.device
    blocks = max(1, -(-T // _NOISE_BLOCK))
    seeds = torch.randint(2**62, (blocks,), generator=generator, device=device)
    return [int(seed) for seed in seeds.tolist()]


def _noise(seeds: list[int], start: int, num_samples: int, y: Tensor) -> Tensor:
    """Standard normal noise ``[S, B, chunk, D]`` for the positions from ``start`` on."""
    B, length, D = y.shape
    first = start // _NOISE_BLOCK
    end = max(first + 1, -(-(start + length) // _NOISE_BLOCK))
    dtype = torch.float64 if y.dtype == torch.float64 else torch.float32
    shape = (num_samples, B, _NOISE_BLOCK, D)
    generator = torch.Generator(y.device)
    blocks = [
        torch.randn(shape, generator=generator.manual_seed(seed), dtype=dtype, device=y.device)
        for seed in seeds[first:end]
    ]
    return torch.cat(blocks, dim=2).narrow(2, start - first * _NOISE_BLOCK, length)


def _check(y: Tensor, targets: Tensor, chunk_size: int, reduction: str) -> None:
    if y.dim() != 3 or tuple(targets.shape) != tuple(y.shape[:2]):
        raise ValueError(
            f"y must be [B, T, D] and targets [B, T], got {list(y.shape)} and "
            f"{list(targets.shape)}: one target for every position. For one sequence add a batch "
            "axis with unsqueeze(0)."
        )
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}.")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}.")


def _check_samples(y: Tensor, y_var: Tensor | None, num_samples: int) -> None:
    if y_var is None or y_var.shape != y.shape:
        got = "None" if y_var is None else str(list(y_var.shape))
        raise ValueError(
            f"y_var must have the shape of y, {list(y.shape)}, got {got}. It is the variance of "
            "the read-out: compute it with kla_scan(..., return_variance=True)."
        )
    if num_samples < 1:
        raise ValueError(
            f"num_samples must be at least 1, got {num_samples}. For the loss of the mean use "
            "posterior_mean_cross_entropy."
        )
