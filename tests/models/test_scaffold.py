"""MLPs around the blocks: what they compute, and that all that a model can do goes through them."""

import dataclasses
import json
from functools import partial

import pytest
import torch
from torch.nn.functional import cross_entropy, gelu

from kalman_attention import (
    KLAConfig,
    LanguageModel,
    LanguageModelConfig,
    load_model,
    save_model,
)
from kalman_attention.evaluation.uncertainty import attention_maps
from kalman_attention.models.autoencoder import Autoencoder, AutoencoderConfig
from kalman_attention.models.matching import PAPER_MODELS
from kalman_attention.models.mixers import MIXERS
from kalman_attention.models.scaffold import SCAFFOLDS, with_scaffold
from kalman_attention.models.sizes import model_size
from kalman_attention.models.stack import read_loss
from kalman_attention.models.storage import load_autoencoder
from kalman_attention.nn.short_conv import distinct_windows
from kalman_attention.train import TensorBatches, TrainConfig, fit, token_loss
from kalman_attention.train.optim import group_names
from tests.models.small import FILTERS, VOCABULARY, small, text

BOTH = {"encoder_width": 12, "decoder_widths": (24, 10)}


def around(plan="kla", **options):
    """A small model with both MLPs, gains and biases away from their start."""
    model = small(plan, **{**BOTH, **options})
    with torch.no_grad():
        for parameter in (*model.encoder.parameters(), *model.decoder.parameters()):
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def by_hand(model, ids):
    """Logits by the description, from weights alone."""

    def norm(x, weight):
        return weight * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()

    def linear(x, layer):
        return x @ layer.weight.t() + layer.bias

    x, encoder = model.embedding.weight[ids], model.encoder
    hidden = gelu(linear(norm(x, encoder.norm.weight), encoder.in_proj))
    x = x + norm(linear(hidden, encoder.out_proj), encoder.out_norm.weight)
    for block in model.blocks:
        x = block(x).y
    for i in (0, 3):
        x = gelu(linear(norm(x, model.decoder[i].weight), model.decoder[i + 1]))
    return norm(x, model.norm.weight) @ model.head.weight.t()


