"""Options of a KLA language model under HuggingFace's names, flat, as stored in ``config.json``."""

import math
import sys
from pathlib import Path
from typing import Any, ClassVar, Literal

from transformers import PreTrainedConfig

from kalman_attention._reading import read_json
from kalman_attention.models.config import LanguageModelConfig
from kalman_attention.models.mixers import MIXERS
from kalman_attention.models.plan import parse_plan
from kalman_attention.models.presets import preset

_DEFAULT_MIXERS = {"linear_attention": "kla", "full_attention": "attention"}
"""The default mixer of each layer type of transformers."""

ADAPTED = ("in_proj", "evidence_proj", "qkv_proj", "out_proj")
"""Default targets of low-rank adapters: every matrix of a block."""

_MODEL = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "mlp": "mlp",
    "mlp_width": "intermediate_size",
    "between_blocks": "between_blocks",
    "tie_embeddings": "tie_word_embeddings",
    "logit_softcap": "final_logit_softcapping",
    "norm_eps": "rms_norm_eps",
    "embedding_std": "initializer_range",
    "head_std": "head_initializer_range",
    "head_bias": "head_bias",
    "depth_scaled_start": "depth_scaled_start",
}
_KLA = {
    "d_state": "state_size",
    "d_inner": "inner_size",
    "shared_slots": "shared_slots",
    "num_reflections": "num_reflections",
    "frequencies": "frequencies",
    "conv_kernel": "conv_kernel",
    "value": "value",
    "precision_rank": "precision_rank",
    "precision_link": "precision_link",
    "precision_floor": "precision_floor",
    "initial_precision": "initial_precision",
    "evidence_bias": "evidence_bias",
    "qk_norm": "qk_norm",
    "process_noise": "process_noise",
    "discretisation": "discretisation",
    "prior": "prior",
    "initial_mean": "initial_mean",
    "diffusion": "diffusion",
    "decay_rate": "decay_rate",
    "step_rank": "time_step_rank",
    "dt_min": "time_step_min",
    "dt_max": "time_step_max",
    "readout_norm": "readout_norm",
    "gate_bias": "gate_bias",
    "skip": "skip",
    "engine": "engine",
}
_ATTENTION = {
    "num_heads": "num_attention_heads",
    "qk_norm": "attention_qk_norm",
    "rotary_base": "rope_theta",
}
"""Native name to HuggingFace name, for each of the three native configurations."""


