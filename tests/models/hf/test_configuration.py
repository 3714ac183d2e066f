"""The configuration: the same model in other words, checked, and through JSON."""

import dataclasses

import pytest

from kalman_attention import (
    AttentionConfig,
    KLAConfig,
    LanguageModelConfig,
    MambaConfig,
    preset,
)
from kalman_attention.hf import KLAHFConfig
from kalman_attention.models.hf import configuration_kla as words
from kalman_attention.models.mixers import MIXERS
from kalman_attention.models.presets import PRESETS
from tests.models.hf.small import config


def same(one, other):
    assert one.layers == other.layers
    for name in words._MODEL:
        assert getattr(one, name) == getattr(other, name), name
    for name in one.layers:
        assert one.mixer_options(name) == other.mixer_options(name)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_the_translation(name):
    same(KLAHFConfig.from_native(name).to_native(), preset(name))


def test_defaults_are_a_preset():
    same(KLAHFConfig().to_native(), preset("kla-45m"))


@pytest.mark.parametrize(
    ("native", "table", "elsewhere"),
    [
        (
            LanguageModelConfig,
            words._MODEL,
            {"plan", *MIXERS, "others", "encoder_width", "decoder_widths"},
        ),
        (KLAConfig, words._KLA, {"d_model", "smooth"}),  # no language model may smooth
        (AttentionConfig, words._ATTENTION, {"d_model"}),
    ],
)
def test_every_native_option_has_a_word_here(native, table, elsewhere):
    assert {field.name for field in dataclasses.fields(native)} == set(table) | elsewhere


def test_all_options_through_json(tmp_path):
    options = {
        "d_state": 3,
        "d_inner": 12,
        "decay_rate": (0.5, 2.0),
        "precision_rank": 2,
        "prior": "learned",
        "skip": None,
    }
    native = LanguageModelConfig(
        vocab_size=11,
        d_model=8,
        plan="attention + kla*2",
        kla=KLAConfig(d_model=8, **options),
        attention=AttentionConfig(d_model=8, num_heads=2, qk_norm=False),
        mlp="swiglu",
        logit_softcap=15.0,
        tie_embeddings=True,
    )
    KLAHFConfig.from_native(native, loss="marginal", eos_token_id=3).save_pretrained(tmp_path)
    found = KLAHFConfig.from_pretrained(tmp_path)
    same(found.to_native(), native)
    assert (found.loss, found.eos_token_id) == ("marginal", 3)


def test_layer_types():
    assert config("attention*2 + kla").layer_types == [
        "full_attention",
        "full_attention",
        "linear_attention",
    ]
    assert config(["linear_attention", "full_attention"]).mixers == ("kla", "attention")
    assert KLAHFConfig(num_hidden_layers=3).mixers == ("kla",) * 3
    assert config("kla*5").num_hidden_layers == 5
    mixed = config("attention + mamba + kla")
    assert mixed.layer_types == ["full_attention", "linear_attention", "linear_attention"]
    assert mixed.mixers == ("attention", "mamba", "kla")


def test_other_mixers_through_json(tmp_path):
    native = LanguageModelConfig(
        vocab_size=11,
        d_model=8,
        plan="mamba + attention + kla",
        mamba=MambaConfig(d_model=8, d_state=3, expand=1),
        attention=AttentionConfig(d_model=8, num_heads=2, rotary_base=None),
    )
    KLAHFConfig.from_native(native).save_pretrained(tmp_path)
    found = KLAHFConfig.from_pretrained(tmp_path)
    same(found.to_native(), native)
    assert found.mixer_options["mamba"]["d_state"] == 3
    # What is left out has its default, and options of mixers outside the plan are kept.
    short = config("kla", mixer_options={"mamba": {"d_state": 3}}).to_native()
    assert short.mamba == MambaConfig(d_model=16, d_state=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plan": "rnn*2"}, "one mixer per block"),
        ({"plan": "kla*2", "num_hidden_layers": 3}, "Leave one of the two out"),
        ({"plan": "kla + attention", "loss": "marginal"}, "End the plan with KLA"),
        ({"plan": "kla + mamba", "loss": "marginal"}, "whose mixer is mamba here"),
        (
            {"plan": "mamba", "mixer_options": {"mamba": {"slots": 3}}},
            r"unknown fields: mamba\.slots",
        ),
        ({"plan": "mamba", "mixer_options": {"rnn": {}}}, "unknown fields: rnn"),
        ({"mixer_options": {"kla": {"d_state": 3}}}, "such as state_size"),
        ({"layer_mixers": ["mamba"]}, "Leave one of the two out"),
        ({"loss": "other"}, "'mean' or 'marginal'"),
        ({"state_size": 0}, "d_state must be at least 1"),
        ({"prior": "flat"}, r"kla\.prior in .* must be one of"),
        ({"plan": "attention", "num_attention_heads": 3}, "Choose another num_heads"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        config(**options)
