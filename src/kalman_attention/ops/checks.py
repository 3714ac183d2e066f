"""Arguments of the op: which are accepted, and errors that say what, why and what instead."""

import contextlib
import contextvars
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from kalman_attention.filtering.moment import KLAState
from kalman_attention.ops.arithmetic import needed_dtype, require_arithmetic
from kalman_attention.ops.contract import ScanInputs, compute_dtype

_HALVES = (torch.float16, torch.bfloat16, torch.float32)

_check_values = contextvars.ContextVar("kalman_attention_check_values", default=False)


@contextlib.contextmanager
def value_checks(enabled: bool = True) -> Iterator[None]:
    """Inside this context, also check the values of all inputs; costs a pass over the data.

    Finds NaN and infinities anywhere except in padding and in missing values (``lam_v`` = 0), and
    negative precisions, variances and process noise. Layers and models called inside the context
    are checked as well; compiled graphs are not.

    >>> with value_checks():
    ...     out = kla_scan(q, k, v, lam_v, a_bar, p_bar)

    Args:
        enabled: False turns the checks off again, inside a context that turned them on.
    """
    token = _check_values.set(enabled)
    try:
        yield
    finally:
        _check_values.reset(token)


def checks_values() -> bool:
    """Whether ``value_checks`` is on."""
    return _check_values.get()


def check_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam_v: Tensor,
    a_bar: Tensor,
    p_bar: Tensor,
    state: KLAState | None,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    acc_dtype: torch.dtype | None = None,
    dt: Tensor | None = None,
) -> ScanInputs:
    """Validate the arguments of a scan, fill in the default prior and choose the arithmetic."""
    require_shape("v", v, "[B, T, D]", (None, None, None))
    B, T, D = v.shape
    require_shape("k", k, "[B, T, N]", (B, T, None), "v", v)
    N = k.shape[2]
    require_shape("lam_v", lam_v, "[B, T, D]", (B, T, D), "v", v)
    require_shape("q", q, "[B, T, N]", (B, T, N), "k", k)
    rows = B  # one belief per row, or per packed document
    if cu_seqlens is not None:
        rows = require_packing(v, mask, cu_seqlens)
    if mask is not None:
        require_mask(mask, (B, T), "[B, T]")
    if dt is not None:
        dt = require_gaps(dt, v, "[B, T] or [B, T, D]")
    inputs = _check_common(q, k, v, lam_v, a_bar, p_bar, state, mask, cu_seqlens, dt, rows, N, D)
    # Values exist only outside of compiled graphs; on a device, looking at them would stall it.
    if not torch.compiler.is_compiling():
        if _check_values.get():
            _check_all_values(inputs)
        elif v.device.type == "cpu":
            _check_dynamics(a_bar, p_bar, gaps=dt is not None)
    if acc_dtype is not None:
        require_arithmetic(acc_dtype, inputs.compute_dtype)
    elif not torch.compiler.is_compiling():  # in a graph the op decides when it runs
        wanted = torch.is_grad_enabled() and lam_v.requires_grad
        acc_dtype = needed_dtype(inputs, gradients=wanted)
    return inputs._replace(acc_dtype=acc_dtype)


def check_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam_v: Tensor,
    a_bar: Tensor,
    p_bar: Tensor,
    state: KLAState,
    mask: Tensor | None,
    dt: Tensor | None = None,
) -> ScanInputs:
    """Validate the arguments of a single step."""
    require_shape("v", v, "[B, D]", (None, None))
    B, D = v.shape
    require_shape("k", k, "[B, N]", (B, None), "v", v)
    N = k.shape[1]
    require_shape("lam_v", lam_v, "[B, D]", (B, D), "v", v)
    require_shape("q", q, "[B, N]", (B, N), "k", k)
    if mask is not None:
        require_mask(mask, (B,), "[B]")
    if state is None:
        raise ValueError(
            "kla_step needs the state before the token. Pass the state of the last ScanOutput, or "
            "KLAState.unit_prior(batch_size, d_state, d_inner) for the first token."
        )
    if dt is not None:
        dt = require_gaps(dt, v, "[B] or [B, D]")
    inputs = _check_common(q, k, v, lam_v, a_bar, p_bar, state, mask, None, dt, B, N, D)
    if not torch.compiler.is_compiling() and _check_values.get():
        _check_all_values(inputs)
    return inputs


