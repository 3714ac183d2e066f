"""A cache of fixed shapes and addresses: the same tokens, and one compiled graph per step."""

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig, StaticCache

from kalman_attention.nn.mixer import state_tensors
from tests.models.hf.small import PAD, padded, small, text

EVERY = "mamba + gla + gated_deltanet + mlstm + attention + kla"
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
plans = pytest.mark.parametrize("plan", ["kla*2", "attention + kla", EVERY])


@pytest.fixture
def compiled():
    """Options of ``generate`` that compile every step, on a CPU too, and refuse graph breaks."""
    torch._dynamo.reset()
    counters.clear()

    def options(backend):
        config = CompileConfig(backend=backend, fullgraph=True, dynamic=False, mode=None)
        config._compile_all_devices = True
        return {"cache_implementation": "static", "compile_config": config}

    yield options
    torch._dynamo.reset()


def tokens_of(model, rows, mask, **options):
    common = {"max_new_tokens": 5, "pad_token_id": PAD, "do_sample": False}
    return model.generate(rows, attention_mask=mask, **{**common, **options})


@plans
@pytest.mark.parametrize("beams", [1, 3])
def test_the_same_tokens(plan, beams):
    model, (_, rows, mask) = small(plan), padded((6, 3))
    found = tokens_of(model, rows, mask, num_beams=beams, cache_implementation="static")
    assert torch.equal(found, tokens_of(model, rows, mask, num_beams=beams))


@plans
def test_pieces_of_a_text(plan):
    model, (_, rows, mask) = small(plan), padded((9, 5))
    cache = StaticCache(config=model.config, max_cache_len=12)
    pieces = (slice(0, 3), slice(3, 4), slice(4, 5), slice(5, 9))
    with torch.no_grad():
        expected = model(rows, attention_mask=mask).logits
        for _ in range(2):
            parts = [
                model(rows[:, at], attention_mask=mask[:, : at.stop], past_key_values=cache).logits
                for at in pieces
            ]
            found = torch.cat(parts, 1)
            real = mask.bool()
            torch.testing.assert_close(found[real], expected[real], **CLOSE)
            assert int(cache.get_seq_length()) == 9
            cache.reset()
            assert int(cache.get_seq_length()) == 0


def test_nothing_moves():
    model, ids = small("attention + kla"), text(2, 4)
    cache = StaticCache(config=model.config, max_cache_len=8)

    def places():
        return [x.data_ptr() for layer in cache.layers for _, x in state_tensors(layer.state)]

    with torch.no_grad():
        model(ids, past_key_values=cache)
        first = places()
        model(ids[:, :1], past_key_values=cache)
        cache.reorder_cache(torch.tensor([1, 1]))
        model(ids[:, :1], past_key_values=cache)
    assert places() == first
    assert len(first) == len(set(first)) > 5


@plans
def test_one_graph_serves_every_step(plan, compiled):
    model, (_, rows, mask) = small(plan), padded((6, 3))
    found = tokens_of(model, rows, mask, **compiled("eager"))
    assert torch.equal(found, tokens_of(model, rows, mask))
    assert counters["stats"]["unique_graphs"] == 1
    # Another prompt and another mask of the same number of rows: the same graph.
    _, rows, mask = padded((2, 4))
    found = tokens_of(model, rows, mask, **compiled("eager"))
    assert torch.equal(found, tokens_of(model, rows, mask))
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.xdist_group("inductor")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("plan", ["kla*2", "attention + kla"])
def test_compiled_to_machine_code(plan, compiled):
    model, (_, rows, mask) = small(plan), padded((6, 3))
    found = tokens_of(model, rows, mask, **compiled("inductor"))
    assert torch.equal(found, tokens_of(model, rows, mask))
    assert counters["stats"]["unique_graphs"] == 1


def test_more_tokens_than_there_is_room_for():
    model = small("attention + kla")
    cache = StaticCache(config=model.config, max_cache_len=4)
    with torch.no_grad():
        model(text(1, 3), past_key_values=cache)
        with pytest.raises(ValueError, match="room for 4 tokens"):
            model(text(1, 2), past_key_values=cache)
