"""The interface of a sequence mixer: the part of a block between its norm and its residual."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from kalman_attention._typing import Mask
from kalman_attention.ops.checks import require_mask, require_packing
from kalman_attention.ops.contract import ScanOutput
from kalman_attention.ops.frames import Turned

Options = TypeVar("Options")


class LayerOutput(NamedTuple):
    """The result of ``mix`` and ``step`` of every mixer.

    Attributes:
        y: output, ``[B, T, d_model]`` (``[B, d_model]`` from ``step``); 0 at padding.
        variance: posterior variance of the read-out, ``[B, T, d_inner]``, or None if it was not
            requested or the mixer has none.
        state: state for the next call; opaque to the caller, one row per sequence.
    """

    y: Tensor
    variance: Tensor | None
    state: Any


class Mixer(nn.Module):
    """The interface of ``nn.KLA`` and of every baseline: ``layer(x)`` is a tensor like ``x``.

    A mixer implements ``mix``, ``step`` and ``init_state``. A state is a named tuple of tensors
    whose first axis is the sequences (or of such tuples), or of plain values that all rows share.
    Windows of convolutions are in fields named ``conv``. Parameters are initialised by the
    ``reset_parameters`` of the modules that hold them; the surrounding model rescales ``out_proj``
    and changes nothing else. Parameters are only used inside the ``forward`` of those modules,
    where hooks see them, so that weights can be offloaded to disk.

    Args:
        config: options, an instance of ``options``.
        **fields: the same options by name, as in ``KLA(d_model=64, d_state=16)``.

    Attributes:
        options: the dataclass of the mixer's options; it has ``d_model``, and defaults for
            everything else.
        picks: whether ``mix`` takes ``ids`` and ``keep``; KLA has ``read`` and ``write`` for it.
        out_proj: the matrix that writes into the residual stream; deep stacks initialise it
            smaller.
    """

    options: ClassVar[type[Any]]
    picks: ClassVar[bool] = False
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
            mask: ``[B, T]`` bool, False for padding, which is ignored and returned as 0.
            cu_seqlens: document boundaries in one packed row (B = 1), ``[n + 1]`` int.

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
        """Mix a piece of sequences, continuing from ``state``.

        Args:
            x: ``[B, T, d_model]``; T may be 0.
            state: state of the previous call on the same rows; None for the initial state.
            mask: ``[B, T]`` bool, False for padding, which leaves the state exactly as it was.
            cu_seqlens: document boundaries in one packed row (B = 1), ``[n + 1]`` int; states are
                then per document.
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
        """The initial state.

        Args:
            batch_size: number of sequences.
            capacity: number of tokens that will follow; a mixer whose memory grows reserves it.
            like: a tensor with the device and dtype of the tokens; None for those of the weights.
        """
        raise NotImplementedError

    def reserve(self, state: Any, capacity: int) -> Any:
        """The same state, to continue from for ``capacity`` tokens without modifying this one.

        Args:
            state: state of an earlier call.
            capacity: number of tokens that will follow.
        """
        return state  # most mixers never write into a state, so there is nothing to copy

    def _like(self, like: Tensor | None) -> Tensor:
        """A tensor with the device and dtype of new states."""
        if like is not None:
            return like
        # The first floating parameter: the dtype of quantised weights is not that of states.
        return next(p for p in self.parameters() if p.is_floating_point())

    def _check(
        self, x: Tensor, mask: Mask | None, cu_seqlens: Tensor | None = None, *, axes: int = 3
    ) -> None:
        """Raise if the input has the wrong shape."""
        check_tokens(type(self).__name__, x, self.config.d_model, axes)
        if cu_seqlens is not None:
            require_packing(x, mask, cu_seqlens)
        if mask is not None:
            require_mask(mask, tuple(x.shape[:-1]), "[B, T]" if axes == 3 else "[B]")


