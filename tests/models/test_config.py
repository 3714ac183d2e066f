"""Plans, configurations and presets."""

import dataclasses
import json

import pytest
import torch

from kalman_attention import (
    KLAConfig,
    LanguageModel,
    LanguageModelConfig,
    MambaConfig,
    preset,
)
from kalman_attention.models.mixers import MIXERS
from kalman_attention.models.plan import format_plan, parse_plan
from kalman_attention.models.presets import PRESETS
from kalman_attention.models.sizes import model_size

COUNTS = {
    "kla-45m": 45_309_104,
    "kla-180m": 180_636_560,
    "kla-text-45m": 44_992_352,
    "kla-text-180m": 179_786_664,
    "gpt-45m": 45_229_440,
    "gpt-180m": 179_853_184,
    "mamba-45m": 44_991_852,
    "mamba-180m": 179_852_200,
    "mamba-norm-45m": 45_002_508,
    "mamba-norm-180m": 179_880_040,
    "gdn-45m": 44_832_592,
    "gdn-180m": 180_920_584,
    "gpt+kla-45m": 45_293_184,
    "gpt+kla-180m": 180_001_920,
    "gpt+mamba-45m": 45_197_952,
    "gpt+mamba-180m": 181_155_968,
    "gpt+gdn-45m": 45_386_188,
    "gpt+gdn-180m": 180_691_932,
    "kla-nano": 1_355_392,
    "kla-text-nano": 1_360_728,
    "gpt-nano": 1_355_760,
    "mamba-nano": 1_354_041,
    "mamba-norm-nano": 1_354_977,
    "gdn-nano": 1_344_140,
    "gpt+kla-nano": 1_365_392,
    "gpt+mamba-nano": 1_367_632,
    "gpt+gdn-nano": 1_370_580,
    "kla-micro": 1_998_832,
    "kla-text-micro": 2_018_224,
    "gpt-micro": 2_001_168,
    "mamba-micro": 2_021_920,
    "mamba-norm-micro": 2_023_200,
    "gdn-micro": 1_991_332,
    "gpt+kla-micro": 2_013_552,
    "gpt+mamba-micro": 2_026_800,
    "gpt+gdn-micro": 2_006_396,
}


@pytest.mark.parametrize(
    ("plan", "names"),
    [
        ("kla", ("kla",)),
        ("kla*3", ("kla",) * 3),
        ("attention*2 + kla", ("attention", "attention", "kla")),
        (" (attention+kla*2) *2+kla ", ("attention", "kla", "kla") * 2 + ("kla",)),
        (("kla", "attention"), ("kla", "attention")),
    ],
)
def test_plans(plan, names):
    assert parse_plan(plan) == names
    assert parse_plan(format_plan(names)) == names


def test_plans_are_written_shortly():
    assert format_plan(("attention",) * 11 + ("kla",)) == "attention*11 + kla"


@pytest.mark.parametrize("plan", ["", "kla +", "kla * x", "(kla", "kla kla", "3*kla", "kla)", "*2"])
def test_bad_plans(plan):
    with pytest.raises(ValueError, match=r"cannot read the plan .* Write it as in"):
        parse_plan(plan)


@pytest.mark.parametrize("name", [name for name in PRESETS if name[-2].isdigit()])
def test_presets_have_the_published_sizes(name):
    published = 45e6 if name.endswith("-45m") else 180e6
    assert count(name) == COUNTS[name]
    assert abs(count(name) / published - 1.0) < 0.01
    assert preset(name).vocab_size == 32_768
    assert len(preset(name).layers) == 12


def count(name):
    with torch.device("meta"):
        return LanguageModel(name).num_parameters()


@pytest.mark.parametrize("size", ["nano", "micro"])
def test_small_presets_are_equal_in_parameters(size):
    names = [name for name in PRESETS if name.endswith(f"-{size}")]
    counts = {name: count(name) for name in names}
    assert counts == {name: COUNTS[name] for name in names}
    assert max(counts.values()) / min(counts.values()) < 1.02
    assert {len(preset(name).layers) for name in names} == {4}
    assert preset(size) is PRESETS[f"kla-{size}"]


