"""Likelihoods against the plainest sums, whatever the batches, windows and chunks."""

import math

import pytest
import torch

pytest.importorskip("tokenizers")

from kalman_attention.evaluation.likelihood import TextScore, continuations, document_nats
from tests.evaluation.checkpoints import model

PLANS = ["kla*2", "attention + kla", "kla + attention"]


def requests(count=9):
    draw = torch.Generator().manual_seed(3)
    sizes = torch.randint(1, 12, (count, 2), generator=draw).tolist()
    return [
        tuple(torch.randint(300, (n,), generator=draw).tolist() for n in pair) for pair in sizes
    ]


@torch.no_grad()
def one_by_one(net, context, continuation):
    """A request alone, one token after the other, without any batch."""
    total, greedy, ids = 0.0, True, list(context)
    for token in continuation:
        log_probs = net(torch.tensor([ids])).logits[0, -1].double().log_softmax(-1)
        total += log_probs[token].item()
        greedy = greedy and log_probs.argmax().item() == token
        ids.append(token)
    return total, greedy


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_continuations(plan, batch_size):
    net = model(plan)
    wanted = requests()
    best = net(torch.tensor([wanted[0][0]])).logits[0, -1].argmax().item()
    wanted.append((wanted[0][0], [best]))
    found = dict(continuations(net, wanted, batch_size=batch_size))
    assert sorted(found) == list(range(len(wanted)))
    for place, (context, continuation) in enumerate(wanted):
        log_prob, greedy = one_by_one(net, context, continuation)
        assert found[place].log_prob == pytest.approx(log_prob, abs=1e-4)
        assert found[place].greedy == greedy
    assert found[len(wanted) - 1].greedy


def test_long_requests_lose_tokens_on_the_left():
    net = model()
    context, continuation = list(range(50)), [7, 8, 9]
    [(_, found)] = continuations(net, [(context, continuation)], max_length=10)
    want, _ = one_by_one(net, context[-8:], continuation)
    assert found.log_prob == pytest.approx(want, abs=1e-4)
    with pytest.raises(ValueError, match="does not fit into 2"):
        list(continuations(net, [(context, continuation)], max_length=2))


def test_marginal_likelihoods():
    net = model("attention + kla")
    wanted = requests()
    one, many = (dict(continuations(net, wanted, batch_size=n, num_samples=8)) for n in (1, 5))
    for place in one:
        assert one[place].log_prob == pytest.approx(many[place].log_prob, abs=1e-4)
    [(_, alone)] = continuations(net, wanted[4:5], num_samples=8)
    assert alone.log_prob == pytest.approx(one[4].log_prob, abs=1e-4)
    other = dict(continuations(net, wanted, num_samples=8, seed=99))
    assert any(abs(one[i].log_prob - other[i].log_prob) > 1e-6 for i in one)
    # With many samples the log of the mean probability, which sampling by hand also gives.
    context, continuation = wanted[0]
    ids = torch.tensor([[*context, *continuation][:-1]])
    read = net.read(ids)
    last = slice(len(context) - 1, None)
    draws = torch.randn(4000, *read.mean[0, last].shape)
    latent = read.mean[0, last] + read.variance[0, last].sqrt() * draws
    with torch.no_grad():
        probs = net.write(latent, *(x[0, last] for x in read.context)).softmax(-1).mean(0)
    by_hand = probs[range(len(continuation)), continuation].log().sum().item()
    [(_, found)] = continuations(net, [wanted[0]], num_samples=4000)
    assert found.log_prob == pytest.approx(by_hand, abs=0.02)


def test_without_a_belief_there_is_nothing_to_sample():
    with pytest.raises(ValueError, match="attention"):
        list(continuations(model("kla + attention"), requests(), num_samples=2))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_a_carried_state_is_one_pass(plan, chunk):
    net = model(plan)
    tokens = requests(1)[0][0] * 4
    want, _ = one_by_one(net, [5], tokens)
    assert document_nats(net, 5, tokens, chunk=chunk) == pytest.approx(-want, abs=1e-4)


def test_windows_that_forget():
    net = model()
    tokens = torch.randint(300, (25,), generator=torch.Generator().manual_seed(0)).tolist()
    want = 0.0
    for place, token in enumerate(tokens):
        # Windows of 8 begin every 3 tokens; the first that reaches a token scores it.
        begin = 0 if place < 8 else 3 * math.ceil((place - 7) / 3)
        want -= one_by_one(net, [5, *tokens[begin:place]], [token])[0]
    assert document_nats(net, 5, tokens, chunk=8, stride=3) == pytest.approx(want, abs=1e-3)
    with pytest.raises(ValueError, match="cannot have a stride"):
        document_nats(net, 5, tokens, chunk=8, stride=9)


def test_marginal_documents():
    net = model()
    tokens = requests(1)[0][0] * 3
    mean = document_nats(net, 5, tokens)
    one, two = (document_nats(net, 5, tokens, num_samples=200, seed=s) for s in (1, 2))
    assert one == document_nats(net, 5, tokens, num_samples=200, seed=1)
    assert one != two
    assert one == pytest.approx(two, rel=0.05)
    assert one != mean
    assert document_nats(net, 5, []) == 0.0


def test_bits_per_byte():
    score = TextScore(nats=math.log(2) * 30, tokens=5, bytes=10)
    score += TextScore(nats=0.0, tokens=5, bytes=20)
    assert score.bits_per_byte == pytest.approx(1.0)
    assert score.perplexity == pytest.approx(8.0)
