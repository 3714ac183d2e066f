"""Arguments and outputs of ``forward``: masks, packing, losses, what transformers expects."""

import pytest
import torch

from kalman_attention.hf import KLAModel
from tests.models.hf.small import PLANS, config, padded, small, text

plans = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@plans
def test_equals_the_native_model(plan):
    model, ids = small(plan, mlp="swiglu", final_logit_softcapping=5.0), text(2, 6)
    native = model.native()
    torch.testing.assert_close(model(ids).logits, native(ids).logits, rtol=0, atol=0)
    out = model(ids, output_hidden_states=True, output_variances=True)
    expected = native(ids, return_variances=True)
    assert len(out.hidden_states) == len(native.blocks) + 1
    assert torch.equal(out.hidden_states[0], native.embedding(ids))
    assert torch.equal(out.hidden_states[-1], expected.hidden)
    for found, variance in zip(out.variances, expected.variances, strict=True):
        assert (found is None and variance is None) or torch.equal(found, variance)


@plans
def test_a_mask_of_ones_changes_nothing(plan):
    model, ids = small(plan), text(2, 6)
    ones = torch.ones_like(ids)
    assert torch.equal(model(ids, attention_mask=ones).logits, model(ids).logits)
    packed, borders = text(1, 7), torch.tensor([0, 3, 7])
    alone = torch.cat([model(packed[:, :3]).logits, model(packed[:, 3:]).logits], 1)
    found = model(packed, attention_mask=torch.ones_like(packed), cu_seqlens=borders).logits
    torch.testing.assert_close(found, alone, **CLOSE)


@plans
@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
def test_padding_is_exact_in_values_and_gradients(plan, left):
    model = small(plan)
    prompts, rows, mask = padded((2, 5, 4), left)
    found = model(rows, attention_mask=mask).logits
    labels = rows.masked_fill(mask == 0, -100)
    loss = model(rows, attention_mask=mask, labels=labels).loss
    total = sum(model(p, labels=p).loss * (p.shape[1] - 1) for p in prompts)
    expected = total / sum(p.shape[1] - 1 for p in prompts)
    torch.testing.assert_close(loss, expected)
    for i, prompt in enumerate(prompts):
        torch.testing.assert_close(found[i][mask[i] == 1], model(prompt).logits[0], **CLOSE)
    weights = [p for p in model.parameters() if p.requires_grad]
    for one, other in zip(
        torch.autograd.grad(loss, weights), torch.autograd.grad(expected, weights), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@plans
def test_packed_documents_in_transformers_words(plan):
    model, packed = small(plan), text(1, 7)
    alone = torch.cat([model(packed[:, :3]).logits, model(packed[:, 3:]).logits], 1)
    borders = torch.tensor([0, 3, 7], dtype=torch.int32)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    for options in ({"cu_seq_lens_q": borders}, {"position_ids": positions}):
        out = model(packed, **options)
        assert out.past_key_values is None
        torch.testing.assert_close(out.logits, alone, **CLOSE)
    # One document with its positions is nothing special, nor is padding.
    plain = model(packed, position_ids=torch.arange(7).unsqueeze(0)).logits
    assert torch.equal(plain, model(packed).logits)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1]])
    zeros = torch.tensor([[0, 0, 0, 1, 2, 3, 4]])
    found = model(packed, attention_mask=mask, position_ids=zeros).logits[:, 2:]
    torch.testing.assert_close(found, model(packed[:, 2:]).logits, **CLOSE)
    with pytest.raises(ValueError, match="Pack everything into one row"):
        model(packed.expand(2, -1), position_ids=positions.expand(2, -1))
    with pytest.raises(ValueError, match="have no past"):
        model(packed, past_key_values=model(packed).past_key_values, cu_seqlens=borders)


def test_masks_that_do_not_fit():
    model, ids = small(), text(1, 4)
    for mask in (torch.ones(1, 5), torch.ones(1, 1, 4, 4)):
        with pytest.raises(ValueError, match="one entry per token"):
            model(ids, attention_mask=mask)
    cache = model(ids).past_key_values
    with pytest.raises(ValueError, match="the 4 tokens in the cache included"):
        model(ids, attention_mask=torch.ones(1, 7), past_key_values=cache)
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model()


