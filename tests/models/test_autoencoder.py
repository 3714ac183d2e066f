"""The autoencoder: its parts, both losses, storage."""

import json
import math

import pytest
import torch
from torch.nn.functional import cross_entropy, gelu

from kalman_attention import LanguageModelConfig, load_model, save_model
from kalman_attention.models.autoencoder import Autoencoder, AutoencoderConfig, sinusoids
from kalman_attention.models.block import BlockOutput
from kalman_attention.models.config import MIXERS
from kalman_attention.models.storage import load_autoencoder
from kalman_attention.models.uncertainty import predictions
from kalman_attention.train.optim import group_names
from tests.models.small import VOCABULARY, text


def small(plan="kla", seed=0, widths=None, **options):
    torch.manual_seed(seed)
    encoder = LanguageModelConfig(
        vocab_size=VOCABULARY, d_model=16, plan=plan, decoder_widths=widths, **options
    )
    return Autoencoder(AutoencoderConfig(encoder=encoder, init_std=0.2))


def test_sinusoids():
    found = sinusoids(5, 8)
    assert found.shape == (5, 8)
    for t in range(5):
        for i in range(4):
            angle = t * 10_000 ** (-i / 3)  # 1 first, 1 / 10000 last
            assert found[t, i] == pytest.approx(math.sin(angle))
            assert found[t, 4 + i] == pytest.approx(math.cos(angle))


def by_hand(model, ids):
    """Logits by the description, from weights alone."""

    def norm(x, weight):
        return weight * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()

    x = model.embedding.weight[ids]
    for block in model.blocks:
        x = block(x).y
    rows = []
    for t in range(ids.shape[1]):
        h = x[:, -1] + sinusoids(ids.shape[1], 16)[t].float()
        for i in (0, 3):
            linear = model.decoder[i + 1]
            h = gelu(norm(h, model.decoder[i].weight) @ linear.weight.t() + linear.bias)
        h = norm(h, model.norm.weight)
        rows.append(h @ model.head.weight.t() + model.head.bias)
    return torch.stack(rows, 1)


@pytest.mark.parametrize("plan", [*MIXERS, "kla*2"])
@pytest.mark.parametrize("widths", [None, (24, 12)])
def test_forward_is_the_description(plan, widths):
    model, ids = small(plan, widths=widths), text(3, 6)
    with torch.no_grad():  # so that gains and biases show
        for parameter in (*model.decoder.parameters(), model.norm.weight, model.head.bias):
            parameter.add_(0.1 * torch.randn_like(parameter))
    found = model(ids)
    assert found.logits.shape == (3, 6, VOCABULARY)
    torch.testing.assert_close(found.logits, by_hand(model, ids), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.head(found.hidden), found.logits)
    assert model.decoder[1].out_features == (16 if widths is None else 24)
    assert model.head.in_features == (16 if widths is None else 12)


@pytest.mark.parametrize("plan", MIXERS)
def test_everything_passes_through_the_last_position(plan):
    # Two positions differ by their sinusoid only, and every token reaches the code.
    model, ids = small(plan, embedding_std=1.0), text(1, 5)
    model.embedding.weight.requires_grad_(False)
    x = model.embedding(ids).requires_grad_()
    y = x
    for block in model.blocks:
        y = block(y).y
    y[:, -1].square().sum().backward()
    assert bool((x.grad[0].abs().sum(-1) > 0).all())
    assert model(ids, return_variances=True).variances is not None


@pytest.mark.parametrize("plan", ["kla*2", "attention + kla"])
def test_read_and_write_are_forward(plan):
    model, ids = small(plan), text(3, 6)
    read = model.read(ids)
    assert all(z.shape[:2] == (3, 6) for z in (read.mean, read.variance, *read.context))
    torch.testing.assert_close(model.write(read.mean, *read.context), model(ids).logits)
    parts = list(predictions(model, read, num_samples=5, chunk_size=4))
    assert [part.log_probs.shape for part in parts] == [(3, 4, VOCABULARY), (3, 2, VOCABULARY)]


