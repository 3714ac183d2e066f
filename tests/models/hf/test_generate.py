"""``generate``: every strategy, batches with padding, and the uncertainty of what was chosen."""

import pytest
import torch
from transformers import DynamicCache, GenerationConfig

from tests.models.hf.small import PAD, PLANS, padded, small, text

plans = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)


@plans
def test_greedy_is_the_native_one(plan):
    model, ids = small(plan), text(2, 5)
    found = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert torch.equal(found[:, :5], ids)
    assert torch.equal(found[:, 5:], model.native().generate(ids, max_new_tokens=8).tokens)
    slow = model.generate(ids, max_new_tokens=8, do_sample=False, use_cache=False)
    assert torch.equal(found, slow)


@plans
@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"num_beams": 3, "do_sample": False},
        {"num_beams": 2, "num_return_sequences": 2, "length_penalty": 0.5, "do_sample": False},
        {"do_sample": False, "prefill_chunk_size": 2},
    ],
    ids=["greedy", "beams", "two of two beams", "chunked prefill"],
)
def test_left_padded_batches_equal_singles(plan, options):
    model = small(plan)
    prompts, rows, mask = padded((2, 7, 4, 1))
    if "prefill_chunk_size" in options:
        # transformers slices position_ids of the prompt, nothing else
        prompts, rows, mask = padded((6, 7, 5, 7))
    common = {"max_new_tokens": 6, "pad_token_id": PAD, "eos_token_id": 5, **options}
    found = model.generate(rows, attention_mask=mask, **common)[:, rows.shape[1] :]
    each = len(found) // len(prompts)
    # Beam search in transformers takes a padding token of 0 for none, and fills with the end.
    filler = common["eos_token_id"] if "num_beams" in options else PAD
    for i, prompt in enumerate(prompts):
        ones = torch.ones_like(prompt)
        alone = model.generate(prompt, attention_mask=ones, **common)[:, prompt.shape[1] :]
        batched = found[i * each : (i + 1) * each, : alone.shape[1]]
        assert torch.equal(batched, alone)
        assert bool((found[i * each : (i + 1) * each, alone.shape[1] :] == filler).all())


