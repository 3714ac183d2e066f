"""What the model says about its own certainty is what the filter believes."""

import math

import pytest
import torch

from kalman_attention.filtering import moment
from kalman_attention.filtering.evidence import token_evidence
from kalman_attention.filtering.gaps import transition
from kalman_attention.models.uncertainty import kalman_gain, predict_marginal, predictions
from tests.models.small import PLANS, small, text


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prior": "learned"},
        {"shared_slots": 2},
        {"step_rank": 2},
        {"shared_slots": 2, "num_reflections": 1},
    ],
)
def test_gain_is_the_share_of_the_belief_replaced(options):
    model, x = small("kla", kla=options), torch.randn(2, 7, 16)
    layer = model.blocks[0].mixer
    found = layer.read(x)
    _, k, v, lam_v, dt = found.evidence[:5]
    (a_bar, p_bar, (_, s)), shares = layer.prior(2), []
    for t in range(7):
        phi, _ = token_evidence(k[:, t], v[:, t], lam_v[:, t])
        phi = phi.unflatten(1, (len(a_bar), -1)).sum(2)  # of the slots that share a precision
        a, p = (a_bar, p_bar) if dt is None else transition(a_bar, p_bar, dt[:, t])
        P = a * a * s + p
        r = moment.retention(P, phi)
        shares.append((1.0 - r).mean(1))
        s = r * P
    gain = kalman_gain(layer, found)
    torch.testing.assert_close(gain, torch.stack(shares, 1), rtol=1e-4, atol=1e-5)
    assert 0.0 <= gain.min() <= gain.max() < 1.0


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_summaries(plan):
    model, ids = small(plan), text(2, 70)
    found = model.uncertainty(ids)
    whole = model(ids, return_variances=True)
    log_probs = whole.logits.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    torch.testing.assert_close(found.entropy, entropy, rtol=1e-4, atol=1e-5)
    for variance, expected, gain in zip(found.variance, whole.variances, found.gain, strict=True):
        assert (variance is None) == (expected is None) == (gain is None)
        if variance is not None:
            torch.testing.assert_close(variance, expected, rtol=1e-5, atol=1e-6)
            assert gain.shape == variance.shape
    assert found.aleatoric is None
    assert not found.entropy.requires_grad


def test_split_of_the_entropy():
    model, ids = small("attention + kla", kla={"diffusion": 2.0}), text(1, 70)
    generator = torch.Generator().manual_seed(0)
    found = model.uncertainty(ids, num_samples=20, generator=generator)
    torch.testing.assert_close(
        found.aleatoric + found.epistemic, found.entropy, rtol=1e-4, atol=1e-4
    )
    assert bool((found.epistemic >= 0).all())
    assert found.epistemic.mean() > 1e-4
    with pytest.raises(ValueError, match="last mixer of the plan"):
        small("kla + attention").uncertainty(ids, num_samples=2)


def test_extremes_of_the_split():
    same = torch.zeros(8, 1, 4)
    found = predict_marginal(same)
    torch.testing.assert_close(found.entropy, torch.full((1,), math.log(4.0)))
    torch.testing.assert_close(found.epistemic, torch.zeros(1))
    certain_but_torn = 50.0 * torch.eye(4).unsqueeze(1)  # each sample sure of another token
    found = predict_marginal(certain_but_torn)
    torch.testing.assert_close(found.aleatoric, torch.zeros(1), rtol=0.0, atol=1e-6)
    torch.testing.assert_close(found.epistemic, torch.full((1,), math.log(4.0)))


def test_one_pass_gives_both_predictions():
    model, ids = small(), text(2, 9)
    read = model.read(ids)
    mean = torch.cat([p.log_probs for p in predictions(model, read, chunk_size=4)], 1)
    torch.testing.assert_close(mean, model(ids).logits.log_softmax(-1), rtol=1e-5, atol=1e-5)
    generator = torch.Generator().manual_seed(0)
    marginal = [p.log_probs for p in predictions(model, read, num_samples=5, generator=generator)]
    torch.testing.assert_close(torch.cat(marginal, 1).exp().sum(-1), torch.ones(2, 9))


def test_padding_and_packing():
    model, ids = small("kla + attention + kla"), text(1, 6)
    alone = model.uncertainty(ids)
    mask = torch.tensor([[False, False] + [True] * 6])
    padded = model.uncertainty(torch.nn.functional.pad(ids, (2, 0)), mask=mask)
    torch.testing.assert_close(padded.entropy[:, 2:], alone.entropy, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(padded.gain[0][:, 2:], alone.gain[0], rtol=1e-4, atol=1e-5)
    packed = model.uncertainty(torch.cat([ids, ids], 1), cu_seqlens=torch.tensor([0, 6, 12]))
    torch.testing.assert_close(packed.gain[2][:, 6:], alone.gain[2], rtol=1e-4, atol=1e-5)


def test_variance_at_the_width_of_the_model():
    model, ids = small("attention + kla*2"), text(2, 5)
    found, plain = model.uncertainty(ids, variance_of="output"), model.uncertainty(ids)
    assert found.variance[0] is None
    x = model.embedding(ids)
    for i, block in enumerate(model.blocks):
        if i:
            expected = block.mixer.mix(block.norm(x), return_variance="output").variance
            assert expected.shape == (2, 5, 16)
            torch.testing.assert_close(found.variance[i], expected, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(found.gain[i], plain.gain[i])
        x = block(x).y
    with pytest.raises(ValueError, match="'readout' or 'output'"):
        model.uncertainty(ids, variance_of="hidden")