@pytest.mark.parametrize("length", [6, 40])  # fewer and more tokens than the vocabulary has
@pytest.mark.parametrize("plan", [*MIXERS, "kla*2"])
def test_forward_is_the_description(plan, length):
    model, ids = around(plan), text(3, length)
    found = model(ids)
    torch.testing.assert_close(found.logits, by_hand(model, ids), rtol=1e-4, atol=1e-5)
    assert found.hidden.shape == (3, length, 10)
    embedded = model(inputs_embeds=model.embedding(ids))
    torch.testing.assert_close(embedded.logits, found.logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("plan", [*MIXERS, "attention + kla"])
def test_steps_are_forward(plan):
    model, ids = around(plan), text(2, 20)
    whole, states = model(ids).logits, model.init_states(2, capacity=20)
    for t in range(20):
        found = model.step(ids[:, t], states)
        states = found.states
        torch.testing.assert_close(found.logits, whole[:, t], rtol=1e-4, atol=1e-5)
    prompt = model.prefill(ids)
    torch.testing.assert_close(prompt.logits, whole[:, -1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("plan", ["kla", "attention + kla"])
def test_read_and_write_are_forward(plan):
    model, ids = around(plan), text(2, 20)
    read, whole = model.read(ids), model(ids).logits
    torch.testing.assert_close(model.write(read.mean, *read.context), whole)
    first = model.read(ids[:, 0], states=model.init_states(2))
    torch.testing.assert_close(
        model.write(first.mean, *first.context), whole[:, 0], rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("plan", [*MIXERS, "kla*2"])
@pytest.mark.parametrize("chunk_size", [None, 4])
def test_mean_loss_is_cross_entropy(plan, chunk_size):
    model, ids, targets = around(plan), text(3, 20), text(3, 20, seed=2)
    targets[0, :15] = -100
    targets[2] = -100
    logits = model(ids).logits.flatten(0, 1)
    for reduction in ("mean", "sum"):
        found = model.loss(ids, targets, chunk_size=chunk_size, reduction=reduction)
        torch.testing.assert_close(
            found, cross_entropy(logits, targets.flatten(), reduction=reduction)
        )


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("counted", [0, 1, 7, 20])
@pytest.mark.parametrize("plan", [*MIXERS, "kla*2", "attention + kla", "kla + attention"])
def test_few_targets_and_a_short_vocabulary_change_no_gradient(plan, counted, packed):
    model = around(plan).double()
    ids, targets = text(3, 20), text(3, 20, seed=2)
    targets[:, : 20 - counted] = -100
    options = {}
    if packed:
        ids, targets = ids.reshape(1, 60), targets.reshape(1, 60)
        options["cu_seqlens"] = torch.tensor([0, 13, 14, 60])
    same_gradients(model, ids, targets, **options)


def same_gradients(model, ids, targets, **options):
    """The loss has the gradients of the logits at all positions."""
    assert ids.numel() > VOCABULARY
    logits = model(ids, **options).logits.flatten(0, 1)
    wanted = torch.autograd.grad(
        cross_entropy(logits, targets.flatten(), reduction="sum"), list(model.parameters())
    )
    for checkpointing in (False, True):
        model.gradient_checkpointing = checkpointing
        loss = model.loss(ids, targets, reduction="sum", **options)
        found = torch.autograd.grad(loss, list(model.parameters()))
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs)


def blanks(B, T):
    """Text that repeats itself: one token almost everywhere."""
    ids = text(B, T)
    found = torch.where(torch.arange(T) % 19 == 5, ids, 3)
    assert distinct_windows(found, VOCABULARY, 4) is not None
    assert distinct_windows(ids, VOCABULARY, 4) is None
    return found


@pytest.mark.parametrize("counted", [1, 40])
@pytest.mark.parametrize("plan", [*MIXERS, "kla*2", "kla + attention"])
def test_text_that_repeats_itself_changes_no_gradient(plan, counted):
    targets = text(3, 40, seed=2)
    targets[:, : 40 - counted] = -100
    same_gradients(around(plan).double(), blanks(3, 40), targets)


@pytest.mark.parametrize("options", [*FILTERS, {"conv_kernel": None}, {"value": "project"}])
def test_no_option_of_the_layer_changes_it(options):
    targets = text(3, 40, seed=2)
    targets[:, :30] = -100
    torch.manual_seed(0)
    layer = KLAConfig(d_model=16, d_state=4, **options)
    config = LanguageModelConfig(vocab_size=VOCABULARY, d_model=16, plan="kla", kla=layer)
    model = LanguageModel(with_scaffold(config, "encoder-decoder"))
    same_gradients(model.double(), blanks(3, 40), targets)


@pytest.mark.parametrize("repeats", [False, True])
def test_few_targets_change_no_gradient_of_the_marginal_likelihood(repeats):
    model = around("kla").double()
    ids, targets = blanks(3, 40) if repeats else text(3, 40), text(3, 40, seed=2)
    targets[:, :30] = -100
    weights = list(model.parameters())
    seed = partial(torch.Generator().manual_seed, 7)
    everywhere = read_loss(model.write, model.read(ids), targets, num_samples=3, generator=seed())
    few = model.loss(ids, targets, kind="marginal", num_samples=3, generator=seed())
    torch.testing.assert_close(few, everywhere)
    wanted, found = (torch.autograd.grad(loss, weights) for loss in (everywhere, few))
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_token_outside_a_short_vocabulary_is_named():
    model, ids = around(), text(3, 20)
    ids[1, 4] = VOCABULARY + 1
    with pytest.raises(ValueError, match=f"token {VOCABULARY + 1} is outside the vocabulary"):
        model.loss(ids, text(3, 20))


def test_no_target_counts():
    model, ids = around(), text(2, 5)
    assert model.loss(ids, torch.full_like(ids, -100), reduction="sum") == 0.0


def without_doubt(model, monkeypatch):
    walk = model.walk

    def certain(*args, **kwargs):
        found = walk(*args, **kwargs)
        if found.readout is None:
            return found
        sure = found.readout._replace(variance=torch.zeros_like(found.readout.variance))
        return found._replace(readout=sure)

    monkeypatch.setattr(model, "walk", certain)


@pytest.mark.parametrize("scaffold", SCAFFOLDS)
def test_marginal_loss_without_doubt_is_the_mean_loss(scaffold, monkeypatch):
    torch.manual_seed(0)
    config = LanguageModelConfig(vocab_size=VOCABULARY, d_model=16, plan="kla", embedding_std=1.0)
    model = LanguageModel(with_scaffold(config, scaffold))
    ids, targets = text(2, 30), text(2, 30, seed=2)
    targets[0, :9] = -100
    doubtful = model.loss(ids, targets, kind="marginal")
    without_doubt(model, monkeypatch)
    for num_samples in (1, 3):
        marginal = model.loss(ids, targets, kind="marginal", num_samples=num_samples)
        torch.testing.assert_close(marginal, model.loss(ids, targets))
    assert abs(float(doubtful.detach() - model.loss(ids, targets).detach())) > 1e-6


@pytest.mark.parametrize("kind", ["mean", "marginal"])
def test_gradients_reach_every_parameter(kind):
    model, ids = around("attention + kla"), text(4, 30)
    model.loss(ids, ids, kind=kind, num_samples=4).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all()), name
        if name.split(".")[0] in ("embedding", "encoder", "decoder", "norm", "head"):
            assert bool((parameter.grad != 0).any()), name


def test_short_and_long_inputs_have_the_same_gradients():
    # Tokens are encoded one by one, or by way of the encoded table, whichever is less work.
    model, ids = around(), text(2, 15)

    def gradients(*inputs):
        model.zero_grad()
        sum(model.loss(x, x, reduction="sum") for x in inputs).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    assert ids.numel() < VOCABULARY < 2 * ids.numel()
    short, long = gradients(ids, ids), gradients(torch.cat([ids, ids]))
    for name in short:
        torch.testing.assert_close(short[name], long[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("spread", [0.02, 1.0])
def test_what_the_encoder_adds_is_as_large_as_the_embeddings(spread):
    torch.manual_seed(0)
    options = {"d_model": 128, "plan": "kla", "embedding_std": spread, "encoder_width": 120}
    model = LanguageModel(LanguageModelConfig(vocab_size=64, **options))
    with torch.no_grad():
        before = model.embedding.weight.detach()
        added = model.embed(torch.arange(64)) - before
    assert float(before.square().mean().sqrt()) == pytest.approx(spread, rel=0.05)
    assert float(added.square().mean().sqrt()) == pytest.approx(spread, rel=0.05)
    # And it tells tokens apart: what all of them share is a small part of it.
    assert float(added.mean(0).square().mean().sqrt()) < 0.7 * spread


def test_parameters():
    # KLA of the paper: norm, 128 -> 120 -> 128, norm; norm, 128 -> 240, norm, 240 -> 120, head.
    bare = PAPER_MODELS["mad"][0].model("matched", vocab_size=16)
    bare = dataclasses.replace(bare, head_bias=True)
    encoder = 128 + (128 * 120 + 120) + (120 * 128 + 128) + 128
    decoder = 128 + (128 * 240 + 240) + 240 + (240 * 120 + 120)
    narrower = (128 - 120) + (128 - 120) * 16  # last norm and head
    expected = {"bare": 0, "encoder-decoder": encoder + decoder - narrower}
    expected["swiglu"] = 128 + 3 * 128 * (8 * 128 // 3)
    for scaffold, added in expected.items():
        size = model_size(with_scaffold(bare, scaffold))
        assert size.parameters - model_size(bare).parameters == added
        assert size.state == model_size(bare).state == 2048
    groups = group_names(around())
    assert groups["encoder.in_proj.weight"] == groups["decoder.4.weight"] == "hidden"
    assert groups["encoder.out_proj.bias"] == groups["decoder.0.weight"] == "vector"


def test_looking_inside():
    model, ids = around("kla*2"), text(2, 40)
    with torch.no_grad():
        found, logits = model.uncertainty(ids), model(ids).logits
        variances = model(ids, return_variances=True).variances
    expected = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    torch.testing.assert_close(found.entropy, expected, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(found.variance, variances, strict=True):
        torch.testing.assert_close(ours, theirs)
    maps = attention_maps(model, ids, block=0, channels=[1, 5])
    # What is read is the sum of the values, each with its weight.
    held = model.stack()[0](model.embed(ids), hold=True)
    torch.testing.assert_close(
        torch.einsum("bcts,bsc->btc", maps, held.readout.evidence.v[..., [1, 5]]),
        held.readout.mean[..., [1, 5]],
        rtol=1e-4,
        atol=1e-5,
    )


def test_storage(tmp_path):
    model, ids = around("attention + kla"), text(2, 5)
    save_model(model, tmp_path)
    found = load_model(tmp_path)
    assert found.config == model.config
    assert torch.equal(found(ids).logits, model(ids).logits)
    again = LanguageModelConfig.from_dict(json.loads(json.dumps(model.config.to_dict())))
    assert again == model.config


def test_a_stopped_run_goes_on_to_the_same_bits(tmp_path):
    def train(folder, steps, seed):
        model = around("kla", seed=seed)
        config = TrainConfig(max_steps=steps, lr=1e-2, clip=5.0)
        batches = TensorBatches([text(12, 9)], batch_size=4, seed=0)
        fit(model, batches, token_loss("marginal"), config, folder=folder, progress=False)
        return model.state_dict()

    whole = train(tmp_path / "whole", 6, seed=0)
    start = train(tmp_path / "cut", 3, seed=0)
    resumed = train(tmp_path / "cut", 6, seed=1)  # its own first weights do not matter
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert not torch.equal(start["decoder.1.weight"], whole["decoder.1.weight"])
    assert not torch.equal(start["encoder.in_proj.weight"], whole["encoder.in_proj.weight"])


@pytest.mark.parametrize("scaffold", SCAFFOLDS)
def test_autoencoder(scaffold, tmp_path):
    torch.manual_seed(0)
    config = LanguageModelConfig(vocab_size=VOCABULARY, d_model=16, plan="kla")
    model = Autoencoder(AutoencoderConfig(encoder=with_scaffold(config, scaffold)))
    ids = text(3, 15)
    read = model.read(ids)
    torch.testing.assert_close(model.write(read.mean, *read.context), model(ids).logits)
    model.loss(ids, ids, kind="marginal").backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters())
    names = {name.split(".")[0] for name, _ in model.named_parameters()}
    assert ("encoder" in names) == (scaffold == "encoder-decoder")
    widths = (240, 120) if scaffold == "encoder-decoder" else (16, 16)
    assert (model.decoder[1].out_features, model.decoder[4].out_features) == widths
    save_model(model, tmp_path)
    assert torch.equal(load_autoencoder(tmp_path)(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"encoder_width": 0}, "encoder_width must be at least 1, got 0"),
        ({"decoder_widths": (3, 0)}, "decoder_widths must be at least 1"),
        ({"decoder_widths": (8,), "tie_embeddings": True}, "a head as wide as the embedding"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        small("kla", **options)


def test_unknown_scaffold():
    with pytest.raises(ValueError, match="must be one of bare, encoder-decoder, swiglu"):
        with_scaffold(small("kla").config, "mlp")


def test_a_decoder_of_the_same_width_may_be_tied():
    model = small("kla", decoder_widths=(24, 16), tie_embeddings=True)
    assert model.head.weight is model.embedding.weight


def test_transformers_has_no_place_for_it():
    words = pytest.importorskip("kalman_attention.models.hf.configuration_kla")
    with pytest.raises(ValueError, match="for synthetic tasks"):
        words.KLAHFConfig.from_native(around().config)
