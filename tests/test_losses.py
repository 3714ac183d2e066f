"""``losses.py``: the two training losses."""

import pytest
import torch
import torch.nn.functional as F
from numpy.polynomial.hermite_e import hermegauss
from torch import Tensor

from kalman_attention import losses
from kalman_attention.losses import marginal_nll, posterior_mean_cross_entropy
from tests.systems import assert_close

B, T, D, V = 2, 70, 3, 5


@pytest.fixture
def case() -> tuple[torch.nn.Linear, Tensor, Tensor, Tensor]:
    """A decoder, read-out means and variances that need gradients, and targets."""
    g = torch.Generator().manual_seed(0)
    decoder = torch.nn.Linear(D, V).double()
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=g))
    y, spread = torch.randn(2, B, T, D, generator=g, dtype=torch.float64)
    targets = torch.randint(V, (B, T), generator=g)
    return decoder, y.requires_grad_(), (0.1 + spread**2).requires_grad_(), targets


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def grads(loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_posterior_mean_cross_entropy_is_cross_entropy(case, reduction):
    decoder, y, _, targets = case
    targets[0, :5] = -100
    loss = posterior_mean_cross_entropy(decoder, y, targets, chunk_size=16, reduction=reduction)
    expected = F.cross_entropy(decoder(y).mT, targets, reduction=reduction)
    assert_close(loss, expected)
    inputs = y, decoder.weight, decoder.bias
    assert_close(grads(loss.sum(), *inputs), grads(expected.sum(), *inputs))


@pytest.mark.parametrize("num_samples", [1, 4])
def test_no_variance_is_cross_entropy(case, num_samples):
    decoder, y, y_var, targets = case
    certain = torch.zeros_like(y_var).requires_grad_()
    loss = marginal_nll(decoder, y, certain, targets, num_samples=num_samples, generator=draws())
    expected = F.cross_entropy(decoder(y).mT, targets)
    assert_close(loss, expected)
    inputs = y, decoder.weight, decoder.bias
    assert_close(grads(loss, *inputs, certain)[:3], grads(expected, *inputs))


def test_gradient_at_zero_variance_is_finite(case):
    decoder, y, y_var, targets = case
    partly = torch.where(y_var > 0.5, y_var, 0.0).detach().requires_grad_()
    (dy_var,) = grads(marginal_nll(decoder, y, partly, targets, generator=draws()), partly)
    assert dy_var.isfinite().all()
    assert not dy_var[partly == 0].any()
    assert dy_var[partly > 0].all()


@pytest.mark.parametrize("kept", [0, 1000, 2**24])
@pytest.mark.parametrize("chunk_size", [1, 7, 32, 33, 64, 1000])
def test_chunk_size_changes_nothing(case, chunk_size, kept, monkeypatch):
    monkeypatch.setattr(losses, "_KEPT_NUMBERS", kept)
    decoder, y, y_var, targets = case
    inputs = y, y_var, decoder.weight, decoder.bias
    whole = marginal_nll(decoder, y, y_var, targets, generator=draws(), chunk_size=T)
    parts = marginal_nll(decoder, y, y_var, targets, generator=draws(), chunk_size=chunk_size)
    assert_close(parts, whole)
    assert_close(grads(parts, *inputs), grads(whole, *inputs))


def test_noise_is_standard_normal_and_independent():
    # The decoder sees the samples: take the mean and the scale off them again.
    y, y_var = torch.full((2, 1, 4000, 2), 3.0, dtype=torch.float64)
    seen = []

    def decoder(samples):
        seen.append(samples)
        return F.pad(samples[..., :1], (1, 0))

    targets = torch.zeros(1, 4000, dtype=torch.int64)
    marginal_nll(decoder, y, y_var, targets, num_samples=4, generator=draws(), chunk_size=999)
    noise = (torch.cat(seen, dim=2) - 3.0) / 3.0**0.5
    assert noise.shape == (4, 1, 4000, 2)
    assert noise.unique().numel() == noise.numel()
    assert abs(noise.mean()) < 0.02
    assert abs(noise.var() - 1) < 0.03
    lag = (noise[:, :, 1:] * noise[:, :, :-1]).mean()
    assert abs(lag) < 0.02


def test_generator_reproduces_and_the_default_one_is_used(case):
    first, again = (marginal_nll(*case, generator=draws(1)) for _ in range(2))
    other = marginal_nll(*case, generator=draws(2))
    assert first == again
    assert first != other
    with torch.random.fork_rng():
        torch.manual_seed(3)
        first, other = marginal_nll(*case), marginal_nll(*case)
        torch.manual_seed(3)
        assert marginal_nll(*case) == first
    assert first != other


def test_gradients_are_those_of_finite_differences(case):
    decoder, y, y_var, targets = (
        part[:, :4] if isinstance(part, Tensor) else part for part in case
    )

    def loss(y, y_var):
        return marginal_nll(decoder, y, y_var, targets, generator=draws(), chunk_size=3)

    assert torch.autograd.gradcheck(loss, (y, y_var), atol=1e-8, rtol=1e-6)


def test_converges_to_the_integral():
    # One channel, two classes: p(o) is a one-dimensional Gaussian integral, by Gauss-Hermite.
    nodes, weights = (torch.from_numpy(x) for x in hermegauss(60))
    mean, variance = 0.7, 2.0
    p = torch.sigmoid(mean + variance**0.5 * nodes)
    expected = -((weights * p).sum() / weights.sum()).log()
    y = torch.full((1, 1, 1), mean, dtype=torch.float64)
    loss = marginal_nll(
        lambda samples: F.pad(samples, (1, 0)),
        y,
        torch.full_like(y, variance),
        torch.ones(1, 1, dtype=torch.int64),
        num_samples=200_000,
        generator=draws(),
    )
    assert_close(loss, expected, rtol=0, atol=3e-3)
    plugged_in = F.softplus(torch.tensor(-mean, dtype=torch.float64))
    assert abs(expected - plugged_in) > 0.05  # the variance matters here


def test_ignored_positions_do_not_count(case):
    _, y, y_var, targets = case
    kept = targets[:, ::2].clone()
    targets[:, 1::2] = 99
    options = {"generator": draws(), "ignore_index": 99}
    each = marginal_nll(*case, **options, reduction="none")
    assert not each[:, 1::2].any()
    assert (each[:, ::2] > 0).all()
    options["generator"] = draws()
    assert_close(marginal_nll(*case, **options), each.sum() / kept.numel())
    options["generator"] = draws()
    dy, dy_var = grads(marginal_nll(*case, **options), y, y_var)
    assert not dy[:, 1::2].any()
    assert not dy_var[:, 1::2].any()


def test_ignored_positions_are_not_decoded(case):
    decoder, y, y_var, targets = case
    seen = []

    def watched(samples):
        seen.append(samples.shape[-2])
        return decoder(samples)

    targets[0] = -100
    some = marginal_nll(watched, y, y_var, targets, generator=draws())
    assert seen == [T]
    alone = marginal_nll(decoder, y[1:], y_var[1:], targets[1:], generator=draws())
    assert_close(some, alone)


def test_context_reaches_the_decoder_position_by_position(case):
    decoder, y, y_var, targets = case
    gate = torch.linspace(0.5, 2.0, B * T * D, dtype=torch.float64).view(B, T, D).requires_grad_()

    def gated(samples, gate):
        return decoder(gate * samples)

    loss = marginal_nll(gated, y, y_var, targets, context=[gate], generator=draws(), chunk_size=9)
    # A gate in front of a linear read-out is a gate on mean and standard deviation.
    expected = marginal_nll(decoder, gate * y, gate**2 * y_var, targets, generator=draws())
    assert_close(loss, expected)
    assert_close(grads(loss, gate), grads(expected, gate))
    loss = posterior_mean_cross_entropy(gated, y, targets, context=[gate], chunk_size=9)
    assert_close(loss, F.cross_entropy(decoder(gate * y).mT, targets))


@pytest.mark.parametrize("kept", [0, 1, 3, 10**6])
def test_large_chunks_are_computed_again_and_small_ones_kept(case, kept, monkeypatch):
    decoder, y, y_var, targets = case
    # Samples and logits of a chunk of 8 positions.
    monkeypatch.setattr(losses, "_KEPT_NUMBERS", kept * 8 * 10 * (D + V))
    sizes = []

    def watched(samples):
        sizes.append(samples.shape[-2])
        return decoder(samples)

    marginal_nll(watched, y, y_var, targets, chunk_size=8).backward()
    assert max(sizes) == 8
    # Once forward, once again in the backward pass, but for the last chunk, which begins it, and
    # for what is kept.
    again = -(-B * T // 8) - 1 - kept
    assert sum(sizes) == B * T + 8 * max(0, again)


def test_half_precision_is_scored_in_float32(case):
    decoder, y, y_var, targets = case
    decoder = decoder.bfloat16()
    loss = marginal_nll(decoder, y.bfloat16(), y_var.bfloat16(), targets, generator=draws())
    assert loss.dtype == torch.float32


def test_no_positions():
    y = torch.zeros(2, 0, 3)
    none = torch.zeros(2, 0, dtype=torch.int64)
    decoder = torch.nn.Linear(3, 4)
    assert marginal_nll(decoder, y, y, none, reduction="none").shape == (2, 0)
    assert posterior_mean_cross_entropy(decoder, y, none, reduction="sum") == 0.0


def test_errors_read_like_help(case):
    decoder, y, y_var, targets = case
    with pytest.raises(ValueError, match="return_variance=True"):
        marginal_nll(decoder, y, None, targets)
    with pytest.raises(ValueError, match="one target for every position"):
        marginal_nll(decoder, y, y_var, targets[:, :-1])
    with pytest.raises(ValueError, match="posterior_mean_cross_entropy"):
        marginal_nll(decoder, y, y_var, targets, num_samples=0)
    with pytest.raises(ValueError, match="'mean', 'sum' or 'none'"):
        posterior_mean_cross_entropy(decoder, y, targets, reduction="average")
    with pytest.raises(ValueError, match="chunk_size"):
        posterior_mean_cross_entropy(decoder, y, targets, chunk_size=0)
