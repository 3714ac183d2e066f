"""The mixers that a plan may name: one row each, and one optional field in the configuration.

To add one: write its options and its module behind ``nn.mixer.Mixer``, add a row here and a field
of the same name to ``LanguageModelConfig``. Models, storage, the Hugging Face adapter, ``kla
sizes`` and ``kla bench mixers`` follow.
"""

from typing import Any, NamedTuple

from kalman_attention.baselines.attention import Attention, AttentionConfig
from kalman_attention.baselines.gated_deltanet import GatedDeltaNet, GatedDeltaNetConfig
from kalman_attention.baselines.gla import GLA, GLAConfig
from kalman_attention.baselines.mamba import Mamba, MambaConfig
from kalman_attention.baselines.mlstm import MLSTM, MLSTMConfig
from kalman_attention.nn.config import KLALayerConfig
from kalman_attention.nn.kla import KLA


class MixerKind(NamedTuple):
    """A mixer: the dataclass of its options, and the module that takes them.

    Every dataclass has ``d_model``, and defaults for everything else.
    """

    config: type[Any]
    module: type[Any]


MIXERS = {
    "kla": MixerKind(KLALayerConfig, KLA),
    "attention": MixerKind(AttentionConfig, Attention),
    "mamba": MixerKind(MambaConfig, Mamba),
    "gla": MixerKind(GLAConfig, GLA),
    "gated_deltanet": MixerKind(GatedDeltaNetConfig, GatedDeltaNet),
    "mlstm": MixerKind(MLSTMConfig, MLSTM),
}
"""Mixers by the word that a plan uses."""
