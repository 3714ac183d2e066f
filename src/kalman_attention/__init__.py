"""Kalman linear attention: sequence mixing as exact Bayesian filtering.

>>> from kalman_attention import kla_scan

A name is imported when it is first used (PEP 562), so that ``kla --help`` need not wait for
torch. Importing an op or a layer registers ``torch.ops.kalman_attention``.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

if _TYPE_CHECKING:
    # baselines
    from kalman_attention.baselines.attention import Attention as Attention
    from kalman_attention.baselines.attention import AttentionConfig as AttentionConfig
    from kalman_attention.baselines.gated_deltanet import GatedDeltaNet as GatedDeltaNet
    from kalman_attention.baselines.gated_deltanet import GatedDeltaNetConfig as GatedDeltaNetConfig
    from kalman_attention.baselines.gla import GLA as GLA
    from kalman_attention.baselines.gla import GLAConfig as GLAConfig
    from kalman_attention.baselines.lstm import LSTM as LSTM
    from kalman_attention.baselines.lstm import LSTMConfig as LSTMConfig
    from kalman_attention.baselines.mamba import Mamba as Mamba
    from kalman_attention.baselines.mamba import MambaConfig as MambaConfig
    from kalman_attention.baselines.mlstm import MLSTM as MLSTM
    from kalman_attention.baselines.mlstm import MLSTMConfig as MLSTMConfig

    # filtering
    from kalman_attention.filtering.moment import KLAState as KLAState
    from kalman_attention.filtering.ou import discretise as discretise

    # losses
    from kalman_attention.losses import marginal_nll as marginal_nll
    from kalman_attention.losses import (
        posterior_mean_cross_entropy as posterior_mean_cross_entropy,
    )

    # models
    from kalman_attention.models.config import LanguageModelConfig as LanguageModelConfig
    from kalman_attention.models.language_model import LanguageModel as LanguageModel
    from kalman_attention.models.mixers import register_mixer as register_mixer
    from kalman_attention.models.output import ModelOutput as ModelOutput
    from kalman_attention.models.presets import preset as preset
    from kalman_attention.models.series import SeriesModel as SeriesModel
    from kalman_attention.models.series_config import SeriesConfig as SeriesConfig
    from kalman_attention.models.storage import load_model as load_model
    from kalman_attention.models.storage import load_series_model as load_series_model
    from kalman_attention.models.storage import save_model as save_model

    # nn
    from kalman_attention.nn.config import KLAConfig as KLAConfig
    from kalman_attention.nn.kla import KLA as KLA
    from kalman_attention.nn.kla import LayerState as LayerState
    from kalman_attention.nn.mixer import LayerOutput as LayerOutput
    from kalman_attention.nn.mixer import Mixer as Mixer
    from kalman_attention.nn.readout import Readout as Readout

    # ops
    from kalman_attention.ops.checks import value_checks as value_checks
    from kalman_attention.ops.contract import ScanOutput as ScanOutput
    from kalman_attention.ops.engines import use_engine as use_engine
    from kalman_attention.ops.kla_scan import kla_scan as kla_scan
    from kalman_attention.ops.kla_scan import kla_step as kla_step
    from kalman_attention.ops.linear_scan import LinearScanOutput as LinearScanOutput
    from kalman_attention.ops.linear_scan import linear_scan as linear_scan
    from kalman_attention.ops.linear_scan import linear_scan_ref as linear_scan_ref
    from kalman_attention.ops.reference import kla_scan_ref as kla_scan_ref
    from kalman_attention.ops.reference import kla_step_ref as kla_step_ref
    from kalman_attention.ops.smooth import Innovations as Innovations
    from kalman_attention.ops.smooth import kla_innovations as kla_innovations
    from kalman_attention.ops.smooth import kla_smooth as kla_smooth

__version__ = "0.1.0"

# The same names for the interpreter: module by name. A test compares the two lists.
_HOMES = {
    "Attention": "baselines.attention",
    "AttentionConfig": "baselines.attention",
    "GatedDeltaNet": "baselines.gated_deltanet",
    "GatedDeltaNetConfig": "baselines.gated_deltanet",
    "GLA": "baselines.gla",
    "GLAConfig": "baselines.gla",
    "LSTM": "baselines.lstm",
    "LSTMConfig": "baselines.lstm",
    "Mamba": "baselines.mamba",
    "MambaConfig": "baselines.mamba",
    "MLSTM": "baselines.mlstm",
    "MLSTMConfig": "baselines.mlstm",
    "KLAState": "filtering.moment",
    "discretise": "filtering.ou",
    "marginal_nll": "losses",
    "posterior_mean_cross_entropy": "losses",
    "LanguageModelConfig": "models.config",
    "LanguageModel": "models.language_model",
    "register_mixer": "models.mixers",
    "ModelOutput": "models.output",
    "preset": "models.presets",
    "SeriesModel": "models.series",
    "SeriesConfig": "models.series_config",
    "load_model": "models.storage",
    "load_series_model": "models.storage",
    "save_model": "models.storage",
    "KLAConfig": "nn.config",
    "KLA": "nn.kla",
    "LayerState": "nn.kla",
    "LayerOutput": "nn.mixer",
    "Mixer": "nn.mixer",
    "Readout": "nn.readout",
    "value_checks": "ops.checks",
    "ScanOutput": "ops.contract",
    "use_engine": "ops.engines",
    "kla_scan": "ops.kla_scan",
    "kla_step": "ops.kla_scan",
    "LinearScanOutput": "ops.linear_scan",
    "linear_scan": "ops.linear_scan",
    "linear_scan_ref": "ops.linear_scan",
    "kla_scan_ref": "ops.reference",
    "kla_step_ref": "ops.reference",
    "Innovations": "ops.smooth",
    "kla_innovations": "ops.smooth",
    "kla_smooth": "ops.smooth",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(_import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = found  # the next access takes no detour
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