def from_table(x: Tensor, ids: Tensor | None) -> Tensor:
    """Rows of a table ``[V, ...]`` by ``ids``, ``[B, T]``; x itself without ids."""
    if ids is None:
        return x
    if x.dim() == 2:
        return nn.functional.embedding(ids, x)
    return nn.functional.embedding(ids, x.flatten(1)).view(*ids.shape, *x.shape[1:])


def kept(x: Tensor, keep: Mask | None) -> Tensor:
    """The chosen positions of ``[B, T, ...]`` in one row, ``[1, n, ...]``; all without a choice."""
    return x if keep is None else x[keep].unsqueeze(0)


def kept_rows(x: Tensor, ids: Tensor | None, keep: Mask | None) -> Tensor:
    """``kept(from_table(x, ids), keep)``, without looking up what is not kept."""
    if ids is None or keep is None:
        return kept(from_table(x, ids), keep)
    return from_table(x, ids[keep].unsqueeze(0))


class ChannelVector(nn.Module):
    """A learned number per channel.

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
        """Set all entries to the initial value."""
        if self.weight.is_meta:
            return  # nothing to initialise, and torch would import its compiler for it
        nn.init.constant_(self.weight, self.start)


class Skip(ChannelVector):
    """y + weight u: a skip connection around the recurrence."""

    def forward(self, y: Tensor, u: Tensor) -> Tensor:
        """Add the stream u, ``[..., D]`` both; leading axes broadcast."""
        return torch.addcmul(y, u, self.weight.to(y.dtype))


class Bias(ChannelVector):
    """x + weight."""

    def forward(self, x: Tensor) -> Tensor:
        """Add the bias to ``[..., D]``."""
        return x + self.weight.to(x.dtype)


def settle_config(who: str, kind: type[Options], config: Any, fields: dict[str, Any]) -> Options:
    """Options given as one object, or field by field.

    Args:
        who: name of the class they belong to, for error messages.
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
    """Check that tokens are floating point, ``[B, T, d_model]`` or ``[B, d_model]``."""
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
            f"x is {list(x.shape)}, {x.shape[-1]} wide, but this {who} was built with d_model = "
            f"{d_model}. Project x to that width, or build the layer with d_model={x.shape[-1]}."
        )


def map_state(change: Callable[[Tensor], Tensor], state: Any) -> Any:
    """Apply a function to all tensors of a state, whose first axis is the rows.

    Args:
        change: function of a tensor, such as an index that selects rows.
        state: state of any mixer.
    """
    if isinstance(state, Tensor):
        return change(state)
    if isinstance(state, tuple) and hasattr(state, "_make"):
        return state._make(map_state(change, part) for part in state)
    return state


def state_tensors(state: Any, field: str = "") -> Iterator[tuple[str, Tensor]]:
    """Iterate over the tensors of a state, each with the dotted name of its field."""
    if isinstance(state, Tensor):
        yield field, state
    elif isinstance(state, tuple) and hasattr(state, "_asdict"):
        for name, part in state._asdict().items():
            yield from state_tensors(part, f"{field}.{name}" if field else name)


class Context(Protocol):
    """What a layer needs if it sees only a piece of a sequence: access to the other pieces.

    Implemented in ``parallel``, which splits sequences over processes.
    """

    def window(
        self, x: Tensor, window: Tensor, mask: Mask | None, cu_seqlens: Tensor | None
    ) -> Tensor:
        """The last K - 1 tokens before this piece.

        Args:
            x: the piece, ``[B, T, D]``.
            window: the tokens before the whole sequence, ``[B, K - 1, D]``.
            mask: mask of the piece, ``[B, T]``.
            cu_seqlens: document boundaries in the piece.
        """
        ...

    @property
    def scan(self) -> Callable[..., ScanOutput]:
        """``kla_scan`` over the whole sequence, called with one piece of it.

        Its ``state`` is the belief before the whole sequence; the returned one is the belief after
        the piece.
        """
        ...

    def frames(self, turned: Turned) -> Turned:
        """Keys and queries in the frame of the whole sequence, from those of the piece alone.

        Args:
            turned: computed as if the piece were the whole sequence; the returned frame is the one
                after the piece.
        """
        ...