def check_bounds(cu_seqlens: Tensor, T: int) -> list[int]:
    """Document boundaries as a list; they must start at 0, never decrease and end at T."""
    bounds: list[int] = cu_seqlens.tolist()
    ordered = all(a <= b for a, b in itertools.pairwise(bounds))
    if bounds[0] != 0 or bounds[-1] != T or not ordered:
        shown = str(bounds) if len(bounds) <= 12 else f"[{bounds[0]}, ..., {bounds[-1]}]"
        raise ValueError(
            f"cu_seqlens must start at 0, never decrease and end at T = {T}, got {shown}. It lists "
            "where each packed document starts, and the end of the last one: documents of 3 and "
            "5 tokens are [0, 3, 8]."
        )
    return bounds


def _check_common(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam_v: Tensor,
    a_bar: Tensor,
    p_bar: Tensor,
    state: KLAState | None,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    dt: Tensor | None,
    rows: int,
    N: int,
    D: int,
) -> ScanInputs:
    dtype = require_token_dtypes(v=v, lam_v=lam_v, q=q, k=k, **({} if dt is None else {"dt": dt}))
    if N == 0 or D == 0:
        raise ValueError(f"N and D must be at least 1, got N = {N} (from k) and D = {D} (from v).")
    G = require_blocks(a_bar, N, D)
    for name, x in (("a_bar", a_bar), ("p_bar", p_bar)):
        require_shape(name, x, "[N, D]", (G, D), "a_bar and v give G, D =", (G, D))
        require_float(name, x, dtype, "decays near 1 and small noise need its digits")
    if state is None:
        # The unit prior, with one variance per block.
        prior = KLAState.unit_prior(rows, N, D, dtype=dtype, device=v.device)
        state = prior._replace(variance=prior.variance[:, :G])
    elif not (isinstance(state, tuple) and len(state) == 2):
        raise ValueError(
            f"state must be a KLAState(mean, variance), got {type(state).__name__}. Pass the state "
            "of a ScanOutput, or build one with KLAState(mean, variance)."
        )
    mean_0, variance_0 = state
    for name, x, slots in (("state.mean", mean_0, N), ("state.variance", variance_0, G)):
        require_belief(name, x, (rows, slots, D), packed=cu_seqlens is not None)
        require_float(name, x, dtype, "the state is carried over the whole sequence")
    others = {
        "q": q, "k": k, "lam_v": lam_v, "a_bar": a_bar, "p_bar": p_bar,
        "state.mean": mean_0, "state.variance": variance_0, "mask": mask, "dt": dt,
    }  # fmt: skip
    require_device("v", v, **others)
    return ScanInputs(q, k, v, lam_v, a_bar, p_bar, mean_0, variance_0, mask, cu_seqlens, dt=dt)


def require_blocks(a_bar: Tensor, N: int, D: int) -> int:
    """Check that the dynamics are per slot or per block of slots; return the number of blocks."""
    fits = isinstance(a_bar, Tensor) and a_bar.dim() == 2 and a_bar.shape[1] == D
    G = a_bar.shape[0] if fits and a_bar.shape[0] else N
    require_shape("a_bar", a_bar, "[N, D]", (G, D), "k and v give N, D =", (N, D))
    if N % G:
        raise ValueError(
            f"a_bar has shape {list(a_bar.shape)} but must be [N, D] = {[N, D]}, or [G, D] with G "
            f"blocks of N / G slots that share a precision: {G} does not divide {N}."
        )
    return G


