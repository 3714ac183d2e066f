"""Mixers of other people: named in a plan, stored and generating like ours."""

import json
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from kalman_attention import (
    KLA,
    LanguageModel,
    LanguageModelConfig,
    LayerOutput,
    Mixer,
    load_model,
    register_mixer,
    save_model,
)
from kalman_attention.models.mixers import MIXERS


@dataclass(frozen=True, kw_only=True)
class MeanConfig:
    d_model: int
    scale: float = 1.0


class MeanState(NamedTuple):
    total: Tensor
    count: Tensor


class RunningMean(Mixer):
    """The mean of all tokens so far, projected."""

    options = MeanConfig

    def __init__(self, config=None, **fields):
        super().__init__(config, **fields)
        self.out_proj = nn.Linear(self.config.d_model, self.config.d_model)

    def init_state(self, batch_size, *, capacity=0, like=None):
        like = self._like(like)
        return MeanState(
            like.new_zeros(batch_size, self.config.d_model), like.new_zeros(batch_size, 1)
        )

    def mix(self, x, state=None, mask=None, cu_seqlens=None, *, return_variance=False):
        self._check(x, mask, cu_seqlens)
        state = self.init_state(len(x), like=x) if state is None else state
        seen = torch.ones(x.shape[:2]) if mask is None else mask.float()
        x = x * seen.unsqueeze(-1)
        total = state.total.unsqueeze(1) + x.cumsum(1)
        count = state.count.unsqueeze(1) + seen.cumsum(1).unsqueeze(-1)
        y = self.out_proj(self.config.scale * total / count.clamp(min=1))
        last = MeanState(total[:, -1], count[:, -1]) if x.shape[1] else state
        return LayerOutput(y * seen.unsqueeze(-1), None, last)

    def step(self, x, state, *, mask=None, return_variance=False):
        found = self.mix(x.unsqueeze(1), state, None if mask is None else mask.unsqueeze(1))
        return LayerOutput(found.y.squeeze(1), None, found.state)


@pytest.fixture
def mean():
    register_mixer("running_mean", RunningMean)
    yield
    del MIXERS["running_mean"]


@pytest.mark.usefixtures("mean")
def test_a_plan_names_it(tmp_path):
    register_mixer("running_mean", RunningMean)  # again is fine
    torch.manual_seed(0)
    config = LanguageModelConfig(
        vocab_size=11,
        d_model=8,
        plan="running_mean + kla",
        others={"running_mean": MeanConfig(d_model=8, scale=2.0)},
    )
    assert LanguageModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    model, ids = LanguageModel(config).eval(), torch.randint(11, (2, 6))
    assert model.blocks[0].mixer.config.scale == 2.0
    whole = model(ids)
    first = model(ids[:, :4])
    torch.testing.assert_close(
        model(ids[:, 4:], states=first.states).logits, whole.logits[:, 4:], rtol=1e-5, atol=1e-6
    )
    tokens = model.generate(ids, max_new_tokens=3).tokens
    save_model(model, tmp_path)
    assert torch.equal(load_model(tmp_path).generate(ids, max_new_tokens=3).tokens, tokens)
    plain = LanguageModel(vocab_size=11, d_model=8, plan="running_mean*2")
    assert plain.blocks[1].mixer.config.scale == 1.0
    others = {"running_mean": MeanConfig(d_model=4)}
    with pytest.raises(ValueError, match=r"running_mean.d_model is 4"):
        LanguageModel(vocab_size=11, d_model=8, plan="kla", others=others)


def test_refusals():
    for name, module, message in (
        ("my mixer", RunningMean, "by words"),
        ("mine", nn.Linear, "subclass of kalman_attention.Mixer"),
        ("kla", RunningMean, "already the name of KLA"),
        ("mine", type("Bare", (Mixer,), {}), "must be a dataclass with a field d_model"),
    ):
        with pytest.raises(ValueError, match=message):
            register_mixer(name, module)
    register_mixer("kla", KLA)
    assert "mine" not in MIXERS
