"""Generation: greedy, sampled, batched with padding, and how sure the model was."""

import pytest
import torch
from torch._dynamo.utils import counters

from kalman_attention.models.generation import Sampling
from kalman_attention.nn.mixer import state_tensors
from tests.models.small import PLANS, VOCABULARY, small, text

every_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)


def greedy(model, ids, n):
    for _ in range(n):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    return ids[:, -n:]


@every_plan
def test_greedy_is_repeated_forward(plan):
    model, ids = small(plan), text(2, 5)
    found = model.generate(ids, max_new_tokens=7)
    assert torch.equal(found.tokens, greedy(model, ids, 7))
    assert found.uncertainty is None


@pytest.mark.parametrize("left", [True, False])
@every_plan
def test_padded_batches_equal_singles(plan, left):
    model = small(plan)
    prompts = [text(1, n, seed=n) for n in (2, 5, 3)]
    rows = torch.zeros(3, 5, dtype=torch.int64)
    mask = torch.zeros(3, 5, dtype=torch.bool)
    for i, prompt in enumerate(prompts):
        n = prompt.shape[1]
        place = slice(5 - n, 5) if left else slice(0, n)
        rows[i, place], mask[i, place] = prompt[0], True
    found = model.generate(rows, mask=mask, max_new_tokens=6, output_uncertainty=True)
    for i, prompt in enumerate(prompts):
        alone = model.generate(prompt, max_new_tokens=6, output_uncertainty=True)
        assert torch.equal(found.tokens[i : i + 1], alone.tokens)
        torch.testing.assert_close(
            found.uncertainty.entropy[i : i + 1], alone.uncertainty.entropy, rtol=1e-4, atol=1e-5
        )


@every_plan
def test_short_weights_decode_with_long_beliefs(plan):
    model, ids = small(plan).bfloat16(), text(2, 5)
    found = model.prefill(ids)
    for block, state in zip(model.stack(), found.states, strict=True):
        if block.kind == "kla":
            assert {x.dtype for x in state.belief} == {torch.float32}
            assert block.mixer.prior.log_a.dtype == torch.float32
    assert found.logits.dtype == torch.bfloat16
    assert model.generate(ids, max_new_tokens=4).tokens.shape == (2, 4)


@torch.no_grad()
def test_compiled_steps_are_compiled_once():
    model, ids = small("kla*2"), text(2, 5)
    torch._dynamo.reset()
    counters.clear()
    step = torch.compile(model.step, fullgraph=True, dynamic=False, backend="eager")
    found = model.prefill(ids)
    tokens, states = [found.logits.argmax(-1)], found.states
    for _ in range(6):
        found = step(tokens[-1], states)
        tokens, states = [*tokens, found.logits.argmax(-1)], found.states
    # States of a prompt and of a step lie differently in memory: one graph each, none per length.
    assert counters["stats"]["unique_graphs"] <= 2
    assert torch.equal(torch.stack(tokens, 1), model.generate(ids, max_new_tokens=7).tokens)


def test_stop_token():
    model, ids = small(), text(3, 4)
    free = model.generate(ids, max_new_tokens=8).tokens
    stop = int(free[0, 2])
    stopped = model.generate(ids, max_new_tokens=8, stop_token=stop).tokens
    for row, expected in zip(stopped.tolist(), free.tolist(), strict=True):
        end = expected.index(stop) + 1 if stop in expected else len(row)
        assert row[:end] == expected[: min(end, len(row))]
        assert set(row[end:]) <= {stop}


def test_sampling():
    model, ids = small(), text(4, 3)

    def draw(seed, **options):
        generator = torch.Generator().manual_seed(seed)
        return model.generate(ids, max_new_tokens=5, generator=generator, **options).tokens

    assert torch.equal(draw(0, temperature=1.0), draw(0, temperature=1.0))
    assert not torch.equal(draw(0, temperature=1.0), draw(1, temperature=1.0))
    assert torch.equal(draw(0, temperature=1.0, top_k=1), draw(0))
    assert torch.equal(draw(0, temperature=1.0, top_p=1e-6), draw(0))


