"""The models of the paper's synthetic tables, at equal state sizes.

``tab:model-dims`` for MAD and ``tab:mqar-model-configs`` for MQAR. Every row comes as *published*,
with the options that the table prints, and as *matched*, with options whose state has the size of
KLA's in the same table. They differ where the table's arithmetic does not close:

- mLSTM (MAD): 16 heads of 16 channels in a width of 256 make 4,096 numbers, not 2,048. Half the
  query and key width makes 2,048.
- GLA (MQAR): the printed expansions give half of the printed state, 1,024, 2,048 and 4,096. Twice
  the key width gives what is printed.
- Gated DeltaNet (MQAR): 2,304 rather than 2,048 and so on, which the paper says and explains by
  widths that must be multiples of 16 or 32. Keys and values of d_model, in heads of 32 channels,
  are such multiples and match exactly.

What is matched is the memory of the recurrence. mLSTM's normaliser and stabiliser (144 and 272
numbers in the MAD table) and the windows of the short convolutions are not counted by the paper;
``kla sizes --paper`` shows them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from kalman_attention.baselines.gated_deltanet import GatedDeltaNetConfig
from kalman_attention.baselines.gla import GLAConfig
from kalman_attention.baselines.mamba import MambaConfig
from kalman_attention.baselines.mlstm import MLSTMConfig
from kalman_attention.models.config import LanguageModelConfig
from kalman_attention.nn.config import KLAConfig

Variant = Literal["published", "matched"]


@dataclass(frozen=True, kw_only=True)
class PaperModel:
    """One row of a table.

    Attributes:
        name: of the model in the table.
        mixer: the word of its mixer in a plan.
        blocks: how many.
        printed_state: state size that the table prints, per block.
        published: options of the mixer as the table prints them.
        matched: options whose state has the size of KLA's in the same table.
    """

    name: str
    mixer: str
    blocks: int
    printed_state: int
    published: Any
    matched: Any

    def options(self, variant: Variant) -> Any:
        """Options of the mixer, published or matched."""
        return self.published if variant == "published" else self.matched

    def model(self, variant: Variant, *, vocab_size: int) -> LanguageModelConfig:
        """The stack of mixers as a language model, without an MLP.

        Args:
            variant: which options.
            vocab_size: number of tokens of the task.
        """
        chosen: dict[str, Any] = {self.mixer: self.options(variant)}
        return LanguageModelConfig(
            vocab_size=vocab_size,
            d_model=self.published.d_model,
            plan=(self.mixer,) * self.blocks,
            **chosen,
        )


def _row(
    name: str,
    mixer: str,
    blocks: int,
    printed_state: int,
    build: Callable[..., Any],
    published: dict[str, Any],
    **changed: Any,
) -> PaperModel:
    return PaperModel(
        name=name,
        mixer=mixer,
        blocks=blocks,
        printed_state=printed_state,
        published=build(**published),
        matched=build(**{**published, **changed}),
    )


def _mad() -> tuple[PaperModel, ...]:
    def row(name: str, mixer: str, build: Callable[..., Any], **options: Any) -> PaperModel:
        matched = options.pop("matched", {})
        return _row(name, mixer, 1, 2048, build, {"d_model": 128, **options}, **matched)

    heads = {"num_heads": 4, "expand_k": 0.5, "expand_v": 1.0}
    return (
        row("KLA", "kla", KLAConfig, d_state=8),
        row("Mamba", "mamba", MambaConfig, d_state=16, expand=1),
        row("GatedDeltaNet", "gated_deltanet", GatedDeltaNetConfig, **heads),
        row("GLA", "gla", GLAConfig, **heads),
        row("mLSTM", "mlstm", MLSTMConfig, num_heads=16, matched={"qk_factor": 0.5}),
    )


def _mqar(d_model: int) -> tuple[PaperModel, ...]:
    state, slots = 32 * d_model, 16
    keys = {64: 1.0, 128: 0.5, 256: 0.25}[d_model]
    width: dict[str, Any] = {"d_model": d_model}
    delta = {**width, "num_heads": d_model // 32, "expand_k": 0.75, "expand_v": 1.5}
    square = {"expand_k": 1.0, "expand_v": 1.0}
    gla = {**width, "num_heads": 4, "expand_k": keys, "expand_v": 1.0}
    return (
        _row("KLA", "kla", 2, state, KLAConfig, {**width, "d_state": slots}),
        _row("Mamba", "mamba", 2, state, MambaConfig, {**width, "d_state": slots, "expand": 2}),
        _row(
            "GatedDeltaNet",
            "gated_deltanet",
            2,
            36 * d_model,
            GatedDeltaNetConfig,
            delta,
            **square,
        ),
        _row("GLA", "gla", 2, state, GLAConfig, gla, expand_k=2 * keys),
    )


PAPER_MODELS = {"mad": _mad(), "mqar": (*_mqar(64), *_mqar(128), *_mqar(256))}
"""Rows of the tables, by table."""
