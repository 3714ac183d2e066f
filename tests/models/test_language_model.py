"""The language model: one pass, chunks, padding, packing, steps and posterior are one function."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kalman_attention import load_model, save_model
from tests.models.small import PLANS, VOCABULARY, small, text

EXACT = {"rtol": 1e-5, "atol": 1e-5}


@pytest.mark.parametrize("mlp", ["none", "swiglu", "relu2"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_random_chunks_then_decoding_equal_one_pass(plan, mlp):
    model, ids = small(plan, mlp=mlp), text(2, 40)
    rng = torch.Generator().manual_seed(3)
    with torch.no_grad():
        whole = model(ids, return_variances=True)
        states, parts, start = model.init_states(2, capacity=40), [], 0
        while start < 30:
            size = min(int(torch.randint(0, 12, (), generator=rng)), 30 - start)
            found = model(ids[:, start : start + size], states=states)
            parts.append(found.logits)
            states, start = found.states, start + size
        for t in range(30, 40):
            found = model.step(ids[:, t], states, return_variances=True)
            parts.append(found.logits.unsqueeze(1))
            states = found.states
    torch.testing.assert_close(torch.cat(parts, 1), whole.logits, **EXACT)
    for last, variances in zip(found.variances, whole.variances, strict=True):
        if variances is not None:
            torch.testing.assert_close(last, variances[:, -1], **EXACT)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@settings(max_examples=6, deadline=None)
@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_any_chunks(plan, sizes):
    model, ids = small(plan), text(1, sum(sizes))
    states, parts = None, []
    for part in ids.split(sizes, 1):
        found = model(part, states=states)
        states = found.states
        parts.append(found.logits)
    torch.testing.assert_close(torch.cat(parts, 1), model(ids).logits, **EXACT)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@settings(max_examples=6, deadline=None)
@given(left=st.integers(0, 3), right=st.integers(0, 3))
def test_padding_on_either_side_changes_nothing(plan, left, right):
    model, ids, after = small(plan, mlp="swiglu"), text(2, 5), text(2, 3, seed=8)
    padded = torch.nn.functional.pad(ids, (left, right))
    mask = torch.zeros_like(padded, dtype=torch.bool)
    mask[:, left : left + 5] = True
    found, alone = model(padded, mask=mask), model(ids)
    torch.testing.assert_close(found.logits[:, left : left + 5], alone.logits, **EXACT)
    following = [model(after, states=s).logits for s in (found.states, alone.states)]
    torch.testing.assert_close(*following, **EXACT)
    last = model.prefill(padded, mask=mask)
    torch.testing.assert_close(last.logits, alone.logits[:, -1], **EXACT)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_packed_equals_separate_with_gradients(plan):
    model, lengths = small(plan), [3, 1, 6]
    ids = text(1, sum(lengths))
    borders = torch.tensor([0, *lengths]).cumsum(0)

    def gradients(logits):
        model.zero_grad()
        logits.log_softmax(-1).square().sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    packed = model(ids, cu_seqlens=borders).logits
    alone = torch.cat([model(document).logits for document in ids.split(lengths, 1)], 1)
    torch.testing.assert_close(packed, alone, **EXACT)
    expected = gradients(alone)
    for name, gradient in gradients(packed).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_batch_equals_singles(plan):
    model, ids = small(plan), text(3, 7)
    alone = torch.cat([model(row).logits for row in ids.split(1)])
    torch.testing.assert_close(model(ids).logits, alone, **EXACT)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_no_tokens_and_one(plan):
    model = small(plan)
    assert model(text(2, 0)).logits.shape == (2, 0, VOCABULARY)
    one = model(text(2, 1))
    again = model(text(2, 1), states=model(text(2, 0)).states)
    torch.testing.assert_close(one.logits, again.logits, **EXACT)


def test_reads_and_writes_the_posterior():
    for plan in ("kla*2", "attention + kla"):
        model, ids = small(plan, mlp="relu2", logit_softcap=15.0), text(2, 6)
        found = model.read(ids)
        torch.testing.assert_close(model.write(found.mean, *found.context), model(ids).logits)
        samples = found.mean + found.variance.sqrt() * torch.randn(3, *found.mean.shape)
        logits = model.write(samples, *found.context)
        assert logits.shape == (3, 2, 6, VOCABULARY)
        assert bool((logits != model(ids).logits).any())
        step = model.read(ids[:, 0], states=model.init_states(2))
        torch.testing.assert_close(
            model.write(step.mean, *step.context), model(ids[:, :1]).logits[:, 0], **EXACT
        )
    with pytest.raises(ValueError, match="last mixer of the plan"):
        small("kla + attention").read(text(1, 3))


def test_samples_between_blocks():
    model, ids = small("kla*3", between_blocks="sample"), text(1, 6)
    torch.manual_seed(0)
    first = model(ids).logits
    torch.manual_seed(0)
    assert torch.equal(model(ids).logits, first)
    assert not torch.equal(model(ids).logits, first)
    torch.manual_seed(0)
    found = model.read(ids)
    torch.testing.assert_close(model.write(found.mean, *found.context), first)
    single = small("kla", between_blocks="sample")
    assert torch.equal(single(ids).logits, single(ids).logits), "the last block passes on its mean"
    model(ids).logits.sum().backward()
    assert bool((model.blocks[0].mixer.prior.raw_p.grad != 0).any())


def test_embeddings_instead_of_tokens():
    model, ids = small(), text(1, 4)
    found = model(inputs_embeds=model.embedding(ids))
    assert torch.equal(found.logits, model(ids).logits)
    with pytest.raises(ValueError, match="one of the two"):
        model()
    with pytest.raises(ValueError, match="one state per block"):
        model(ids, states=(None,))


def test_an_embedding_that_is_stored_in_bfloat16(tmp_path):
    model = small("kla + attention", embedding_std=1.0)
    model.embedding.bfloat16()
    full = small("kla + attention", embedding_std=1.0)
    with torch.no_grad():
        full.embedding.weight.copy_(model.embedding.weight)
    tokens = torch.zeros(4, 512, dtype=torch.long)  # one row of the table, 2,048 times
    for each in (model, full):
        each.loss(tokens, tokens).backward()
    assert torch.equal(model.blocks[0].norm.weight.grad, full.blocks[0].norm.weight.grad)
    # Summed in float32 and rounded once; in bfloat16 the sum would stall after some hundred terms.
    assert model.embedding.weight.grad.dtype == torch.bfloat16
    assert torch.equal(model.embedding.weight.grad, full.embedding.weight.grad.bfloat16())
    save_model(model, tmp_path)
    model, again = model.eval(), load_model(tmp_path).eval()
    assert again.embedding.weight.dtype == torch.bfloat16
    found = again(text(2, 7))
    assert torch.equal(found.logits, model(text(2, 7)).logits)
    states = again.init_states(2)
    for token in text(2, 7).T:
        last = again.step(token, states)
        states = last.states
    assert torch.allclose(last.logits, found.logits[:, -1], atol=1e-5)


def test_only_some_logits():
    model, ids = small(), text(2, 6)
    whole = model(ids).logits
    torch.testing.assert_close(model(ids, logits_to_keep=2).logits, whole[:, -2:])
    assert model(ids, logits_to_keep=0).logits.shape[1] == 0
    assert model(ids, logits_to_keep=99).logits.shape == whole.shape


def test_softcap_and_tied_embeddings():
    model = small(tie_embeddings=True, logit_softcap=2.0)
    assert model.head.weight is model.embedding.weight
    assert model(text(1, 5)).logits.abs().max() <= 2.0
    untied = small()
    assert model.num_parameters() == untied.num_parameters() - VOCABULARY * 16


def test_gradient_checkpointing_changes_nothing():
    model, ids = small("kla + attention + kla"), text(2, 6)

    def gradient():
        model.zero_grad()
        model(ids).logits.square().sum().backward()
        return model.embedding.weight.grad.clone()

    expected = gradient()
    model.gradient_checkpointing = True
    torch.testing.assert_close(gradient(), expected)


@pytest.mark.parametrize("plan", ["kla*2", "attention + kla"])
def test_short_weights_and_autocast(plan):
    model, ids = small(plan, mlp="swiglu"), text(2, 12)
    exact = model(ids).logits
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(ids).logits.float(), exact, rtol=0.1, atol=0.1)
    model = model.bfloat16()
    found = model(ids)
    assert found.logits.dtype == torch.bfloat16
    torch.testing.assert_close(found.logits.float(), exact, rtol=0.1, atol=0.1)
    states = model.step(ids[:, 0], found.states).states
    assert states[-1].belief.mean.dtype == torch.float32
    assert model.blocks[-1].mixer.prior.log_a.dtype == torch.float32


@pytest.mark.parametrize("plan", ["kla*2", "attention + kla"])
@pytest.mark.slow
def test_compiled_equals_eager(plan):
    model, ids = small(plan), text(2, 9)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found, expected = compiled(ids), model(ids)
    torch.testing.assert_close(found.logits, expected.logits, **EXACT)
    model.zero_grad()
    found.logits.square().sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    expected.logits.square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-4, msg=name)
    torch.compiler.reset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_save_and_load(tmp_path, tied, dtype):
    model, ids = small("attention + kla", tie_embeddings=tied).to(dtype), text(1, 5)
    save_model(model, tmp_path / "run" / "model")
    save_model(model, tmp_path / "run" / "model")
    assert sorted(p.name for p in (tmp_path / "run" / "model").iterdir()) == [
        "checksums.json",
        "config.json",
        "model.safetensors",
    ]
    loaded = load_model(tmp_path / "run" / "model")
    assert loaded.config == model.config
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert loaded.blocks[1].mixer.prior.log_a.dtype == torch.float32
    assert (loaded.head.weight is loaded.embedding.weight) == tied
    assert all(p.requires_grad for p in loaded.parameters())


def test_loading_from_elsewhere(tmp_path):
    with pytest.raises(ValueError, match="not a folder that save_model wrote"):
        load_model(tmp_path)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    model = small()
    save_model(model, tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr("kalman_attention.models.storage.os.replace", fail)
    torch.nn.init.zeros_(model.head.weight)
    with pytest.raises(OSError, match="disk full"):
        save_model(model, tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("tied", [False, True])
def test_a_bias_on_the_head_starts_at_zero_and_is_stored(tmp_path, tied):
    with_bias, ids = small(head_bias=True, tie_embeddings=tied), text(2, 5)
    assert not bool(with_bias.head.bias.any())
    bias = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(0))
    before = with_bias(ids).logits
    with_bias.head.bias.data.copy_(bias)
    torch.testing.assert_close(with_bias(ids).logits, before + bias)
    save_model(with_bias, tmp_path)
    assert torch.equal(load_model(tmp_path).head.bias, bias)


def test_wrong_tokens_are_refused_with_a_way_out():
    model = small("attention + kla")
    for call, message in (
        (lambda: model(text(1, 5)[0]), r"must be \[B, T\], got \[5\].*unsqueeze\(0\)"),
        (lambda: model.generate(text(1, 5)[0], max_new_tokens=2), r"unsqueeze\(0\)"),
        (lambda: model(text(1, 5) + VOCABULARY), "outside the vocabulary of 37 tokens"),
        (lambda: model(text(1, 5) - VOCABULARY), "outside the vocabulary of 37 tokens"),
        (lambda: model.loss(text(1, 5) - 100, text(1, 5)), "outside the vocabulary"),
        (lambda: model(text(1, 5).float()), "int64 or int32"),
        (lambda: model(torch.randn(1, 5, 16)), r"must be \[B, T\], got \[1, 5, 16\]"),
        (lambda: model(inputs_embeds=torch.randn(1, 5, 8)), "8 wide, but"),
        (lambda: model(text(2, 5), mask=torch.ones(2, 4, dtype=torch.bool)), "mask is bool"),
        (lambda: model.step(text(2, 5), model.init_states(2)), r"one token per row, \[B\]"),
        (lambda: model.step(text(2, 1)[:, 0], None), "needs states"),
        (lambda: model.read(text(2, 1)[:, 0]), "needs states"),
        (lambda: model.loss(text(1, 5), text(1, 5), kind="median"), "'mean' or 'marginal'"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
