"""Scores are those of the model, whatever the windows, and padding has none."""

import numpy as np
import pytest
import torch

from kalman_attention.evaluation.scores import PADDING, cut, score_windows
from kalman_attention.ops.smooth import kla_innovations
from tests.models.small import PLANS, small, text


def known(values):
    return values[np.isfinite(values)]


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_scores_of_whole_windows(plan):
    model, ids = small(plan).eval(), text(3, 10)
    found = score_windows(model, ids, batch_size=2)
    log_probs = model(ids).logits[:, :-1].log_softmax(-1)
    nll = -log_probs.gather(-1, ids[:, 1:, None]).squeeze(-1)
    np.testing.assert_allclose(found.nll, nll.detach(), rtol=1e-4, atol=1e-5)
    best = log_probs.max(-1)
    np.testing.assert_allclose(found.max_prob, best.values.exp().detach(), rtol=1e-4)
    np.testing.assert_array_equal(found.correct, (best.indices == ids[:, 1:]).double())
    belief = model.uncertainty(ids)
    np.testing.assert_allclose(found.entropy, belief.entropy[:, :-1], rtol=1e-4, atol=1e-5)
    hidden = model(ids).hidden[:, 1:].mean(1).detach()
    np.testing.assert_allclose(found.hidden, hidden, rtol=1e-4, atol=1e-5)
    for i, (variance, gain) in enumerate(zip(belief.variance, belief.gain, strict=True)):
        assert (variance is None) == bool(np.isnan(found.gain[:, i]).all())
        if variance is not None:
            expected = variance.log().mean(-1)[:, 1:]
            np.testing.assert_allclose(found.log_variance[:, i], expected, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(found.gain[:, i], gain.mean(-1)[:, 1:], rtol=1e-4, atol=1e-6)
    assert found.believing == [i for i, kind in enumerate(found.mixers) if kind == "kla"]
    assert ("gain" in found.of_tokens()) == bool(found.believing)


@pytest.mark.parametrize(
    "options", [{}, {"step_rank": 2}, {"shared_slots": 2, "num_reflections": 1}]
)
@pytest.mark.parametrize("size", [1, 4, 7])
def test_carried_windows_are_one_text(options, size):
    model = small("attention + kla*2", kla={"prior": "learned", **options}).eval()
    tokens = text(1, 23)[0].tolist()
    whole = score_windows(model, cut(tokens, 0, len(tokens)))
    pieces = score_windows(model, cut(tokens, 0, size), carry=True)
    for name in ("nll", "entropy", "max_prob"):
        there = known(getattr(pieces, name))
        np.testing.assert_allclose(there, getattr(whole, name)[0], rtol=1e-4, atol=1e-5)
    for i in (1, 2):
        for name in ("log_variance", "gain"):
            there = known(getattr(pieces, name)[:, i])
            np.testing.assert_allclose(there, getattr(whole, name)[0, i], rtol=1e-4, atol=1e-5)


def test_samples_split_the_entropy():
    model, tokens = small("attention + kla", kla={"diffusion": 2.0}).eval(), text(1, 20)[0].tolist()
    found = score_windows(model, cut(tokens, 0, 8), carry=True, num_samples=16, seed=3)
    again = score_windows(model, cut(tokens, 0, 8), carry=True, num_samples=16, seed=3)
    np.testing.assert_array_equal(known(found.epistemic), known(again.epistemic))
    assert known(found.epistemic).mean() > 1e-4
    assert "epistemic" in found.of_tokens()
    assert "epistemic" not in score_windows(model, cut(tokens, 0, 8)).of_tokens()


def test_the_noise_scale_follows_the_values():
    """It is what the innovations of one layer say, and only on request."""
    model, ids = small("attention + kla").eval(), text(2, 9)
    found = score_windows(model, ids, noise_scale=True)
    added = found.scaled_variance[:, 1] - found.log_variance[:, 1]
    seen = []
    with torch.no_grad():
        model.walk(model.embed(ids), visit=lambda _, output: seen.append(output.readout))
        e = seen[1].evidence
        a_bar, p_bar, prior = model.stack()[1].mixer.prior(2)
        normalised = kla_innovations(e.k, e.v, e.lam_v, a_bar, p_bar, state=prior).normalised
    count = 1.0 + torch.arange(1.0, 10.0)[:, None]
    factor = (1.0 + normalised.mean(2).cumsum(1)) / count
    np.testing.assert_allclose(added, factor.log().mean(-1)[:, 1:], rtol=1e-4, atol=1e-5)
    assert "scaled_variance" in found.of_windows()
    assert "scaled_variance" not in score_windows(model, ids).of_windows()
    shared = small("kla", kla={"shared_slots": 2}).eval()
    assert "scaled_variance" not in score_windows(shared, ids, noise_scale=True).of_tokens()


def test_padding_has_no_scores():
    model, tokens = small().eval(), text(1, 9)[0].tolist()
    windows = cut(tokens, 0, 4)
    assert windows.shape == (3, 5)
    assert windows[2].tolist() == [tokens[7], tokens[8], PADDING, PADDING, PADDING]
    found = score_windows(model, windows)
    assert found.tokens.tolist() == [4, 4, 1]
    alone = score_windows(model, windows[2:, :2])
    np.testing.assert_allclose(found.nll[2, :1], alone.nll[0], rtol=1e-5)
    np.testing.assert_allclose(found.hidden[2], alone.hidden[0], rtol=1e-5, atol=1e-6)
    of_windows = found.of_windows()
    assert np.isnan(of_windows["perplexity"]).tolist() == [
        False,
        False,
        True,
    ]  # too short to compare
    np.testing.assert_allclose(of_windows["perplexity"][0], np.exp(found.nll[0].mean()))
    assert np.isfinite(alone.of_windows()["perplexity"]).all()  # but all there is


def test_refusals():
    model = small().eval()
    with pytest.raises(ValueError, match=r"\[n, W \+ 1\]"):
        score_windows(model, torch.zeros(0, 5, dtype=torch.int64))
    with pytest.raises(ValueError, match="one to read, one to score"):
        score_windows(model, torch.tensor([[1, PADDING, PADDING]]))
    with torch.no_grad():
        model.head.weight.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="not finite"):
        score_windows(model, text(1, 4))
