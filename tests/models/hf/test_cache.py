"""The cache: whatever is done to it, decoding goes on as if from the whole text."""

import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache

from kalman_attention.nn.mixer import state_tensors
from tests.models.hf.small import PLANS, padded, small, text

plans = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@plans
@pytest.mark.parametrize("sizes", [(1,) * 9, (4, 5), (1, 3, 1, 4), (2, 0, 6, 1), (8, 1)])
def test_chunks_equal_one_pass(plan, sizes):
    model, ids = small(plan), text(2, 9)
    cache, parts = DynamicCache(config=model.config), []
    with torch.no_grad():
        for part in ids.split(sizes, 1):
            out = model(part, past_key_values=cache)
            assert out.past_key_values is cache
            parts.append(out.logits)
        torch.testing.assert_close(torch.cat(parts, 1), model(ids).logits, **CLOSE)
    assert cache.get_seq_length() == 9


@plans
@pytest.mark.parametrize("prior", ["unit", "stationary", "learned"])
def test_a_new_cache_means_the_prior(plan, prior):
    # Also after a reset, which in transformers' own layers means zeros: a belief of variance 0.
    model, ids = small(plan, prior=prior), text(2, 6)
    cache = DynamicCache()
    with torch.no_grad():
        expected = model(ids, use_cache=False)
        assert expected.past_key_values is None
        for _ in range(2):
            found = model(ids, past_key_values=cache).logits
            torch.testing.assert_close(found, expected.logits, **CLOSE)
            cache.reset()
            assert cache.get_seq_length() == 0


@plans
@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
def test_padded_prefill_then_decoding(plan, left):
    model = small(plan)
    prompts, rows, mask = padded((3, 7, 1), left)
    more = text(3, 4, seed=5)
    with torch.no_grad():
        cache = model(rows, attention_mask=mask).past_key_values
        for t in range(2):  # transformers' convention: the mask covers the past
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
            found = model(more[:, t : t + 1], attention_mask=mask, past_key_values=cache).logits
        # and without any mask, several tokens at once
        rest = model(more[:, 2:], past_key_values=cache).logits
        for i, prompt in enumerate(prompts):
            alone = model(torch.cat([prompt, more[i : i + 1]], 1)).logits[0]
            torch.testing.assert_close(found[i], alone[-3:-2], **CLOSE)
            torch.testing.assert_close(rest[i], alone[-2:], **CLOSE)


@plans
def test_rows_can_be_reordered_repeated_and_selected(plan):
    model = small(plan)
    _, rows, mask = padded((3, 6, 4))
    more = text(3, 2, seed=7)
    with torch.no_grad():
        first = model(rows, attention_mask=mask).past_key_values
        expected = model(more, past_key_values=copy.deepcopy(first)).logits
        order = torch.tensor([2, 0, 0])
        changes = {
            "reorder_cache": (order, expected[order], more[order]),
            "batch_select_indices": (order[:2], expected[order[:2]], more[order[:2]]),
            "batch_repeat_interleave": (
                2,
                expected.repeat_interleave(2, 0),
                more.repeat_interleave(2, 0),
            ),
        }
        for name, (argument, result, ids) in changes.items():
            cache = copy.deepcopy(first)
            getattr(cache, name)(argument)
            # Other rows only if the cache changed as a whole: the original is as it was.
            torch.testing.assert_close(model(ids, past_key_values=cache).logits, result, **CLOSE)
        again = model(more, past_key_values=copy.deepcopy(first)).logits
    assert torch.equal(again, expected)


def test_a_belief_cannot_be_cropped_but_attention_can():
    model = small("kla + attention")
    cache = model(text(1, 5)).past_key_values
    assert not getattr(cache, "is_croppable", False)  # newer than the oldest release we take
    with pytest.raises(ValueError, match="cannot be taken back"):
        cache.crop(-1)
    cache.crop(0)
    pure = small("attention*2")
    _, rows, mask = padded((3, 6))
    with torch.no_grad():
        expected = pure(rows, attention_mask=mask).logits[:, -2:]
        cache = pure(rows, attention_mask=mask).past_key_values
        cache.crop(-2)
        found = pure(rows[:, -2:], attention_mask=mask, past_key_values=cache).logits
    torch.testing.assert_close(found, expected, **CLOSE)


def test_gradients_go_through_a_carried_state():
    for plan in PLANS.values():
        model, ids = small(plan), text(2, 8)
        whole = model(ids, labels=ids, use_cache=False).loss
        (expected,) = torch.autograd.grad(whole, model.model.embedding.weight)
        cache = DynamicCache(config=model.config)
        first = model(ids[:, :5], past_key_values=cache).logits
        logits = torch.cat([first, model(ids[:, 5:], past_key_values=cache).logits], 1)
        loss = model.loss_function(logits=logits, labels=ids, vocab_size=logits.shape[-1])
        (found,) = torch.autograd.grad(loss, model.model.embedding.weight)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_caches_that_do_not_fit():
    model, ids = small("kla + attention"), text(1, 3)
    static = StaticCache(config=model.config, max_cache_len=8)
    static.layers[1].update(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8))
    used = DynamicCache()
    used.update(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8), 0)
    other = small("kla*3")(ids).past_key_values
    for cache in (static, used, other):
        with pytest.raises(ValueError, match="neither quantized nor offloaded"):
            model(ids, past_key_values=cache)
    with pytest.raises(ValueError, match="must be a transformers Cache"):
        model(ids, past_key_values=((ids, ids),))


def test_the_cache_of_a_pure_stack_does_not_grow():
    model, cache = small(), None
    sizes = []
    for n in (1, 50, 200):
        cache = model(text(1, n), past_key_values=cache, use_cache=True).past_key_values
        sizes.append(sum(x.numel() for _, x in state_tensors(cache.layers[0].state)))
    assert len(set(sizes)) == 1
    assert cache.get_seq_length() == 251
    assert cache.has_previous_state()
    assert cache.get_mask_sizes(3, 0) == (254, 0)
    assert cache.get_max_length() == -1
