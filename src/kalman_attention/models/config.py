"""The configuration of a language model, as plain data that can be stored as JSON."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kalman_attention._reading import from_dict
from kalman_attention.baselines.attention import AttentionConfig
from kalman_attention.baselines.gated_deltanet import GatedDeltaNetConfig
from kalman_attention.baselines.gla import GLAConfig
from kalman_attention.baselines.lstm import LSTMConfig
from kalman_attention.baselines.mamba import MambaConfig
from kalman_attention.baselines.mlstm import MLSTMConfig
from kalman_attention.models.mixers import MIXERS
from kalman_attention.models.plan import parse_plan
from kalman_attention.nn.config import KLAConfig


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig:
    """A stack of pre-norm residual blocks between an embedding and a head.

    Attributes:
        vocab_size: number of tokens.
        d_model: width of the residual stream.
        plan: the mixer of every block: a tuple of names, or a pattern such as
            ``"attention*11 + kla"``; stored as a tuple.
        kla: options of the KLA mixers; None means the defaults at this width.
        attention: options of the attention mixers, as for KLA.
        mamba: options of the Mamba mixers, as for KLA.
        gla: options of the gated linear attention mixers, as for KLA.
        gated_deltanet: options of the Gated DeltaNet mixers, as for KLA.
        mlstm: options of the mLSTM mixers, as for KLA.
        lstm: options of the LSTM mixers, as for KLA.
        others: options of mixers added by ``register_mixer``, by name, as for KLA.
        mlp: channel mixer after each mixer: ``"none"`` (KLA's gate is one already), ``"swiglu"``
            or ``"relu2"``.
        mlp_width: hidden width of the MLP; None means 4 d_model (8/3 d_model for SwiGLU).
        between_blocks: what a KLA block passes on: its posterior ``"mean"``, or one posterior
            ``"sample"``. The last block always passes on the mean; the losses sample there.
        tie_embeddings: one matrix for embedding and head.
        logit_softcap: bound logits smoothly to plus or minus this value; None for no bound.
        norm_eps: added to the mean square in the norms.
        embedding_std: standard deviation of the initial embeddings.
        head_std: standard deviation of the initial head; None for the default of ``nn.Linear``.
        head_bias: add a learned bias, initially 0, to the logits.
        depth_scaled_start: divide the initial weights of the matrices that write into the residual
            stream by the square root of their number.
        encoder_width: hidden width of an MLP between embedding and blocks; None for no MLP.
        decoder_widths: hidden widths of an MLP between blocks and head, in order; None for no MLP
            (an autoencoder then uses MAD-Lab's). See ``models/scaffold.py``.
    """

    vocab_size: int
    d_model: int
    plan: str | tuple[str, ...]
    kla: KLAConfig | None = None
    attention: AttentionConfig | None = None
    mamba: MambaConfig | None = None
    gla: GLAConfig | None = None
    gated_deltanet: GatedDeltaNetConfig | None = None
    mlstm: MLSTMConfig | None = None
    lstm: LSTMConfig | None = None
    others: dict[str, Any] | None = None
    mlp: Literal["none", "swiglu", "relu2"] = "none"
    mlp_width: int | None = None
    between_blocks: Literal["mean", "sample"] = "mean"
    tie_embeddings: bool = False
    logit_softcap: float | None = None
    norm_eps: float = 1e-5
    embedding_std: float = 0.02
    head_std: float | None = None
    head_bias: bool = False
    depth_scaled_start: bool = True
    encoder_width: int | None = None
    decoder_widths: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "plan", parse_plan(self.plan))
        unknown = sorted({*self.layers, *(self.others or ())} - set(MIXERS))
        if unknown or not self.layers:
            raise ValueError(
                f"a plan names one mixer per block, out of {', '.join(MIXERS)}; got "
                f"{', '.join(unknown) or 'no block at all'}. Add your own mixers with "
                "register_mixer."
            )
        for name in MIXERS:
            options = self._given(name)
            if options is not None and options.d_model != self.d_model:
                raise ValueError(
                    f"{name}.d_model is {options.d_model} but the model's d_model is "
                    f"{self.d_model}. A mixer works at the width of the residual stream."
                )
        for name, words in (("mlp", _MLPS), ("between_blocks", ("mean", "sample"))):
            if getattr(self, name) not in words:
                raise ValueError(
                    f"{name} must be one of {', '.join(words)}, got {getattr(self, name)!r}."
                )
        for name in ("vocab_size", "d_model", "mlp_width"):
            given = getattr(self, name)
            if given is not None and given < 1:
                raise ValueError(f"{name} must be at least 1, got {given}.")
        for name in ("norm_eps", "embedding_std", "head_std"):
            given = getattr(self, name)
            if given is not None and not 0.0 <= given < math.inf:
                raise ValueError(f"{name} must be at least 0 and finite, got {given}.")
        if self.logit_softcap is not None and not 0.0 < self.logit_softcap < math.inf:
            raise ValueError(
                f"logit_softcap must be positive and finite, or None for no bound; got "
                f"{self.logit_softcap}."
            )
        if self.kla is not None and self.kla.smooth:
            raise ValueError(
                "a language model predicts the tokens that kla.smooth=True would let it read: "
                "smoothing cannot be used here. "
                "Smoothing is for whole series: see models/series.py."
            )
        self._check_scaffold()

    def _check_scaffold(self) -> None:
        for name, widths in (
            ("encoder_width", [] if self.encoder_width is None else [self.encoder_width]),
            ("decoder_widths", list(self.decoder_widths or ())),
        ):
            if any(width < 1 for width in widths):
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.tie_embeddings and self.head_width != self.d_model:
            raise ValueError(
                f"tie_embeddings needs a head as wide as the embedding, {self.d_model}, but "
                f"decoder_widths ends with {self.head_width}. Leave one of the two out."
            )

    @property
    def head_width(self) -> int:
        """Input width of the head: d_model, or the last of ``decoder_widths``."""
        return (self.d_model, *(self.decoder_widths or ()))[-1]

    @property
    def layers(self) -> tuple[str, ...]:
        """The mixer of every block, in order."""
        return parse_plan(self.plan)

    def mixer_options(self, name: str) -> Any:
        """Options of the mixers of one kind, such as ``"kla"``, with defaults filled in."""
        return self._given(name) or MIXERS[name].config(d_model=self.d_model)

    def _given(self, name: str) -> Any:
        return getattr(self, name, None) or (self.others or {}).get(name)

    @property
    def mlp_hidden(self) -> int:
        """Hidden width of the MLP."""
        if self.mlp_width is not None:
            return self.mlp_width
        return 4 * self.d_model if self.mlp == "relu2" else 8 * self.d_model // 3

    def to_dict(self) -> dict[str, Any]:
        """As nested dictionaries of plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(
        cls, data: object, where: str = "the configuration of a language model"
    ) -> "LanguageModelConfig":
        """The inverse of ``to_dict``, also after a round trip through JSON.

        Args:
            data: nested dictionaries; names and types are checked.
            where: source of the data, such as a file, for error messages.
        """
        return from_dict(cls, _with_others(data, where), where)


def _with_others(data: object, where: str) -> object:
    """The same data, with the options of registered mixers turned into their dataclasses."""
    if not isinstance(data, Mapping):
        return data
    own = {field.name for field in dataclasses.fields(LanguageModelConfig)}
    added = {name: data[name] for name in data if name in MIXERS and name not in own}
    given = {**(data.get("others") or {}), **added}
    built = {
        name: from_dict(MIXERS[name].config, options, f"{where}, {name}")
        if name in MIXERS and isinstance(options, Mapping)
        else options
        for name, options in given.items()
    }
    rest = {name: value for name, value in data.items() if name not in added}
    return {**rest, "others": built} if built else rest


_MLPS = ("none", "swiglu", "relu2")