@plans
def test_inputs_embeds_and_logits_to_keep(plan):
    model, ids = small(plan), text(2, 6)
    every = model(ids).logits
    assert torch.equal(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, every)
    torch.testing.assert_close(model(ids, logits_to_keep=2).logits, every[:, -2:])
    index = torch.tensor([0, 3])
    torch.testing.assert_close(model(ids, logits_to_keep=index).logits, every[:, index])


def test_tuples():
    model, ids = small(), text(1, 4)
    loss, logits, cache = model(ids, labels=ids, return_dict=False)
    out = model(ids, labels=ids)
    assert torch.equal(loss, out.loss)
    assert torch.equal(logits, out.logits)
    assert cache.get_seq_length() == 4
    base = KLAModel(config())
    assert len(base(ids, return_dict=False, use_cache=False)) == 1
    base.config.output_hidden_states = True
    assert len(base(ids).hidden_states) == 3


def test_no_cache_while_training():
    model, ids = small(), text(1, 4)
    assert model(ids).past_key_values is not None
    assert model.train()(ids).past_key_values is None


def test_loss_of_the_posterior_mean():
    model, ids = small(), text(2, 6)
    labels = ids.clone()
    labels[0, :3] = -100
    targets = torch.cat([labels[:, 1:], torch.full((2, 1), -100)], 1)
    expected = model.native().loss(ids, targets)
    torch.testing.assert_close(model(ids, labels=labels).loss, expected)
    count = int((targets != -100).sum())
    found = model(ids, labels=labels, num_items_in_batch=2 * count).loss
    torch.testing.assert_close(found, expected / 2)


def test_marginal_loss():
    model, ids = small("attention + kla", loss="marginal", loss_samples=3), text(2, 6)
    targets = torch.cat([ids[:, 1:], torch.full((2, 1), -100)], 1)
    torch.manual_seed(3)
    out = model(ids, labels=ids)
    torch.manual_seed(3)
    expected = model.native().loss(ids, targets, kind="marginal", num_samples=3)
    torch.testing.assert_close(out.loss, expected)
    torch.testing.assert_close(out.logits, model(ids).logits)
    torch.manual_seed(3)
    halved = model(ids, labels=ids, num_items_in_batch=torch.tensor(20)).loss
    torch.testing.assert_close(halved, expected / 2)
    out.loss.backward()
    assert bool(model.model.blocks[1].mixer.prior.raw_p.grad.any())


@torch.no_grad()
def test_marginal_prediction():
    model, ids = small(), text(2, 70)
    torch.manual_seed(0)
    logits = model(ids, num_samples=20).logits
    torch.testing.assert_close(logits.exp().sum(-1), torch.ones(2, 70))
    mean = model(ids).logits.log_softmax(-1)
    assert 0 < float((logits - mean).abs().mean()) < 0.5
    assert model(ids, num_samples=2, logits_to_keep=1).logits.shape == (2, 1, 37)


@plans
def test_gradient_checkpointing(plan):
    model, ids = small(plan).train(), text(2, 6)
    grads = []
    for enabled in (False, True):
        if enabled:
            model.gradient_checkpointing_enable()
            assert model.is_gradient_checkpointing
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing


def test_checkpointing_repeats_the_same_samples():
    model, ids = small(between_blocks="sample").train(), text(2, 6)
    losses, grads = [], []
    for enabled in (False, True):
        if enabled:
            model.gradient_checkpointing_enable()
        torch.manual_seed(0)
        model.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        losses.append(loss)
        grads.append(model.model.embedding.weight.grad.clone())
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*grads)


def test_uncertainty():
    model = small("attention + kla")
    _, rows, mask = padded((3, 6))
    found = model.uncertainty(rows, mask, num_samples=4, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(1)
    expected = model.native().uncertainty(
        rows, mask=mask.bool(), num_samples=4, generator=generator
    )
    assert found.variance[0] is None
    for one, other in zip(found[2:], expected[2:], strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_compiled_training_step():
    model, ids = small("attention + kla"), text(2, 9)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    mask = torch.ones_like(ids)
    for options in ({}, {"attention_mask": mask}):
        found = compiled(ids, labels=ids, use_cache=False, **options)
        expected = model(ids, labels=ids, use_cache=False)
        torch.testing.assert_close(found.loss, expected.loss)
        torch.testing.assert_close(found.logits, expected.logits, **CLOSE)
