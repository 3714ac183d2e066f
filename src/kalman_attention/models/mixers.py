"""The mixers that a plan may name: one row each, and one optional field in the configuration.

To add a mixer to the library, write its options and its module as a subclass of
``nn.mixer.Mixer``, add a row here and a field of the same name to ``LanguageModelConfig``. Models,
storage, the Hugging Face adapter, ``kla sizes`` and ``kla bench mixers`` then support it. Users add
their own mixers with ``register_mixer``.
"""

import dataclasses
from typing import Any, NamedTuple

from kalman_attention.baselines.attention import Attention, AttentionConfig
from kalman_attention.baselines.gated_deltanet import GatedDeltaNet, GatedDeltaNetConfig
from kalman_attention.baselines.gla import GLA, GLAConfig
from kalman_attention.baselines.lstm import LSTM, LSTMConfig
from kalman_attention.baselines.mamba import Mamba, MambaConfig
from kalman_attention.baselines.mlstm import MLSTM, MLSTMConfig
from kalman_attention.nn.config import KLAConfig
from kalman_attention.nn.kla import KLA
from kalman_attention.nn.mixer import Mixer


class MixerKind(NamedTuple):
    """A mixer: the dataclass of its options, and the module built from them.

    Every dataclass has ``d_model``, and defaults for everything else.
    """

    config: type[Any]
    module: type[Any]


MIXERS = {
    "kla": MixerKind(KLAConfig, KLA),
    "attention": MixerKind(AttentionConfig, Attention),
    "mamba": MixerKind(MambaConfig, Mamba),
    "gla": MixerKind(GLAConfig, GLA),
    "gated_deltanet": MixerKind(GatedDeltaNetConfig, GatedDeltaNet),
    "mlstm": MixerKind(MLSTMConfig, MLSTM),
    "lstm": MixerKind(LSTMConfig, LSTM),
}
"""Mixers by their name in a plan."""


def register_mixer(name: str, module: type[Mixer]) -> None:
    """Let plans name a mixer of your own, as in ``plan="attention*3 + mine"``.

    Its options go into ``LanguageModelConfig(others={"mine": MyConfig(...)})``; otherwise it uses
    its defaults. Register the mixer again before you load a stored model.

    Args:
        name: its name in a plan: letters, digits and underscores.
        module: a subclass of ``Mixer``; ``module.options`` is the dataclass of its options, which
            has ``d_model``, and defaults for everything else.
    """
    if not name.isidentifier():
        raise ValueError(f"a plan names mixers by words such as 'kla' or 'my_mixer', got {name!r}.")
    if not (isinstance(module, type) and issubclass(module, Mixer)):
        raise ValueError(f"a mixer is a subclass of kalman_attention.Mixer, got {module!r}.")
    options = getattr(module, "options", None)
    names = (
        [f.name for f in dataclasses.fields(options)] if dataclasses.is_dataclass(options) else []
    )
    if "d_model" not in names or not isinstance(options, type):
        raise ValueError(
            f"{module.__name__}.options must be a dataclass with a field d_model, got {options!r}."
        )
    known = MIXERS.get(name)
    if known is not None and known.module is not module:
        raise ValueError(
            f"{name!r} is already the name of {known.module.__name__}. Choose another name."
        )
    MIXERS[name] = MixerKind(options, module)
