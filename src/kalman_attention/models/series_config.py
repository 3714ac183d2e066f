"""Options of models of series (``models/series.py``)."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from kalman_attention._reading import from_dict
from kalman_attention.nn.config import KLAConfig


@dataclass(frozen=True, kw_only=True)
class SeriesConfig:
    """Options of a ``SeriesModel``.

    Attributes:
        channels: number of values that may be observed at an instant; for images, their height
            and width.
        outputs: number of predicted values, or of classes.
        d_model: width of the residual stream.
        num_layers: number of layers, each with an MLP.
        head: ``"gaussian"``, a mean and a variance for each output at every instant, or
            ``"classes"``, one logit per class for the whole series.
        images: observations are images, ``[B, T, channels, channels]``, each observed entirely or
            not at all; a small convolutional network turns them into tokens.
        channel_memories: number of filters per channel, from the fastest to the slowest; their
            means and variances are part of the token. 0 for none. Values should have mean 0 and
            standard deviation 1, which is the prior of the filters.
        mixer: ``"kla"``, or ``"gru"``, a gated recurrent unit, which receives gaps as an input.
        kla: options of the KLA layers that differ from ``SERIES_LAYER``; ``smooth`` makes the model
            bidirectional, for a GRU as well.
        use_time: False treats all gaps as equal, as a control that ignores the time stamps.
        time_scale: the time that is one unit for the layers; a typical gap is a good choice.
        tell_gaps: also give each token the time since the last instant with an observation.
        tell_variance: give the head the posterior variance of the last KLA layer.
        mlp_width: hidden width of the MLPs; None means twice d_model.
        dropout: dropout rate of the outputs of layers and MLPs, of the hidden units of the tokens,
            and of the input of a classification head.
        variance_floor: smallest predicted variance.
        summary_knots: for classes, averages the logits with those of an additive model of summaries
            of each channel (``ChannelSummaries``), with this many knots per summary; 0 for none.
            Values should have mean 0 and standard deviation 1.
    """

    channels: int
    outputs: int
    d_model: int = 32
    num_layers: int = 2
    head: Literal["gaussian", "classes"] = "gaussian"
    images: bool = False
    channel_memories: int = 0
    mixer: Literal["kla", "gru"] = "kla"
    kla: dict[str, Any] = field(default_factory=dict)
    use_time: bool = True
    time_scale: float = 1.0
    tell_gaps: bool = False
    tell_variance: bool = True
    mlp_width: int | None = None
    dropout: float = 0.0
    variance_floor: float = 1e-4
    summary_knots: int = 0

    def __post_init__(self) -> None:
        for name in ("channels", "outputs", "d_model", "num_layers", "mlp_width"):
            given = getattr(self, name)
            if given is not None and given < 1:
                raise ValueError(f"{name} must be at least 1, got {given}.")
        for name, words in _WORDS.items():
            if getattr(self, name) not in words:
                known = " or ".join(repr(word) for word in words)
                raise ValueError(f"{name} must be {known}, got {getattr(self, name)!r}.")
        if not (self.time_scale > 0.0 and self.variance_floor > 0.0 and 0.0 <= self.dropout < 1.0):
            raise ValueError(
                "time_scale and variance_floor must be positive and dropout in [0, 1), got "
                f"{self.time_scale}, {self.variance_floor}, {self.dropout}."
            )
        if self.channel_memories < 0 or (self.channel_memories and self.images):
            raise ValueError(
                "channel_memories must be at least 0, and 0 for images; got "
                f"{self.channel_memories} with images={self.images}."
            )
        knots, apply = self.summary_knots, self.head == "classes" and not self.images
        if knots and (knots < 2 or not apply):
            raise ValueError(
                "summary_knots must be 0, or at least 2 for classes and without images; got "
                f"{knots} with head={self.head!r} and images={self.images}."
            )
        if self.images and self.channels % 8:
            raise ValueError(
                f"images are halved three times: channels must be a multiple of 8, got "
                f"{self.channels}."
            )
        _ = self.layer  # raises an error for incompatible options

    @property
    def layer(self) -> KLAConfig:
        """Options of every KLA layer."""
        return from_dict(
            KLAConfig,
            {"d_model": self.d_model, **SERIES_LAYER, **self.kla},
            "kla of a SeriesConfig",
        )

    def to_dict(self) -> dict[str, Any]:
        """As nested dictionaries of plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(
        cls, data: object, where: str = "the configuration of a series model"
    ) -> "SeriesConfig":
        """The inverse of ``to_dict``, also after a round trip through JSON.

        Args:
            data: nested dictionaries; names and types are checked.
            where: source of the data, such as a file, for error messages.
        """
        return from_dict(cls, data, where)


SERIES_LAYER: dict[str, Any] = {
    "conv_kernel": None,  # neighbouring tokens may be far apart in time
    "shared_slots": 2,
    "frequencies": (0.02, 0.6),
    "evidence_bias": True,
    "gate_bias": 1.0,
    "prior": "learned",
    "dt_min": 0.02,
    "dt_max": 0.6,
}
"""Default options of the KLA layers: oscillators with memories of 2 to 50 units of time."""

_WORDS = {"head": ("gaussian", "classes"), "mixer": ("kla", "gru")}
