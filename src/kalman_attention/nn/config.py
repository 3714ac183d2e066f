"""Options of the KLA layer, in words."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from kalman_attention.nn.links import PrecisionLink, precision_range
from kalman_attention.ops.engines import ENGINES, REFERENCE


@dataclass(frozen=True, kw_only=True)
class KLAConfig:
    """Everything that defines a KLA layer.

    The defaults are the paper's block, with our own initialisation of ``diffusion`` and ``dt_max``.

    Attributes:
        d_model: width of the layer's input and output.
        d_state: memory slots per channel, the paper's N.
        d_inner: channels of the filter; None means d_model (the paper's expansion factor of 1).
        shared_slots: neighbouring slots that form a block with one decay, noise and variance; 1 is
            the paper's filter. Sharing costs less, and a block observes its part of a key as a
            whole.
        num_reflections: reflections, chosen by the token, that rotate every block of
            ``shared_slots`` before the token is observed; 0 for none. One is enough for parity, two
            rotate in a plane, and as many as the block has slots reach every orthogonal matrix. See
            docs/state_tracking.md; ``KLAConfig.tracking`` has initial values that learn it.
        frequencies: lowest and highest initial angular velocity, in rad per unit of ``dt``, at
            which blocks of two slots rotate as time passes; they are learned, and initially spaced
            evenly in their logarithm. The latent is then a damped oscillator driven by noise,
            observed at any time stamps. None for no rotation with time.
        conv_kernel: taps of the causal convolution; None for no convolution.
        value: source of the filter's value: ``"stream"``, the convolved stream itself (the form
            whose parameter counts match the paper's language models), or ``"project"``, a
            full-width projection of it.
        precision_rank: rank of the projection to the precision; None for full rank.
        precision_link: how a projection becomes a precision; see ``nn/links.py``. The default
            keeps the observation variance positive, as in the paper, and was the best of three in a
            small trial (selective copying, one seed: 47 % against 41 % and 36 %).
        precision_floor: smallest observation variance (``inverse_softplus``) or smallest
            precision (``softplus``).
        initial_precision: initial precision of the values, set through the bias of their
            projection; requires ``evidence_bias``. None leaves it to the link.
        evidence_bias: add a bias to the projections for value, precision, key and query.
        qk_norm: scale keys and queries to length 1.
        process_noise: ``"learned"``, ``"fixed"`` at its initial value, or ``"zero"`` (no noise).
        discretisation: ``"ou"``, the exact one of the Ornstein-Uhlenbeck prior; ``"zoh"``, noise
            held over the step (p_bar = p^2 dt); ``"none"``, discrete dynamics without a step size.
        prior: initial state: the ``"unit"`` Gaussian, the ``"stationary"`` distribution of the
            process, or ``"learned"`` (initialised to the unit Gaussian).
        initial_mean: standard deviation of the initial means of a learned prior.
        diffusion: initial p, which enters squared. The default makes the unit Gaussian the
            stationary distribution for a decay rate of 1, p^2 = 2 a; 0.1 would be the noise of the
            authors' released code, which does not square its 0.01. More noise with less decay
            learned copying faster (dev/experiments.md).
        decay_rate: initial a, or (low, high) to spread it evenly over the slots, or over the blocks
            of ``shared_slots``.
        step_rank: None learns one step size per slot and channel. A number lets every token choose
            the step size of each channel, through a projection of that rank, so that decay and
            noise depend on the token.
        dt_min: smallest initial step size; initial values are log-uniform.
        dt_max: largest initial step size. With a decay rate of 1 the shortest initial memory is
            100 tokens: forgetting is left to the evidence.
        smooth: read the posterior given all tokens, including later ones: an exact bidirectional
            layer. It takes whole sequences only and cannot be part of a language model.
        readout_norm: divide the read-out by its root mean square over the channels, before skip
            and gate.
        gate_bias: initial bias of the gate, which is then learned; None for no bias.
        skip: initial weight of the skip from the convolved stream to the read-out, or None for no
            skip.
        engine: implementation of the scan, as for ``kla_scan``; None means ``"auto"``. It is not a
            property of the weights and may be changed at any time.
    """

    d_model: int
    d_state: int = 16
    d_inner: int | None = None
    shared_slots: int = 1
    num_reflections: int = 0
    frequencies: tuple[float, float] | None = None
    conv_kernel: int | None = 4
    value: Literal["stream", "project"] = "stream"
    precision_rank: int | None = None
    precision_link: PrecisionLink = "inverse_softplus"
    precision_floor: float = 1e-4
    initial_precision: float | None = None
    evidence_bias: bool = False
    qk_norm: bool = True
    process_noise: Literal["learned", "fixed", "zero"] = "learned"
    discretisation: Literal["ou", "zoh", "none"] = "ou"
    prior: Literal["unit", "stationary", "learned"] = "unit"
    initial_mean: float = 0.0
    diffusion: float = math.sqrt(2.0)
    decay_rate: float | tuple[float, float] = 1.0
    step_rank: int | None = None
    dt_min: float = 1e-3
    dt_max: float = 1e-2
    smooth: bool = False
    readout_norm: bool = False
    gate_bias: float | None = None
    skip: float | None = 1.0
    engine: str | None = None

    def __post_init__(self) -> None:
        for name in _COUNTS:
            given = getattr(self, name)
            if given is not None and given < 1:
                raise ValueError(f"{name} must be at least 1, got {given}.")
        if not 0.0 < self.dt_min <= self.dt_max:
            raise ValueError(f"0 < dt_min <= dt_max must hold, got {self.dt_min}, {self.dt_max}.")
        if min(self.decay_rates) <= 0.0 or self.diffusion <= 0.0 or self.precision_floor < 0.0:
            raise ValueError(
                "decay_rate and diffusion must be positive and precision_floor at least 0, got "
                f"{self.decay_rate}, {self.diffusion}, {self.precision_floor}. For no process "
                "noise set process_noise='zero'."
            )
        if self.prior == "stationary" and self.process_noise == "zero":
            raise ValueError(
                "prior='stationary' with process_noise='zero' is a prior of variance 0 that no "
                "evidence can move. Use prior='unit' or prior='learned'."
            )
        if self.d_state % self.shared_slots:
            raise ValueError(
                f"shared_slots must divide d_state, got {self.shared_slots} and {self.d_state}."
            )
        if self.num_reflections < 0 or (self.num_reflections and self.shared_slots == 1):
            raise ValueError(
                "num_reflections must be at least 0, and needs blocks of at least 2 shared_slots; "
                f"got {self.num_reflections} and {self.shared_slots}. A single slot would change "
                "its sign at every token, whatever the token."
            )
        if self.frequencies is not None and (
            self.shared_slots != 2 or not 0.0 < self.frequencies[0] <= self.frequencies[1]
        ):
            raise ValueError(
                "frequencies are those of blocks of two slots, 0 < lowest <= highest: set "
                f"shared_slots=2; got {self.frequencies} with shared_slots={self.shared_slots}."
            )
        _check_words(self)
        _check_starts(self)

    @classmethod
    def tracking(cls, **fields: Any) -> "KLAConfig":
        """Options for state tracking: blocks that rotate, initialised so that they learn to.

        Initially tokens rotate the state and bring little evidence, nothing fades, the initial mean
        is not 0, so that there is something to rotate, the gate is open, and there is no
        convolution.

        Args:
            **fields: ``d_model``, and any other option to override.
        """
        return cls(**{**_TRACKING, **fields})

    @property
    def blocks(self) -> int:
        """Blocks of slots that share a precision, G."""
        return self.d_state // self.shared_slots

    @property
    def width(self) -> int:
        """Channels of the filter."""
        return self.d_model if self.d_inner is None else self.d_inner

    @property
    def decay_rates(self) -> tuple[float, float]:
        """Initial decay rate of the first and of the last slot, or block of slots."""
        if isinstance(self.decay_rate, tuple):
            return self.decay_rate
        return self.decay_rate, self.decay_rate


_TRACKING: dict[str, Any] = {
    "shared_slots": 4,  # A5 is a group of rotations in three dimensions, so blocks of 4 hold it
    "num_reflections": 2,  # a rotation in a plane
    "conv_kernel": None,  # the state should depend on tokens through rotations alone
    "precision_link": "softplus",
    "initial_precision": 0.018,  # nearly no evidence: an update would overwrite the rotated state
    "evidence_bias": True,
    "prior": "learned",
    "initial_mean": 1.0,
    "dt_min": 1e-4,  # memories of 1,000 tokens and more: nothing fades within a training word
    "dt_max": 1e-3,
    "gate_bias": 2.0,  # open
}
_COUNTS = (
    "d_model",
    "d_state",
    "d_inner",
    "shared_slots",
    "conv_kernel",
    "precision_rank",
    "step_rank",
)
_WORDS = {
    "value": ("stream", "project"),
    "precision_link": ("inverse_softplus", "softplus", "exp"),
    "process_noise": ("learned", "fixed", "zero"),
    "discretisation": ("ou", "zoh", "none"),
    "prior": ("unit", "stationary", "learned"),
    "engine": (None, "auto", REFERENCE, *ENGINES),
}


def _check_words(config: KLAConfig) -> None:
    for name, words in _WORDS.items():
        if getattr(config, name) not in words:
            known = ", ".join(repr(word) for word in words)
            raise ValueError(f"{name} must be one of {known}, got {getattr(config, name)!r}.")


def _check_starts(config: KLAConfig) -> None:
    """Check that initial values belong to parameters that exist."""
    if config.initial_precision is not None:
        if not config.evidence_bias:
            raise ValueError("initial_precision is the start of a bias: set evidence_bias=True.")
        low, high = precision_range(config.precision_link, config.precision_floor)
        if not low < config.initial_precision < high:
            raise ValueError(
                f"initial_precision must lie between {low:g} and {high:g}, which is what "
                f"precision_link={config.precision_link!r} can reach, got "
                f"{config.initial_precision}."
            )
    if config.initial_mean < 0.0 or (config.initial_mean and config.prior != "learned"):
        raise ValueError(
            "initial_mean is the spread of a learned prior's mean: at least 0, with "
            f"prior='learned'; got {config.initial_mean} with prior={config.prior!r}."
        )
    if config.step_rank is not None and config.discretisation == "none":
        raise ValueError(
            "step_rank lets tokens choose a step size, and discretisation='none' has none. Use "
            "discretisation='ou'."
        )