def test_top_k_and_top_p_choose_among_the_likely():
    log_probs = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().expand(400, -1)
    generator = torch.Generator().manual_seed(0)
    for sampling, allowed in (
        (Sampling(temperature=1.0), {0, 1, 2, 3}),
        (Sampling(temperature=1.0, top_k=2), {0, 1}),
        (Sampling(temperature=1.0, top_p=0.6), {0, 1}),
        (Sampling(temperature=1.0, top_p=0.9), {0, 1, 2}),
    ):
        assert set(sampling.choose(log_probs, generator).tolist()) == allowed


@pytest.mark.parametrize("plan", ["kla*2", "attention + kla"])
def test_uncertainty_of_each_token(plan):
    model, ids = small(plan), text(2, 4)
    generator = torch.Generator().manual_seed(0)
    found = model.generate(
        ids, max_new_tokens=5, output_uncertainty=True, num_samples=6, generator=generator
    )
    u = found.uncertainty
    assert all(x.shape == (2, 5) for x in u)
    torch.testing.assert_close(u.aleatoric + u.epistemic, u.entropy, rtol=1e-4, atol=1e-4)
    assert bool((u.epistemic >= 0).all())
    plain = model.generate(ids, max_new_tokens=5, output_uncertainty=True)
    assert torch.equal(plain.tokens, model.generate(ids, max_new_tokens=5).tokens)
    assert plain.uncertainty.aleatoric is None
    logits = model(ids).logits[:, -1].log_softmax(-1)
    torch.testing.assert_close(plain.uncertainty.log_prob[:, 0], logits.amax(-1))


def test_without_a_belief_there_is_entropy_only():
    model = small("kla + attention")
    u = model.generate(text(1, 3), max_new_tokens=2, output_uncertainty=True).uncertainty
    assert u.entropy.shape == (1, 2)
    assert u.variance is None
    with pytest.raises(ValueError, match="last mixer of the plan"):
        model.generate(text(1, 3), max_new_tokens=2, num_samples=2)


def test_edges():
    model = small()
    assert model.generate(text(2, 3), max_new_tokens=0, output_uncertainty=True).tokens.shape == (
        2,
        0,
    )
    with pytest.raises(ValueError, match="at least one token"):
        model.generate(text(1, 0), max_new_tokens=2)
    assert int(model.generate(text(1, 1), max_new_tokens=3).tokens.max()) < VOCABULARY


@every_plan
def test_one_prefix_many_continuations(plan):
    model, prefix = small(plan), text(2, 6)
    with torch.no_grad():
        kept = model.prefill(prefix).states
    before = [x.clone() for state in kept for _, x in state_tensors(state)]
    for seed in (1, 2, 1):
        more = text(2, 3, seed=seed)
        found = model.generate(more, max_new_tokens=5, states=kept, output_uncertainty=True)
        whole = torch.cat([prefix, more], 1)
        fresh = model.generate(whole, max_new_tokens=5, output_uncertainty=True)
        assert torch.equal(found.tokens, fresh.tokens)
        torch.testing.assert_close(
            found.uncertainty.entropy, fresh.uncertainty.entropy, rtol=1e-4, atol=1e-5
        )
    after = [x for state in kept for _, x in state_tensors(state)]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@every_plan
def test_a_state_is_kept_and_rolled_back_to(plan):
    # As speculative decoding does: try some tokens, keep those that hold, forget the others.
    model, ids = small(plan), text(2, 12)
    with torch.no_grad():
        expected = model(ids).logits
        states = model(ids[:, :5], states=model.init_states(2, capacity=12)).states
        kept = model.reserve(states, 0)
        model(text(2, 4, seed=7), states=states)  # guesses that come to nothing, written in place
        parts, states = [], model.reserve(kept, 7)
        for t in range(5, 12):
            found = model.step(ids[:, t], states)
            states = found.states
            parts.append(found.logits)
    torch.testing.assert_close(torch.stack(parts, 1), expected[:, 5:], rtol=1e-4, atol=1e-5)
