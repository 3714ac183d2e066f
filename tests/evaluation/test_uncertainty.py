"""Tables and maps are views of what the model computes."""

import math

import pytest
import torch

from kalman_attention.evaluation.uncertainty import attention_maps, format_table, token_table
from kalman_attention.filtering.identities import attention_form
from kalman_attention.filtering.moment import KLAState
from tests.models.small import FILTERS, small, text


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


@pytest.mark.parametrize("options", FILTERS, ids=str)
@pytest.mark.parametrize("block", [0, -1])
def test_attention_maps_give_the_read_out(block, options):
    model, ids = small("kla*2", kla=options), text(2, 6)
    maps = attention_maps(model, ids, block=block, channels=[3, 7])
    x = model.embedding(ids)
    if block == -1:
        x = model.blocks[0](x).y
    layer, readout = model.blocks[block].mixer, model.blocks[block](x, hold=True).readout
    v = readout.evidence.v[..., [3, 7]]
    y = torch.einsum("bcts,bsc->btc", maps, v)
    silent = readout.evidence._replace(v=torch.zeros_like(readout.evidence.v))
    initial = layer._scan(silent, None, None, None, False).y[..., [3, 7]]  # of the first belief
    torch.testing.assert_close(y + initial, readout.mean[..., [3, 7]], rtol=1e-4, atol=1e-5)
    assert torch.equal(maps, maps.tril())


def test_attention_maps_are_those_of_the_paper():
    model, ids = small("kla", kla={"prior": "learned"}), text(2, 7)
    layer, readout = model.blocks[0].mixer, model.blocks[0](model.embedding(ids), hold=True).readout
    q, k, _, lam_v = (x.double() for x in readout.evidence[:4])
    a_bar, p_bar, first = layer.prior(2)
    first = KLAState(*(z.double() for z in first))
    form = attention_form(q, k, lam_v, a_bar.double(), p_bar.double(), first)
    maps = attention_maps(model, ids, block=0, channels=range(16))
    torch.testing.assert_close(maps.double(), form.attn_seq, rtol=1e-4, atol=1e-6)


def test_attention_blocks_have_no_map():
    with pytest.raises(ValueError, match="no Kalman attention map"):
        attention_maps(small("attention + kla"), text(1, 3), block=0, channels=[0])
