"""What a sequence mixer is: anything a block can hold between its norm and its residual."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from kalman_attention._typing import Mask
from kalman_attention.ops.checks import require_mask, require_packing

Options = TypeVar("Options")


class LayerOutput(NamedTuple):
    """What ``mix`` and ``step`` of every mixer return, always.

    Attributes:
        y: output, ``[B, T, d_model]`` (``[B, d_model]`` from ``step``); 0 at padding.
        variance: posterior variance of the read-out, ``[B, T, d_inner]``, or None when it was not
            asked for or the mixer has none.
        state: what the next call needs; opaque to the caller, one row per sequence.
    """

    y: Tensor
    variance: Tensor | None
    state: Any


class Mixer(nn.Module):
    """The interface of ``nn.KLA`` and of every baseline: ``layer(x)`` is a tensor like ``x``.

    A mixer writes ``mix``, ``step`` and ``init_state``. A state is a named tuple of tensors with
    one row per sequence first (and of such tuples), or of plain values that all rows share.
    Windows of convolutions are in fields named ``conv``. Parameters start by the
    ``reset_parameters`` of the modules that hold them; the model around then scales ``out_proj``
    and touches nothing else. They are used inside the ``forward`` of those modules only, where
    hooks see it: a mixer whose weights rest on a disk works like any other.

    Args:
        config: options, of the class in ``options``.
        **fields: the same by name, as in ``KLA(d_model=64, d_state=16)``.

    Attributes:
        options: the dataclass of the mixer's options; it has ``d_model``, and defaults for
            everything else.
        out_proj: the matrix that writes into the residual stream; deep stacks start it smaller.
    """

    options: ClassVar[type[Any]]
    out_proj: nn.Linear

    def __init__(self, config: Any = None, **fields: Any) -> None:
        super().__init__()
        self.config = settle_config(type(self).__name__, self.options, config, fields)

    def forward(
        self, x: Tensor, mask: Mask | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """Mix whole sequences.

        Args:
            x: ``[B, T, d_model]``; T may be 0.
            mask: ``[B, T]`` bool, False for padding, which is not seen; 0 comes out there.
            cu_seqlens: borders of documents packed into one row (B = 1), ``[n + 1]`` int.

        Returns:
            ``[B, T, d_model]``.
        """
        return self.mix(x, None, mask, cu_seqlens).y

    def mix(
        self,
        x: Tensor,
        state: Any = None,
        mask: Mask | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        return_variance: bool = False,
    ) -> LayerOutput:
        """Mix a piece of sequences, going on from ``state``.

        Args:
            x: ``[B, T, d_model]``; T may be 0.
            state: state of the last call on the same rows; None starts afresh.
            mask: ``[B, T]`` bool, False for padding, which leaves the state exactly as it was.
            cu_seqlens: borders of documents packed into one row (B = 1), ``[n + 1]`` int; states
                are then per document.
            return_variance: also return the posterior variance of the read-out, if there is one.

        Returns:
            ``LayerOutput(y, variance, state)``.
        """
        raise NotImplementedError

    def step(
        self, x: Tensor, state: Any, *, mask: Mask | None = None, return_variance: bool = False
    ) -> LayerOutput:
        """One token ``[B, d_model]`` (mask ``[B]``); equal to ``mix`` on sequences of one."""
        raise NotImplementedError

    def init_state(self, batch_size: int, *, capacity: int = 0, like: Tensor | None = None) -> Any:
        """The state before the first token.

        Args:
            batch_size: number of sequences.
            capacity: how many tokens will follow; a mixer whose memory grows sets it aside.
            like: a tensor with the device and dtype of the tokens; None for those of the weights.
        """
        raise NotImplementedError

    def reserve(self, state: Any, capacity: int) -> Any:
        """The same state, to go on from for ``capacity`` tokens without touching this one.

        Most mixers never write into a state: it is a value, and comes back as it is.

        Args:
            state: of an earlier call.
            capacity: tokens that will follow.
        """
        return state

    def _like(self, like: Tensor | None) -> Tensor:
        """What new states are like; quantised weights do not say."""
        if like is not None:
            return like
        return next(p for p in self.parameters() if p.is_floating_point())

    def _check(
        self, x: Tensor, mask: Mask | None, cu_seqlens: Tensor | None = None, *, axes: int = 3
    ) -> None:
        """Refuse input of the wrong shape, with a way out."""
        check_tokens(type(self).__name__, x, self.config.d_model, axes)
        if cu_seqlens is not None:
            require_packing(x, mask, cu_seqlens)
        if mask is not None:
            require_mask(mask, tuple(x.shape[:-1]), "[B, T]" if axes == 3 else "[B]")


class ChannelVector(nn.Module):
    """A learned number per channel, with a start to choose.

    Args:
        width: number of channels.
        start: initial value.
    """

    parameter_group: ClassVar[str] = "vector"

    def __init__(self, width: int, start: float = 1.0) -> None:
        super().__init__()
        self.start = start
        self.weight = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set all numbers to their start."""
        if self.weight.is_meta:
            return  # nothing to start, and torch would import its compiler for it
        nn.init.constant_(self.weight, self.start)


