"""Mamba against two public implementations, with the same weights."""

import pytest
import torch

from kalman_attention import Mamba, MambaConfig

D_MODEL, D_STATE = 32, 8


def ours(seed=0):
    torch.manual_seed(seed)
    layer = Mamba(MambaConfig(d_model=D_MODEL, d_state=D_STATE))
    with torch.no_grad():  # away from the start, where all channels decay alike
        layer.state_space.log_A.add_(0.3 * torch.randn_like(layer.state_space.log_A))
        layer.skip.weight.add_(torch.randn_like(layer.skip.weight))
    return layer


def load(theirs, layer):
    """Give a layer with the published names our weights."""
    theirs.load_state_dict(
        {
            "in_proj.weight": layer.in_proj.weight,
            "conv1d.weight": layer.conv.weight.T.unsqueeze(1),
            "conv1d.bias": layer.conv.bias,
            "x_proj.weight": layer.select_proj.weight,
            "dt_proj.weight": layer.dt_proj.weight,
            "dt_proj.bias": layer.state_space.raw_dt,
            "A_log": layer.state_space.log_A.T,
            "D": layer.skip.weight,
            "out_proj.weight": layer.out_proj.weight,
        }
    )
    return theirs


def transformers_mixer():
    transformers = pytest.importorskip("transformers")
    from transformers.models.mamba.modeling_mamba import MambaMixer

    config = transformers.MambaConfig(
        hidden_size=D_MODEL, state_size=D_STATE, num_hidden_layers=1, use_bias=False
    )
    return MambaMixer(config, layer_idx=0)


def mambapy_block():
    mambapy = pytest.importorskip("mambapy.mamba")
    return mambapy.MambaBlock(
        mambapy.MambaConfig(d_model=D_MODEL, n_layers=1, d_state=D_STATE, pscan=True)
    )


PUBLIC = {"transformers": transformers_mixer, "mambapy": mambapy_block}


@pytest.mark.filterwarnings("ignore")  # whatever others have to say when imported
@pytest.mark.parametrize("build", PUBLIC.values(), ids=PUBLIC)
@pytest.mark.parametrize("T", [1, 3, 64, 130])
def test_outputs_and_gradients(build, T, record_property):
    layer = ours()
    theirs = load(build(), layer)
    x = torch.randn(2, T, D_MODEL, requires_grad=True)
    weight = torch.randn(2, T, D_MODEL)
    found, expected = layer.mix(x).y, theirs(x)
    record_property("error", float((found - expected).abs().max()))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    one, other = (torch.autograd.grad((y * weight).sum(), x)[0] for y in (found, expected))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_decoding():
    layer = ours()
    theirs = load(transformers_mixer(), layer)
    x = torch.randn(1, 9, D_MODEL)
    with torch.no_grad():
        expected, state = theirs(x), layer.mix(x[:, :4]).state
        for t in range(4, 9):
            y, _, state = layer.step(x[:, t], state)
            torch.testing.assert_close(y, expected[:, t], rtol=1e-4, atol=1e-5)
