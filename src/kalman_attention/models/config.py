"""What defines a language model, as plain data that survives JSON."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from kalman_attention.baselines.attention import AttentionConfig
from kalman_attention.models.plan import parse_plan
from kalman_attention.nn.config import KLALayerConfig

MIXERS = ("kla", "attention")
"""The words a plan may use."""


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig:
    """A stack of pre-norm residual blocks between an embedding and a head.

    Attributes:
        vocab_size: number of tokens.
        d_model: width of the residual stream.
        plan: the mixer of every block: a tuple of names, or a pattern such as
            ``"attention*11 + kla"``; stored as a tuple.
        kla: options of the KLA mixers; None means the defaults at this width.
        attention: options of the attention mixers; likewise.
        mlp: channel mixer after each mixer: ``"none"`` (KLA's gate is one already), ``"swiglu"``
            or ``"relu2"``.
        mlp_width: hidden width of the MLP; None means 4 d_model (8/3 d_model for SwiGLU).
        between_blocks: what a KLA block passes on: its posterior ``"mean"``, or one posterior
            ``"sample"``. The last block always passes on the mean; the losses sample there.
        tie_embeddings: one matrix for embedding and head.
        logit_softcap: bound logits smoothly to plus or minus this value; None for no bound.
        norm_eps: added to the mean square in the norms.
        embedding_std: spread of the initial embeddings.
        head_std: spread of the initial head; None for ``nn.Linear``'s own start.
        head_bias: add a learned bias, 0 at the start, to the logits.
    """

    vocab_size: int
    d_model: int
    plan: str | tuple[str, ...]
    kla: KLALayerConfig | None = None
    attention: AttentionConfig | None = None
    mlp: Literal["none", "swiglu", "relu2"] = "none"
    mlp_width: int | None = None
    between_blocks: Literal["mean", "sample"] = "mean"
    tie_embeddings: bool = False
    logit_softcap: float | None = None
    norm_eps: float = 1e-5
    embedding_std: float = 0.02
    head_std: float | None = None
    head_bias: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "plan", parse_plan(self.plan))
        unknown = sorted(set(self.layers) - set(MIXERS))
        if unknown or not self.layers:
            raise ValueError(
                f"a plan names one mixer per block, out of {', '.join(MIXERS)}; got "
                f"{', '.join(unknown) or 'no block at all'}."
            )
        for name in ("kla", "attention"):
            options = getattr(self, name)
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

    @property
    def layers(self) -> tuple[str, ...]:
        """The mixer of every block, first block first."""
        return parse_plan(self.plan)

    @property
    def kla_options(self) -> KLALayerConfig:
        """Options of the KLA mixers, defaults filled in."""
        return self.kla or KLALayerConfig(d_model=self.d_model)

    @property
    def attention_options(self) -> AttentionConfig:
        """Options of the attention mixers, defaults filled in."""
        return self.attention or AttentionConfig(d_model=self.d_model)

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
    def from_dict(cls, data: dict[str, Any]) -> "LanguageModelConfig":
        """The inverse of ``to_dict``, also after a round trip through JSON."""
        data = dict(data)
        data["plan"] = tuple(data["plan"]) if isinstance(data["plan"], list) else data["plan"]
        if isinstance(data.get("kla"), dict):
            rate = data["kla"].get("decay_rate", 1.0)
            rate = tuple(rate) if isinstance(rate, list) else rate
            data["kla"] = KLALayerConfig(**{**data["kla"], "decay_rate": rate})
        if isinstance(data.get("attention"), dict):
            data["attention"] = AttentionConfig(**data["attention"])
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise ValueError(
                f"this configuration has fields unknown here: {', '.join(unknown)}. It was "
                "written by another version of the library, or is not one of a language model."
            )
        return cls(**data)


_MLPS = ("none", "swiglu", "relu2")
