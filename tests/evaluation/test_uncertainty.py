"""Tables and maps are views of what the model computes."""

import math

import pytest
import torch

from kalman_attention.evaluation.uncertainty import attention_maps, format_table, token_table
from tests.models.small import small, text


def test_token_table():
    model, ids = small("attention + kla"), text(2, 5)
    found = model.uncertainty(ids, num_samples=3)
    rows = token_table(found, ids[1].tolist(), row=1)
    assert [row.token for row in rows] == [str(t) for t in ids[1].tolist()]
    assert math.isnan(rows[0].gain[0])
    assert rows[2].gain[1] == pytest.approx(float(found.gain[1][1, 2].mean()))
    assert rows[4].epistemic == pytest.approx(float(found.epistemic[1, 4]))
    assert len(format_table(rows).splitlines()) == 6
    assert math.isnan(token_table(model.uncertainty(ids), ids[0])[0].epistemic)


@pytest.mark.parametrize("block", [0, -1])
def test_attention_maps_give_the_read_out(block):
    model, ids = small("kla*2"), text(2, 6)
    maps = attention_maps(model, ids, block=block, channels=[3, 7])
    x = model.embedding(ids)
    if block == -1:
        x = model.blocks[0](x).y
    readout = model.blocks[block](x, hold=True).readout
    v = readout.evidence.v[..., [3, 7]]
    y = torch.einsum("bcts,bsc->btc", maps, v)  # the unit prior has mean 0 and adds nothing
    torch.testing.assert_close(y, readout.mean[..., [3, 7]], rtol=1e-4, atol=1e-5)
    assert torch.equal(maps, maps.tril())


def test_attention_blocks_have_no_map():
    with pytest.raises(ValueError, match="no Kalman map"):
        attention_maps(small("attention + kla"), text(1, 3), block=0, channels=[0])


@pytest.mark.parametrize("options", [{"shared_slots": 2}, {"step_rank": 2}])
def test_other_filters_have_no_map(options):
    with pytest.raises(ValueError, match="paper's filter"):
        attention_maps(small("kla", kla=options), text(1, 3), block=0, channels=[0])