def require_gaps(dt: Tensor, v: Tensor, legend: str) -> Tensor:
    """Check that dt matches the values; return it with an axis of channels, of size D or 1."""
    shapes = (v.shape[:-1], v.shape)
    if not isinstance(dt, Tensor) or dt.shape not in shapes or not dt.is_floating_point():
        got = f"{_name(dt.dtype)} {list(dt.shape)}" if isinstance(dt, Tensor) else type(dt).__name__
        raise ValueError(
            f"dt is {got} but must be a float tensor {legend} (v is {list(v.shape)}): the time "
            "that passes before each token, in units of the step that a_bar and p_bar belong to. "
            "From time stamps: dt = stamps.diff(prepend=first)."
        )
    return dt if dt.dim() == v.dim() else dt.unsqueeze(-1)


def require_device(first: str, x: Tensor, **others: Tensor | None) -> None:
    """Check that all tensors are on the device of ``x``."""
    for name, tensor in others.items():
        if tensor is not None and tensor.device != x.device:
            raise ValueError(
                f"{name} is on {tensor.device} but {first} is on {x.device}. One scan runs on one "
                f"device: move it with {name}.to({str(x.device)!r})."
            )


def require_shape(
    name: str,
    x: Tensor,
    legend: str,
    expected: tuple[int | None, ...],
    source: str = "",
    other: Tensor | tuple[int, ...] | None = None,
) -> None:
    """Check a shape against the sizes of its legend; None stands for any size."""
    if not isinstance(x, Tensor):
        raise ValueError(
            f"{name} must be a torch.Tensor of shape {legend}, got {type(x).__name__}."
        )
    fits = x.dim() == len(expected) and all(
        e is None or n == e for n, e in zip(x.shape, expected, strict=True)
    )
    if fits:
        return
    given = f"{name} has shape {list(x.shape)} but must be {legend}"
    if other is not None:
        shape = list(other.shape) if isinstance(other, Tensor) else list(other)
        wanted = ", ".join(
            letter if e is None else str(e) for letter, e in zip("BTN", expected, strict=False)
        )
        given += f" = [{wanted}] ({source} {'' if source.endswith('=') else 'is '}{shape})"
    hint = ""
    if x.dim() != len(expected):
        hint = f" It has {x.dim()} axes instead of {len(expected)}: "
        hint += (
            "add the missing one with unsqueeze."
            if x.dim() < len(expected)
            else "merge heads into channels or batch."
        )
    raise ValueError(f"{given}.{hint} Letters: B batch, T time, N slots (d_state), D channels.")


def require_belief(name: str, x: Tensor, expected: tuple[int, int, int], packed: bool) -> None:
    """Check that one half of a belief has one entry per row, slot and channel."""
    if isinstance(x, Tensor) and tuple(x.shape) == expected:
        return
    got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
    rows = "one state per document" if packed else "one state per batch row"
    raise ValueError(
        f"{name} is {got} but must be {list(expected)}: [R, N, D], {rows}. To use one state for "
        "all rows, expand it: KLAState(*(x.expand(R, -1, -1) for x in state))."
    )


def require_token_dtypes(**tokens: Tensor) -> torch.dtype:
    """Dtype of the arithmetic for these tokens, determined by the first."""
    dtypes = {name: x.dtype for name, x in tokens.items()}
    first = next(iter(dtypes))
    dtype = compute_dtype(dtypes[first])
    allowed = (torch.float64,) if dtype == torch.float64 else _HALVES
    for name, given in dtypes.items():
        if given not in allowed:
            names = ", ".join(str(d).removeprefix("torch.") for d in allowed)
            raise ValueError(
                f"{name} is {_name(given)}, but with {first} in {_name(dtypes[first])} it must be "
                f"one of: {names}. Float64 cannot be mixed with shorter types: convert all of "
                f"{', '.join(dtypes)}."
            )
    return dtype


def require_float(name: str, x: Tensor, dtype: torch.dtype, why: str) -> None:
    """Check that a tensor of the dynamics or of a belief is in the compute dtype."""
    if x.dtype != dtype:
        raise ValueError(
            f"{name} is {_name(x.dtype)} but must be {_name(dtype)}, even with shorter tokens: "
            f"{why}. Convert it with {name}.to(torch.{_name(dtype)})."
        )