@pytest.mark.parametrize("encoder_width", [None, 12])
@pytest.mark.parametrize("counted", [2, 20])
@pytest.mark.parametrize("plan", [*MIXERS, "kla*2"])
def test_the_loss_has_the_gradients_of_all_blocks_at_all_positions(plan, counted, encoder_width):
    model = small(plan, encoder_width=encoder_width, embedding_std=1.0).double()
    ids = text(3, 20)
    targets = torch.where(torch.arange(20) < counted, ids, -100)
    assert ids.numel() > VOCABULARY
    x = model.embed(ids)
    for block in model.blocks:
        x = block(x).y
    logits = model.logits(x[:, -1:] + sinusoids(20, 16)).flatten(0, 1)
    weights = list(model.parameters())
    wanted = torch.autograd.grad(cross_entropy(logits, targets.flatten()), weights)
    found = torch.autograd.grad(model.loss(ids, targets), weights)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_mean_loss_is_cross_entropy():
    model, ids, targets = small("attention"), text(2, 9), text(2, 9)
    targets[0, :3] = -100
    expected = cross_entropy(model(ids).logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(model.loss(ids, targets), expected)


@pytest.mark.parametrize("plan", ["kla", "attention + kla"])
def test_marginal_loss_trains_everything(plan):
    model, ids = small(plan), text(2, 9)

    def marginal(seed=0):
        generator = torch.Generator().manual_seed(seed)
        return model.loss(ids, ids, kind="marginal", num_samples=4, generator=generator)

    assert marginal() == marginal()
    assert marginal() != marginal(1)
    marginal().backward()
    for name, parameter in model.named_parameters():
        assert bool(parameter.grad.isfinite().all()), name
    assert bool((model.blocks[-1].mixer.prior.raw_p.grad != 0).any())


def test_marginal_loss_without_doubt_is_the_mean_loss(monkeypatch):
    model, ids = small(), text(2, 9)
    expected, walk = model.loss(ids, ids), model.walk

    def certain(*args, **options):
        read = walk(*args, **options).readout
        return BlockOutput(read.mean, (), read._replace(variance=torch.zeros_like(read.variance)))

    monkeypatch.setattr(model, "walk", certain)
    torch.testing.assert_close(model.loss(ids, ids, kind="marginal"), expected)


def test_marginal_loss_needs_a_belief():
    with pytest.raises(ValueError, match="need KLA as the last mixer"):
        small("kla + attention").loss(text(1, 3), text(1, 3), kind="marginal")


def test_samples_between_blocks():
    model, ids = small("kla*2", between_blocks="sample", embedding_std=1.0), text(2, 9)
    assert not torch.equal(model(ids).logits, model(ids).logits)


def test_start():
    torch.manual_seed(0)
    encoder = LanguageModelConfig(vocab_size=40, d_model=128, plan="kla*2")
    model = Autoencoder(AutoencoderConfig(encoder=encoder))
    groups = group_names(model)
    fresh = model.blocks[0].mixer.prior.log_a.clone()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            assert float(module.weight.detach().std()) == pytest.approx(0.02, rel=0.05), name
            if module.bias is not None:
                assert not bool(module.bias.any()), name
    assert float(model.embedding.weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    assert torch.equal(fresh, torch.zeros_like(fresh))  # the prior keeps its own start, a = 1
    assert groups["head.weight"] == groups["head.bias"] == "head"
    assert groups["decoder.1.weight"] == "hidden"
    assert groups["decoder.1.bias"] == groups["norm.weight"] == "vector"


def test_special_biases_are_left_alone():
    # As a step size would have: a linear map inside a mixer with a bias of its own.
    class Mixer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.step = torch.nn.Linear(16, 16)
            torch.nn.init.constant_(self.step.bias, -3.0)
            self.rate = torch.nn.Linear(16, 16)
            torch.nn.init.constant_(self.rate.weight, 2.0)
            self.rate.parameter_group = "state_space"

    model = small()
    model.blocks[0].mixer = Mixer()
    model._start()
    assert set(model.blocks[0].mixer.step.bias.tolist()) == {-3.0}
    assert float(model.blocks[0].mixer.step.weight.detach().std()) < 0.3
    assert set(model.blocks[0].mixer.rate.weight.flatten().tolist()) == {2.0}


def test_learns_to_copy():
    model, ids = small(embedding_std=1.0), text(8, 4, seed=3)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        loss = model.loss(ids, ids)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("widths", [None, (24, 12)])
def test_storage(tmp_path, widths):
    model, ids = small("attention + kla", widths=widths), text(2, 5)
    save_model(model, tmp_path)
    found = load_autoencoder(tmp_path)
    assert found.config == model.config
    torch.testing.assert_close(found(ids).logits, model(ids).logits, rtol=0, atol=0)
    again = AutoencoderConfig.from_dict(json.loads(json.dumps(model.config.to_dict())))
    assert again == model.config
    with pytest.raises(ValueError, match="read it with load_autoencoder"):
        load_model(tmp_path)


def test_a_language_model_is_not_an_autoencoder(tmp_path):
    from tests.models.small import small as language_model

    save_model(language_model("kla", head_bias=True), tmp_path)
    assert load_model(tmp_path).head.bias is not None
    with pytest.raises(ValueError, match="read it with load_model"):
        load_autoencoder(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"d_model": 7}, "even and at least 4"),
        ({"d_model": 8, "tie_embeddings": True}, "apply to language models only"),
        ({"d_model": 8, "head_std": 0.1}, "initialised with init_std"),
    ],
)
def test_bad_options(options, message):
    encoder = LanguageModelConfig(vocab_size=9, plan="kla", **options)
    with pytest.raises(ValueError, match=message):
        AutoencoderConfig(encoder=encoder)


def test_more_bad_options():
    encoder = LanguageModelConfig(vocab_size=9, d_model=8, plan="kla")
    with pytest.raises(ValueError, match="no last token"):
        Autoencoder(AutoencoderConfig(encoder=encoder))(torch.zeros(1, 0, dtype=torch.int64))
