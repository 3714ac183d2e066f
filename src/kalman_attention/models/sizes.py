"""Sizes of mixers and models: parameters, and the memory that one sequence needs.

Sizes are counted on the real modules (without allocating them), so that tables always agree with
the code. Memory is counted in numbers, not bytes, and has three parts: the recurrent state, of a
fixed size (for KLA mean and variance); the windows of short convolutions, listed separately because
papers do not count them; and what grows with every token, the keys and values of softmax attention.
"""

from typing import Any, NamedTuple

import torch

from kalman_attention.models.config import LanguageModelConfig
from kalman_attention.models.language_model import LanguageModel
from kalman_attention.models.mixers import MIXERS
from kalman_attention.nn.mixer import Mixer, state_tensors


class MixerSize(NamedTuple):
    """Sizes of one mixer.

    Attributes:
        mixer: its name in a plan.
        parameters: learned numbers.
        state: numbers of the recurrent state, per sequence.
        window: numbers in the windows of its convolutions, per sequence.
        per_token: numbers that every additional token adds, per sequence.
    """

    mixer: str
    parameters: int
    state: int
    window: int
    per_token: int


class ModelSize(NamedTuple):
    """Sizes of a language model.

    Attributes:
        parameters: learned numbers, each counted once.
        vocabulary: how many of them belong to embedding and head.
        mixers: sizes of the mixer of every block, in order.
    """

    parameters: int
    vocabulary: int
    mixers: tuple[MixerSize, ...]

    @property
    def state(self) -> int:
        """Numbers of recurrent state per sequence, all blocks together."""
        return sum(x.state for x in self.mixers)

    @property
    def window(self) -> int:
        """Numbers in convolution windows per sequence, all blocks together."""
        return sum(x.window for x in self.mixers)

    @property
    def per_token(self) -> int:
        """Numbers that every additional token adds per sequence, all blocks together."""
        return sum(x.per_token for x in self.mixers)


def mixer_size(mixer: str, options: Any) -> MixerSize:
    """Sizes of a mixer with the given options.

    Args:
        mixer: its name in a plan, such as ``"mamba"``.
        options: the dataclass of its options, such as ``MambaConfig(d_model=128)``.
    """
    with torch.device("meta"):
        return _measure(mixer, MIXERS[mixer].module(options))


def model_size(config: LanguageModelConfig) -> ModelSize:
    """Sizes of a language model, without allocating it.

    Args:
        config: options of the model.
    """
    with torch.device("meta"):
        model = LanguageModel(config)
        mixers = tuple(_measure(block.kind, block.mixer) for block in model.stack())
    tables = {id(x): x.numel() for x in (model.embedding.weight, model.head.weight)}
    return ModelSize(model.num_parameters(), sum(tables.values()), mixers)


def _measure(name: str, mixer: Mixer) -> MixerSize:
    module: Any = mixer
    state, window = _numbers(mixer.init_state(1))
    grown = sum(_numbers(mixer.init_state(1, capacity=1)))
    parameters = sum(p.numel() for p in module.parameters())
    return MixerSize(name, parameters, state, window, grown - state - window)


def _numbers(state: Any) -> tuple[int, int]:
    """Numbers in a state and, separately, in the windows of convolutions."""
    state_size = window = 0
    for field, x in state_tensors(state):
        if x.is_floating_point():
            inside = "conv" in field.split(".")
            window += x.numel() if inside else 0
            state_size += 0 if inside else x.numel()
    return state_size, window
