"""What every mixer has: one interface, errors that say what to do, states of one form."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from kalman_attention import KLA, AttentionConfig, KLAConfig, LanguageModel, LanguageModelConfig
from kalman_attention.models.mixers import MIXERS
from kalman_attention.nn.mixer import LayerOutput, map_state, state_tensors

every_mixer = pytest.mark.parametrize("name", MIXERS)
WIDTH = 16


def make(name):
    torch.manual_seed(0)
    return MIXERS[name].module(d_model=WIDTH)


@every_mixer
def test_a_layer_is_a_drop_in(name):
    layer, x = make(name), torch.randn(2, 7, WIDTH)
    found = layer.mix(x, return_variance=True)
    assert isinstance(found, LayerOutput)
    assert (found.variance is None) == (name != "kla")
    assert torch.equal(layer(x), found.y)
    assert torch.equal(nn.Sequential(nn.Identity(), layer)(x), found.y)
    mask = torch.tensor([[True] * 7, [False, False] + [True] * 5])
    assert torch.equal(layer(x, mask), layer.mix(x, None, mask).y)
    borders = torch.tensor([0, 3, 7])
    assert torch.equal(layer(x[:1], cu_seqlens=borders), layer.mix(x[:1], cu_seqlens=borders).y)


@every_mixer
def test_options_by_name(name):
    kind = MIXERS[name]
    assert make(name).config == kind.config(d_model=WIDTH)
    assert kind.module(kind.config(d_model=WIDTH)).config == kind.config(d_model=WIDTH)
    assert kind.module.options is kind.config


@every_mixer
def test_wrong_input_is_refused_with_a_way_out(name):
    layer = make(name)
    for bad, message in (
        (torch.randn(7, WIDTH), r"unsqueeze\(0\)"),
        (torch.randn(2, 7, 5), "5 wide, but this .* was built with d_model = 16"),
        (torch.zeros(2, 7, dtype=torch.int64), "floating-point"),
        ([1.0], "floating-point"),
    ):
        with pytest.raises(ValueError, match=message):
            layer(bad)
    with pytest.raises(ValueError, match="sequences go to mix"):
        layer.step(torch.randn(2, 7, WIDTH), layer.init_state(2))
    with pytest.raises(ValueError, match=r"mask is bool .*True for real tokens"):
        layer(torch.randn(2, 7, WIDTH), torch.ones(2, 6, dtype=torch.bool))
    mask = torch.ones(1, 7, dtype=torch.bool)
    with pytest.raises(ValueError, match="mutually exclusive"):
        layer(torch.randn(1, 7, WIDTH), mask, torch.tensor([0, 7]))


def test_wrong_options_are_refused_with_a_way_out():
    for given, fields, message in (
        (64, {}, r"takes one KLAConfig, or its fields by name as in KLA\(d_model=64\); got 64"),
        (AttentionConfig(d_model=8), {}, "takes one KLAConfig"),
        (KLAConfig(d_model=8), {"d_state": 3}, "got both KLAConfig and d_state"),
        (None, {}, "KLA needs d_model"),
        (None, {"d_model": 8, "heads": 3}, "no option heads. It has: d_model, d_state"),
    ):
        with pytest.raises(ValueError, match=message):
            KLA(given, **fields)
    with pytest.raises(ValueError, match="LanguageModel needs vocab_size, d_model, plan"):
        LanguageModel()
    by_name = LanguageModel(vocab_size=9, d_model=8, plan="kla")
    assert by_name.config == LanguageModelConfig(vocab_size=9, d_model=8, plan="kla")


@every_mixer
def test_states_are_like_the_tokens(name):
    layer = make(name).bfloat16()
    state = layer.init_state(2, capacity=3, like=torch.zeros(1, dtype=torch.float64))
    conv = [x.dtype for field, x in state_tensors(state) if field == "conv"]
    assert set(conv) <= {torch.float64}
    for field, x in state_tensors(layer.init_state(2)):
        short = field in ("conv", "keys", "values")
        if x.is_floating_point():
            assert x.dtype == (torch.bfloat16 if short else torch.float32), field


@every_mixer
def test_parameters_are_used_only_inside_the_modules_that_hold_them(name):
    # As weights that rest on a disk need it: they are there while their module runs, only then.
    layer, x = make(name), torch.randn(2, 5, WIDTH)
    expected = layer.mix(x)
    step = layer.step(x[:, 0], expected.state).y
    inside = [m for m in layer.modules() if any(True for _ in m.parameters(recurse=False))]
    for module in inside:
        kept = dict(module.named_parameters(recurse=False))

        def fetch(module, _args, kept=kept):
            for key, value in kept.items():
                module._parameters[key] = value

        def drop(module, _args, _output, kept=kept):
            for key in kept:
                module._parameters[key] = nn.Parameter(kept[key].detach().to("meta"), False)

        module.register_forward_pre_hook(fetch)
        module.register_forward_hook(drop)
        drop(module, None, None)
    found = layer.mix(x)
    torch.testing.assert_close(found.y, expected.y)
    torch.testing.assert_close(layer.step(x[:, 0], found.state).y, step)


class Inner(NamedTuple):
    mean: torch.Tensor
    note: Any


class Outer(NamedTuple):
    conv: torch.Tensor
    inner: Inner
    length: int


def test_states_are_walked():
    state = Outer(torch.zeros(3, 2), Inner(torch.ones(3), None), 7)
    assert [(name, tuple(x.shape)) for name, x in state_tensors(state)] == [
        ("conv", (3, 2)),
        ("inner.mean", (3,)),
    ]
    found = map_state(lambda x: x[:2], state)
    assert isinstance(found, Outer)
    assert isinstance(found.inner, Inner)
    assert (found.conv.shape, found.inner.mean.shape) == ((2, 2), (2,))
    assert (found.inner.note, found.length) == (None, 7)
    assert map_state(lambda x: x, None) is None
    assert not list(state_tensors(None))