class Skip(ChannelVector):
    """y + weight u: a path past the recurrence."""

    def forward(self, y: Tensor, u: Tensor) -> Tensor:
        """Add the stream u, ``[..., D]`` both; leading axes broadcast."""
        return torch.addcmul(y, u, self.weight.to(y.dtype))


class Bias(ChannelVector):
    """x + weight."""

    def forward(self, x: Tensor) -> Tensor:
        """Add the bias to ``[..., D]``."""
        return x + self.weight.to(x.dtype)


def settle_config(who: str, kind: type[Options], config: Any, fields: dict[str, Any]) -> Options:
    """Options given as a whole, or field by field.

    Args:
        who: whose they are, for messages.
        kind: the dataclass of the options.
        config: an instance of it, or None.
        fields: its fields by name.
    """
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    if isinstance(config, kind) and not fields:
        return config
    if config is not None:
        got = f"both {type(config).__name__} and {', '.join(fields)}" if fields else repr(config)
        raise ValueError(
            f"{who} takes one {kind.__name__}, or its fields by name as in "
            f"{who}({names[0]}=64); got {got}."
        )
    unknown = [name for name in fields if name not in names]
    if unknown:
        raise ValueError(f"{who} has no option {', '.join(unknown)}. It has: {', '.join(names)}.")
    required = [
        field.name
        for field in dataclasses.fields(kind)  # type: ignore[arg-type]
        if field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
        and field.name not in fields
    ]
    if required:
        raise ValueError(
            f"{who} needs {', '.join(required)}: pass a {kind.__name__}, or its fields by name."
        )
    return kind(**fields)


def check_tokens(who: str, x: Tensor, d_model: int, axes: int) -> None:
    """Tokens must be floating point, ``[B, T, d_model]`` (3 axes) or ``[B, d_model]`` (2)."""
    legend = "[B, T, d_model]" if axes == 3 else "[B, d_model]"
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{who} takes floating-point tensors {legend}, got {got}.")
    if x.dim() != axes:
        way = (
            "Add a batch axis to one sequence with unsqueeze(0); one token per row goes to step."
            if axes == 3
            else "One token per row has no time axis; sequences go to mix."
        )
        raise ValueError(f"x is {list(x.shape)} but {who} takes {legend} here. {way}")
    if x.shape[-1] != d_model:
        raise ValueError(
            f"x is {list(x.shape)}, {x.shape[-1]} wide, but this {who} was made with d_model = "
            f"{d_model}. Project x to that width, or make the layer with d_model={x.shape[-1]}."
        )


def map_state(change: Callable[[Tensor], Tensor], state: Any) -> Any:
    """The same state with ``change`` applied to its tensors, which have rows first.

    Args:
        change: what to do with a tensor, such as picking rows.
        state: of any mixer.
    """
    if isinstance(state, Tensor):
        return change(state)
    if isinstance(state, tuple) and hasattr(state, "_make"):
        return state._make(map_state(change, part) for part in state)
    return state


def state_tensors(state: Any, field: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a state, each with the dotted name of its field."""
    if isinstance(state, Tensor):
        yield field, state
    elif isinstance(state, tuple) and hasattr(state, "_asdict"):
        for name, part in state._asdict().items():
            yield from state_tensors(part, f"{field}.{name}" if field else name)