def require_mask(mask: Tensor, expected: tuple[int, ...], legend: str) -> None:
    """Check that a mask is boolean and has one entry per token."""
    if mask.dtype != torch.bool or tuple(mask.shape) != expected:
        raise ValueError(
            f"mask is {_name(mask.dtype)} {list(mask.shape)} but must be bool {legend} = "
            f"{list(expected)}: True for real tokens, False for padding. "
            "From an attention mask of 0 and 1: mask.bool()."
        )


def require_packing(v: Tensor, mask: Tensor | None, cu_seqlens: Tensor) -> int:
    """Check that packed documents come in one row and without a mask; return their number."""
    if mask is not None:
        raise ValueError(
            "mask and cu_seqlens are mutually exclusive: packed documents need no padding. Drop "
            "the mask, or unpack the documents into rows and pass only the mask."
        )
    if v.shape[0] != 1:
        raise ValueError(
            f"cu_seqlens packs documents into one row, but the batch has {v.shape[0]} rows. "
            "Concatenate them along T (B = 1) and shift the boundaries accordingly."
        )
    if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.dim() != 1:
        raise ValueError(
            f"cu_seqlens is {_name(cu_seqlens.dtype)} {list(cu_seqlens.shape)} but must be int32 "
            "or int64 [n + 1]: the start of each of n documents, then the end of the last."
        )
    if len(cu_seqlens) < 2:
        raise ValueError("cu_seqlens must describe at least one document, as in [0, T].")
    return len(cu_seqlens) - 1


def _check_dynamics(a_bar: Tensor, p_bar: Tensor, *, gaps: bool) -> None:
    """Check the values of the dynamics."""
    # Cheap on a CPU: the dynamics are only [N, D], and there is no device to wait for.
    with torch.no_grad():
        if gaps and not bool((a_bar > 0.0).all()):
            raise ValueError(
                f"a_bar must lie in (0, 1] with dt, got values from {a_bar.min():.4g} to "
                f"{a_bar.max():.4g}: half a step of a negative decay does not exist. Omit dt, or "
                "use decays from discretise(a, p, dt)."
            )
        if not bool((a_bar.abs() <= 1.0).all()):
            raise ValueError(
                f"a_bar must lie in [-1, 1], got values from {a_bar.min():.4g} to "
                f"{a_bar.max():.4g}. It is the decay per token after discretisation: a larger one "
                "lets the state diverge. From rates a > 0: discretise(a, p, dt)."
            )
        if not bool((p_bar >= 0.0).all()) or not bool((p_bar < torch.inf).all()):
            raise ValueError(
                f"p_bar must be finite and at least 0, got values from {p_bar.min():.4g} to "
                f"{p_bar.max():.4g}. It is the variance of the process noise per token."
            )


def _check_all_values(inputs: ScanInputs) -> None:
    _check_dynamics(inputs.a_bar, inputs.p_bar, gaps=inputs.dt is not None)
    real = None if inputs.mask is None else inputs.mask.unsqueeze(-1)
    positive = ("lam_v", "variance_0", "dt")
    for name in ("q", "k", "v", "lam_v", "mean_0", "variance_0", "dt"):
        if getattr(inputs, name) is None:
            continue
        x = getattr(inputs, name).detach()
        bad = ~x.isfinite()
        if name in positive:
            bad |= x < 0
        if real is not None and not name.endswith("_0"):
            bad &= real
        if name == "v":  # a missing value may be anything
            bad &= inputs.lam_v != 0
        if bool(bad.any()):
            where = tuple(bad.nonzero()[0].tolist())
            rule = "finite and at least 0" if name in positive else "finite"
            raise ValueError(
                f"{name} must be {rule}, but {int(bad.sum())} of {bad.numel()} values are not; the "
                f"first is {x[where].item()} at {where}. Check the operation that produced it."
            )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