def test_every_size_has_every_model():
    pure = {"kla", "kla-text", "gpt", "mamba", "mamba-norm", "gdn"}
    models = pure | {"gpt+kla", "gpt+mamba", "gpt+gdn"}
    sizes = {"nano", "micro", "45m", "180m"}
    assert set(PRESETS) == {f"{model}-{size}" for model in models for size in sizes}


def test_memory_of_the_blocks_is_close_to_that_of_kla():
    for size in ("nano", "micro", "45m", "180m"):
        ours = model_size(preset(f"kla-{size}")).mixers[0].state
        for name in ("mamba", "gdn"):
            theirs = model_size(preset(f"{name}-{size}")).mixers[0].state
            assert abs(theirs / ours - 1.0) < 0.15


def test_which_form_of_the_layer_meets_the_published_sizes():
    # Only a value from the stream with a full-width precision comes within 1 % at both sizes.
    def worst(**options):
        misses = []
        for name, d_model, published in (("kla-45m", 496, 45e6), ("kla-180m", 1360, 180e6)):
            kla = KLAConfig(d_model=d_model, d_state=32, **options)
            with torch.device("meta"):
                model = LanguageModel(dataclasses.replace(preset(name), kla=kla))
            misses.append(abs(model.num_parameters() / published - 1.0))
        return max(misses)

    assert worst() < 0.01
    assert worst(value="project") > 0.1
    assert worst(precision_rank=170) > 0.05
    assert worst(value="project", precision_rank=170) > 0.02


def test_hybrid_replaces_only_the_last_attention():
    assert preset("gpt+kla-45m").layers == ("attention",) * 11 + ("kla",)


@pytest.mark.parametrize(
    "config",
    [
        *PRESETS.values(),
        LanguageModelConfig(vocab_size=9, d_model=8, plan="kla"),
        LanguageModelConfig(
            vocab_size=9,
            d_model=8,
            plan="(kla + attention)*2",
            kla=KLAConfig(d_model=8, decay_rate=(1.0, 4.0)),
            logit_softcap=15.0,
        ),
        LanguageModelConfig(
            vocab_size=9, d_model=8, plan="mamba", mamba=MambaConfig(d_model=8, expand=1)
        ),
    ],
)
def test_json_round_trip(config):
    assert LanguageModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plan": "rnn*2"}, "out of kla, attention, mamba.*; got rnn"),
        ({"plan": ()}, "no block at all"),
        ({"mlp": "gelu"}, "must be one of none, swiglu, relu2"),
        ({"kla": KLAConfig(d_model=4)}, "width of the residual stream"),
        ({"mamba": MambaConfig(d_model=4)}, "mamba.d_model is 4 but"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        LanguageModelConfig(**{"vocab_size": 9, "d_model": 8, "plan": "kla", **options})


def test_unknown_names():
    with pytest.raises(ValueError, match="unknown preset"):
        preset("kla-1b")
    data = {**LanguageModelConfig(vocab_size=9, d_model=8, plan="kla").to_dict(), "heads": 3}
    with pytest.raises(ValueError, match="unknown fields: heads"):
        LanguageModelConfig.from_dict(data)
    data = {"vocab_size": 9, "d_model": 8, "plan": "mamba", "mamba": {"d_model": 8, "slots": 2}}
    with pytest.raises(ValueError, match=r"unknown fields: mamba\.slots"):
        LanguageModelConfig.from_dict(data)


def test_every_mixer_has_a_field_and_fits_the_protocol():
    fields = {field.name for field in dataclasses.fields(LanguageModelConfig)}
    for name, kind in MIXERS.items():
        assert name in fields
        assert isinstance(kind.module(kind.config(d_model=64)).out_proj, torch.nn.Linear), name
        model = LanguageModel(LanguageModelConfig(vocab_size=9, d_model=64, plan=name))
        assert type(model.blocks[0].mixer) is kind.module
        if name != "kla":
            with pytest.raises(ValueError, match=f"its mixer is {name}"):
                model.read(torch.zeros(1, 2, dtype=torch.int64))