class KLAHFConfig(PreTrainedConfig):
    """Options of a KLA language model; the defaults are those of the preset ``kla-45m``.

    Attributes:
        vocab_size: number of tokens.
        hidden_size: width of the residual stream (native: d_model).
        num_hidden_layers: number of blocks; None means the length of ``layer_types``, or 12.
        layer_types: the mixer of every block, ``"linear_attention"`` (KLA) or
            ``"full_attention"``; also a pattern such as ``"attention*11 + kla"``. None means KLA
            everywhere. Stored as a list of transformers' types.
        layer_mixers: the same under the native names, ``"kla"``, ``"attention"``, ``"mamba"`` ...;
            derived from ``layer_types`` where possible.
        mixer_options: options of mixers other than KLA and attention, by name, such as
            ``{"mamba": {"d_state": 8}}``; omitted ones have their defaults.
        mlp: channel mixer after each mixer: ``"none"``, ``"swiglu"`` or ``"relu2"``.
        intermediate_size: hidden width of the MLP; None for the usual multiple of hidden_size.
        between_blocks: what a KLA block passes on, its posterior ``"mean"`` or a ``"sample"``.
        tie_word_embeddings: one matrix for embedding and head.
        final_logit_softcapping: bound logits smoothly to plus or minus this value; None for no
            bound.
        rms_norm_eps: added to the mean square in the norms.
        initializer_range: standard deviation of the initial embeddings. Mixers are initialised as
            in the native model.
        head_initializer_range: standard deviation of the initial head; None for the default of
            ``nn.Linear``.
        head_bias: add a learned bias, initially 0, to the logits.
        depth_scaled_start: divide the initial weights of the matrices that write into the residual
            stream by the square root of their number.
        state_size: memory slots per channel (native: d_state).
        inner_size: channels of the filter; None means hidden_size.
        shared_slots: number of neighbouring slots that share decay, noise and variance.
        num_reflections: number of reflections by which tokens rotate such a block; 0 for no
            rotation.
        frequencies: lowest and highest angular velocity of blocks that rotate with time, or None.
        conv_kernel: taps of the causal convolution; None for no convolution.
        value: ``"stream"`` or ``"project"``; this and the options down to ``engine`` are those of
            ``kalman_attention.KLAConfig``.
        precision_rank: as there.
        precision_link: as there.
        precision_floor: as there.
        initial_precision: as there.
        evidence_bias: as there.
        qk_norm: as there.
        process_noise: as there.
        discretisation: as there.
        prior: as there.
        initial_mean: as there.
        diffusion: as there.
        decay_rate: as there.
        time_step_rank: as there (native: step_rank).
        time_step_min: smallest initial step size (native: dt_min).
        time_step_max: largest initial step size (native: dt_max).
        readout_norm: as there.
        gate_bias: as there.
        skip: as there.
        engine: implementation of the scan, a name listed by ``kla check``; None means ``"auto"``.
        num_attention_heads: heads of attention blocks; None means heads of 64 channels.
        attention_qk_norm: divide their queries and keys by their root mean square.
        rope_theta: longest wavelength of their rotary positions, in tokens over 2 pi; None for no
            positions.
        loss: the loss of ``labels``: ``"mean"``, cross-entropy of the posterior mean, or
            ``"marginal"``, the negative log marginal likelihood (KLA+).
        loss_samples: number of posterior samples for the marginal likelihood.
        use_cache: return a cache from ``forward`` (not while training).
        pad_token_id: padding token.
        bos_token_id: start-of-text token.
        eos_token_id: end-of-text token.
    """

    model_type = "kla"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "variances", "readout"]

    vocab_size: int = 32_768
    hidden_size: int = 496
    num_hidden_layers: int | None = None
    layer_types: list[str] | str | None = None
    layer_mixers: list[str] | None = None
    mixer_options: dict[str, Any] | None = None
    mlp: Literal["none", "swiglu", "relu2"] = "none"
    intermediate_size: int | None = None
    between_blocks: Literal["mean", "sample"] = "mean"
    tie_word_embeddings: bool = False
    final_logit_softcapping: float | None = None
    rms_norm_eps: float = 1e-5
    initializer_range: float = 1.0
    head_initializer_range: float | None = 0.001
    head_bias: bool = False
    depth_scaled_start: bool = True
    state_size: int = 32
    inner_size: int | None = None
    shared_slots: int = 1
    num_reflections: int = 0
    frequencies: list[float] | None = None
    conv_kernel: int | None = 4
    value: Literal["stream", "project"] = "stream"
    precision_rank: int | None = None
    precision_link: Literal["inverse_softplus", "softplus", "exp"] = "inverse_softplus"
    precision_floor: float = 1e-4
    initial_precision: float | None = None
    evidence_bias: bool = False
    qk_norm: bool = True
    process_noise: Literal["learned", "fixed", "zero"] = "learned"
    discretisation: Literal["ou", "zoh", "none"] = "ou"
    prior: Literal["unit", "stationary", "learned"] = "unit"
    initial_mean: float = 0.0
    diffusion: float = math.sqrt(2.0)
    decay_rate: float | list[float] = 1.0
    time_step_rank: int | None = None
    time_step_min: float = 1e-3
    time_step_max: float = 1e-2
    readout_norm: bool = False
    gate_bias: float | None = None
    skip: float | None = 1.0
    engine: str | None = None
    num_attention_heads: int | None = None
    attention_qk_norm: bool = True
    rope_theta: float | None = 10_000.0
    loss: Literal["mean", "marginal"] = "mean"
    loss_samples: int = 10
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self._settle_layers()
        super().__post_init__(**kwargs)
        self.to_native()  # checks the values
        if self.loss not in ("mean", "marginal"):
            raise ValueError(f"loss must be 'mean' or 'marginal', got {self.loss!r}.")
        if self.loss == "marginal" and self.mixers[-1] != "kla":
            raise ValueError(
                f"loss='marginal' samples the posterior of the last block, whose mixer is "
                f"{self.mixers[-1]} here. End the plan with KLA, as in 'attention*11 + kla'."
            )

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Does nothing: every saved model names its classes."""

    @classmethod
    def from_native(cls, native: LanguageModelConfig | str, **options: Any) -> "KLAHFConfig":
        """The same model as a HuggingFace configuration.

        Args:
            native: a native configuration, or the name of a preset such as ``"kla-45m"``.
            **options: fields that only exist here, such as ``loss`` or ``eos_token_id``.
        """
        native = preset(native) if isinstance(native, str) else native
        if native.encoder_width is not None or native.decoder_widths is not None:
            raise ValueError(
                "encoder_width and decoder_widths are not supported in a transformers model: these "
                "MLPs around the blocks are for synthetic tasks. Store the model with save_model."
            )
        found: dict[str, Any] = {"layer_mixers": list(native.layers)}
        others = [name for name in dict.fromkeys(native.layers) if name not in _PARTS]
        if others:
            found["mixer_options"] = {name: _plain(native.mixer_options(name)) for name in others}
        attention = native.mixer_options("attention") if "attention" in native.layers else None
        for names, part in (
            (_MODEL, native),
            (_KLA, native.mixer_options("kla")),
            (_ATTENTION, attention),
        ):
            found |= {there: getattr(part, here) for here, there in names.items() if part}
        for name in ("decay_rate", "frequencies"):
            if isinstance(found[name], tuple):
                found[name] = list(found[name])
        return cls(**{**found, **options})

    def to_dict(self) -> dict[str, Any]:
        """As in transformers. PEFT asks for it before it looks up where to put adapters."""
        _tell_peft()
        return super().to_dict()  # type: ignore[no-any-return]

    @property
    def mixers(self) -> tuple[str, ...]:
        """The mixer of every block by its native name, such as ``"kla"``."""
        return tuple(self.layer_mixers or ())

    def to_native(self) -> LanguageModelConfig:
        """The configuration of the native model, without loss and token ids."""
        given = self.mixer_options or {}
        if set(given) & set(_PARTS):
            raise ValueError(
                "mixer_options is for mixers other than kla and attention, whose options are "
                "fields of this configuration, such as state_size and num_attention_heads."
            )
        parts = {name: self._read(_PARTS[name]) for name in ("kla", "attention")}
        used = {name: parts[name] if name in parts else given.get(name, {}) for name in self.mixers}
        width = {"d_model": self.hidden_size}
        data = {name: {**width, **options} for name, options in {**given, **used}.items()}
        model = self._read(_PARTS["model"])
        return LanguageModelConfig.from_dict({"plan": self.mixers, **model, **data})

    def _read(self, names: dict[str, str]) -> dict[str, Any]:
        found = {here: getattr(self, there) for here, there in names.items()}
        return {k: tuple(v) if isinstance(v, list) else v for k, v in found.items()}

    def _settle_layers(self) -> None:
        """Make ``layer_types``, ``layer_mixers`` and ``num_hidden_layers`` agree."""
        given: Any = self.layer_mixers or self.layer_types
        if given is None:
            given = ["kla"] * (12 if self.num_hidden_layers is None else self.num_hidden_layers)
        words = parse_plan(given if isinstance(given, str) else tuple(given))
        plan = [_DEFAULT_MIXERS.get(name, name) for name in words]
        unknown = sorted(set(plan) - set(MIXERS))
        if unknown or not plan:
            raise ValueError(
                f"layer_types names one mixer per block, out of {', '.join(MIXERS)} (or "
                f"{', '.join(_DEFAULT_MIXERS)}); got {', '.join(unknown) or 'no block at all'}."
            )
        types = ["full_attention" if x == "attention" else "linear_attention" for x in plan]
        if self.layer_mixers and self.layer_types not in (None, types):
            raise ValueError(
                f"layer_types is {self.layer_types} but layer_mixers is {self.layer_mixers}. "
                "Leave one of the two out."
            )
        if self.num_hidden_layers not in (None, len(plan)):
            raise ValueError(
                f"num_hidden_layers is {self.num_hidden_layers} but layer_types names "
                f"{len(plan)} blocks. Leave one of the two out."
            )
        self.layer_mixers, self.layer_types, self.num_hidden_layers = plan, types, len(plan)


def _tell_peft() -> None:
    """If PEFT is in use, register our projections for LoRA, which looks them up by model type."""
    constants: Any = sys.modules.get("peft.utils.constants")
    if constants is not None:
        known = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
        known.setdefault(KLAHFConfig.model_type, list(ADAPTED))


def _plain(options: Any) -> dict[str, Any]:
    """Options of a mixer as JSON values, without the width, which the model sets."""
    found = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(options).items()}
    del found["d_model"]
    return found


def read_config(path: Path) -> KLAHFConfig:
    """The configuration in a file of ``save_pretrained``; errors name the file."""
    data = read_json(path)
    known = {name: value for name, value in data.items() if name in KLAHFConfig.__annotations__}
    try:
        return KLAHFConfig(**known)
    except Exception as error:  # transformers has its own exceptions for wrong types
        raise ValueError(f"{path} is not a configuration of a KLA model: {error}") from error


def native_name(name: str) -> str:
    """The name that a tensor of ``KLAForCausalLM`` has in ``LanguageModel``."""
    if name.startswith("lm_head."):
        return name.removeprefix("lm_")
    return name.removeprefix("model.")


_PARTS = {"model": _MODEL, "kla": _KLA, "attention": _ATTENTION}