@plans
def test_beam_search_finds_what_exhaustive_scoring_confirms(plan):
    model, ids = small(plan), text(2, 4)
    out = model.generate(
        ids,
        max_new_tokens=3,
        num_beams=4,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    log_probs = model(out.sequences[:, :-1]).logits[:, -3:].log_softmax(-1)
    score = log_probs.gather(-1, out.sequences[:, -3:].unsqueeze(-1)).sum((1, 2)) / 3
    torch.testing.assert_close(out.sequences_scores, score, rtol=1e-4, atol=1e-4)
    slow = model.generate(ids, max_new_tokens=3, num_beams=4, do_sample=False, use_cache=False)
    assert torch.equal(out.sequences, slow)


@plans
def test_sampling(plan):
    model, ids = small(plan), text(3, 4)

    def draw(seed, **options):
        torch.manual_seed(seed)
        return model.generate(ids, max_new_tokens=6, do_sample=True, **options)

    assert torch.equal(draw(0), draw(0))
    assert torch.equal(draw(0), draw(0, use_cache=False))
    assert not torch.equal(draw(0), draw(1))
    greedy = model.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(draw(0, top_k=1), greedy)
    assert draw(0, num_return_sequences=2).shape == (6, 10)


@plans
def test_from_embeddings(plan):
    model, ids = small(plan), text(2, 5)
    embeds = model.get_input_embeddings()(ids)
    found = model.generate(inputs_embeds=embeds, max_new_tokens=5, do_sample=False)
    expected = model.generate(ids, max_new_tokens=5, do_sample=False)[:, 5:]
    assert torch.equal(found, expected)


@plans
def test_going_on_with_the_cache_of_an_earlier_call(plan):
    model, ids = small(plan), text(2, 5)
    whole = model.generate(ids, max_new_tokens=9, do_sample=False)
    cache = DynamicCache(config=model.config)
    first = model.generate(ids, max_new_tokens=4, do_sample=False, past_key_values=cache)
    assert cache.get_seq_length() == 8  # the last token has not been read yet
    second = model.generate(first, max_new_tokens=5, do_sample=False, past_key_values=cache)
    assert torch.equal(second, whole)


@pytest.mark.parametrize("implementation", ["offloaded", "offloaded_static", "quantized"])
def test_other_caches_are_refused(implementation):
    model = small("kla + attention")
    with pytest.raises((ValueError, ImportError)):
        model.generate(text(1, 3), max_new_tokens=2, cache_implementation=implementation)


def test_assisted_generation_is_refused():
    model = small()
    with pytest.raises(ValueError, match="stateful"):
        model.generate(text(1, 3), max_new_tokens=2, assistant_model=small(seed=1))


@plans
@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 2, "num_return_sequences": 2}, {"do_sample": True}],
    ids=["greedy", "beams", "sampling"],
)
def test_uncertainty_of_what_was_chosen(plan, options):
    model = small(plan)
    prompts, rows, mask = padded((3, 6))
    torch.manual_seed(0)
    options = {"do_sample": False, **options}
    out = model.generate(
        rows, attention_mask=mask, max_new_tokens=70, output_uncertainty=True, **options
    )
    each = len(out.sequences) // 2
    found = out.uncertainty
    assert (found.variance is not None) == (model.config.mixers[-1] == "kla")
    for row in range(len(out.sequences)):
        prompt, new = prompts[row // each], out.sequences[row : row + 1, 6:]
        logits = model(torch.cat([prompt, new], 1)).logits[:, -71:-1].log_softmax(-1)
        log_prob = logits.gather(-1, new.unsqueeze(-1)).squeeze(-1)
        entropy = -(logits.exp() * logits).sum(-1)
        torch.testing.assert_close(found.log_prob[row : row + 1], log_prob, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.entropy[row : row + 1], entropy, rtol=1e-4, atol=1e-5)


def test_uncertainty_equals_the_native_one():
    model, ids = small("attention + kla"), text(2, 5)
    out = model.generate(ids, max_new_tokens=6, do_sample=False, output_uncertainty=True)
    expected = model.native().generate(ids, max_new_tokens=6, output_uncertainty=True)
    assert torch.equal(out.sequences[:, 5:], expected.tokens)
    for one, other in zip(out.uncertainty[:3], expected.uncertainty[:3], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert out.uncertainty.epistemic is None


def test_uncertainty_ends_with_the_row_and_knows_the_padding_token():
    model = small()
    prompts, rows, _ = padded((3, 6))
    free = model.generate(prompts[0], max_new_tokens=8, do_sample=False)[0, 3:]
    end = next(token for token in free[2:].tolist() if token != PAD)
    options = GenerationConfig(
        max_new_tokens=8, do_sample=False, eos_token_id=[end], pad_token_id=PAD
    )
    out = model.generate(rows, generation_config=options, output_uncertainty=True)
    stop = free.tolist().index(end) + 1
    assert out.sequences[0, 6 : 6 + stop].tolist() == free[:stop].tolist()
    over = out.uncertainty.entropy[0].isnan().tolist()
    assert over == [t >= stop for t in range(len(over))]
    alone = model.generate(
        prompts[0], generation_config=options, output_uncertainty=True
    ).uncertainty
    torch.testing.assert_close(
        out.uncertainty.log_prob[0, :stop], alone.log_prob[0], rtol=1e-4, atol=1e-5
    )


def test_marginal_decoding():
    model, ids = small("attention + kla"), text(2, 5)
    torch.manual_seed(0)
    out = model.generate(
        ids, max_new_tokens=5, do_sample=False, num_samples=4, output_uncertainty=True
    )
    u = out.uncertainty
    torch.testing.assert_close(u.aleatoric + u.epistemic, u.entropy, rtol=1e-4, atol=1e-4)
    assert bool((u.epistemic >= 0).all())
    with pytest.raises(ValueError, match="last mixer of the plan"):
        small("kla + attention").generate(ids, max_new_tokens=2, num_samples=2)
    with pytest.raises(ValueError, match="whole prompt"):
        model.generate(ids, past_key_values=DynamicCache(), output_uncertainty=True)


def test_uncertainty_of_embeddings():
    model, ids = small(), text(2, 5)
    options = {"max_new_tokens": 4, "do_sample": False, "output_uncertainty": True}
    embeds = model.get_input_embeddings()(ids)
    found = model.generate(inputs_embeds=embeds, **options)
    expected = model.generate(input_ids=ids, **options)
    torch.testing.assert_close(found.uncertainty.entropy, expected.uncertainty.entropy)


def test_blocks_that_turn_generate_like_the_native_ones():
    options = {"shared_slots": 2, "num_reflections": 2, "prior": "learned", "initial_mean": 1.0}
    model, ids = small(**options), text(2, 5)
    found = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert torch.equal(found[:, 5:], model.native().generate(ids, max_new_tokens=8).tokens)
    prompts, rows, mask = padded((2, 7, 4))
    together = model.generate(rows, attention_mask=mask, max_new_tokens=6, do_sample=False)
    for prompt, row in zip(prompts, together, strict=True):
        alone = model.generate(prompt, max_new_tokens=6, do_sample=False)
        assert torch.equal(row[7:], alone[0, prompt.shape[1] :])
