"""Training losses of the model: the marginal one is the mean one without doubt."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.models.small import small, text


@pytest.mark.parametrize("plan", ["kla*2", "attention + kla", "kla + attention"])
def test_mean_loss_is_cross_entropy(plan):
    model, ids, targets = small(plan), text(2, 9), text(2, 9, seed=2)
    targets[0, :3] = -100
    expected = cross_entropy(model(ids).logits.flatten(0, 1), targets.flatten())
    for chunk_size in (None, 4):
        torch.testing.assert_close(model.loss(ids, targets, chunk_size=chunk_size), expected)


@pytest.mark.parametrize("plan", ["kla*2", "attention + kla"])
def test_marginal_loss(plan):
    model, ids, targets = small(plan, mlp="swiglu"), text(2, 9), text(2, 9, seed=2)

    def marginal(num_samples, seed=0, **options):
        generator = torch.Generator().manual_seed(seed)
        return model.loss(
            ids, targets, kind="marginal", num_samples=num_samples, generator=generator, **options
        )

    torch.testing.assert_close(marginal(4), marginal(4, chunk_size=2))
    assert marginal(4) != marginal(4, seed=1)
    loss = marginal(4)
    loss.backward()
    for name, parameter in model.named_parameters():
        assert bool(parameter.grad.isfinite().all()), name
    assert bool((model.blocks[-1].mixer.prior.raw_p.grad != 0).any())


def test_marginal_loss_without_doubt_is_the_mean_loss(monkeypatch):
    model, ids, targets = small("attention + kla"), text(2, 9), text(2, 9, seed=2)
    walk = model.walk

    def certain(*args, **kwargs):
        found = walk(*args, **kwargs)
        if found.readout is None:
            return found
        sure = found.readout._replace(variance=torch.zeros_like(found.readout.variance))
        return found._replace(readout=sure)

    monkeypatch.setattr(model, "walk", certain)
    for num_samples in (1, 3):
        marginal = model.loss(ids, targets, kind="marginal", num_samples=num_samples)
        torch.testing.assert_close(marginal, model.loss(ids, targets))


def test_packed_and_padded():
    model, ids, targets = small(), text(1, 6), text(1, 6, seed=2)
    borders = torch.tensor([0, 2, 6])
    parts = [model.loss(ids[:, a:b], targets[:, a:b]) * (b - a) for a, b in ((0, 2), (2, 6))]
    torch.testing.assert_close(model.loss(ids, targets, cu_seqlens=borders), sum(parts) / 6)
    mask = torch.tensor([[False] * 2 + [True] * 6])
    padded = model.loss(
        torch.nn.functional.pad(ids, (2, 0)),
        torch.nn.functional.pad(targets, (2, 0), value=-100),
        mask=mask,
    )
    torch.testing.assert_close(padded, model.loss(ids, targets))


def test_learns_to_copy():
    model, ids = small("kla", d_state=8), text(8, 17, seed=3)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = model.loss(ids[:, :-1], ids[:, 1:])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
