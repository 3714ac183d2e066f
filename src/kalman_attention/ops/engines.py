"""The table of engines: which engine serves which call, and what ``auto`` means.

The choice is a pure function of device, dtype and installed packages. An engine that cannot serve
a call raises an error that names one that can; there is no silent fallback.
"""

import contextlib
import functools
import importlib
import importlib.util
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from kalman_attention._text import unknown
from kalman_attention.ops.contract import (
    EngineModule,
    MapEngineModule,
    StepEngineModule,
    StepFunction,
)
from kalman_attention.ops.cpu import library
from kalman_attention.ops.cuda import device

_PACKAGE = "kalman_attention.ops"
_MAPS = f"{_PACKAGE}.torch.segments"
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One way to compute the scan.

    Attributes:
        name: what the user passes as ``engine=``.
        summary: one line for ``kla check``.
        devices: device types it serves; empty means any.
        dtypes: dtypes of v it serves.
        location: ``module`` or ``module:attribute`` with the functions forward and backward.
        step: has a single-token kernel.
        maps: has its own summaries of segments of tokens.
        gaps: supports the time between tokens, ``dt``.
        shared: supports blocks of slots that share a precision.
        eager_only: cannot run inside a compiled or exported graph.
        never_auto: device types on which ``auto`` skips it.
        least_slots: ``auto`` picks it only if at least this many slots share each precision.
        missing: what it lacks on this machine, or None. Plain data, determined at import, so that
            compilers can trace the choice of an engine.
    """

    name: str
    summary: str
    devices: tuple[str, ...]
    location: str
    dtypes: tuple[torch.dtype, ...] = _FLOATS
    step: bool = False
    maps: bool = False
    gaps: bool = False
    shared: bool = False
    eager_only: bool = False
    never_auto: tuple[str, ...] = ()
    least_slots: int = 1
    missing: str | None = None

    def load(self) -> EngineModule:
        """Import the engine."""
        return _load(self.location)

    def load_step(self) -> StepFunction:
        """Import its single-token kernel."""
        return cast(StepEngineModule, _load(self.location)).step

    def load_maps(self) -> MapEngineModule:
        """Import the module that summarises segments for it: itself, or the one in torch."""
        return cast(MapEngineModule, _load(self.location if self.maps else _MAPS))

    def why_not(
        self,
        device: torch.device,
        dtype: torch.dtype,
        *,
        gaps: bool = False,
        slots: int = 1,
    ) -> str | None:
        """Why a call on ``device`` with v in ``dtype`` cannot be served, or None if it can."""
        if self.devices and device.type not in self.devices:
            return f"it runs on {' and '.join(self.devices)} tensors, these are on {device.type}"
        if dtype not in self.dtypes:
            names = ", ".join(str(d).removeprefix("torch.") for d in self.dtypes)
            return f"it takes {names}, v is {str(dtype).removeprefix('torch.')}"
        if gaps and not self.gaps:
            return "it does not take dt yet"
        if slots > 1 and not self.shared:
            return "it does not take slots that share a precision yet"
        if self.eager_only and torch.compiler.is_compiling():
            return "it does not run inside compiled or exported graphs"
        return self.missing


@functools.cache
def _load(location: str) -> EngineModule:
    module, _, attribute = location.partition(":")
    found = importlib.import_module(module)
    return cast(EngineModule, getattr(found, attribute) if attribute else found)


def _torch_scan_missing() -> str | None:
    # Looked up, not imported: importing it takes a second.
    if not (Path(torch.__file__).parent / "_higher_order_ops" / "associative_scan.py").exists():
        return f"torch {torch.__version__} has no torch._higher_order_ops.associative_scan"
    return None


def _triton_missing() -> str | None:
    # Looked up, not imported: importing it takes a second.
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; pip install 'kalman_attention[triton]'"
    return None


ENGINES = {
    engine.name: engine
    for engine in (
        Engine(
            name="cpu",
            summary="fused native loop, vectorised over channels and threaded",
            devices=("cpu",),
            location=f"{_PACKAGE}.cpu",
            step=True,
            maps=True,
            gaps=True,
            shared=True,
            missing=library.why_not(),
        ),
        Engine(
            name="triton",
            summary="fused Triton kernels, one warp per row, channel block and time segment",
            # In tests, Triton's interpreter runs the kernels on CPU tensors.
            devices=("cuda", "cpu") if os.environ.get("TRITON_INTERPRET") == "1" else ("cuda",),
            location=f"{_PACKAGE}.triton",
            step=True,
            gaps=True,
            shared=True,
            never_auto=("cpu",),
            missing=_triton_missing(),
        ),
        Engine(
            name="matrix",
            summary="matrix products in plain torch, for slots that share a precision",
            devices=(),
            location=f"{_PACKAGE}.torch.matrix",
            gaps=True,
            shared=True,
            # Measured at T=1024, D=128: faster than ``associative`` for blocks of 16 and 64 slots,
            # slower for blocks of 4.
            least_slots=8,
        ),
        Engine(
            name="associative",
            summary="chunked scan in plain torch operations",
            devices=(),
            location=f"{_PACKAGE}.torch.associative",
            gaps=True,
            shared=True,
        ),
        # After an engine that serves every device, so that ``auto`` never picks a kernel that has
        # not run on real hardware.
        Engine(
            name="cuda",
            summary="fused CUDA kernels, compiled at run time; never run on a GPU so far",
            devices=("cuda", "cpu") if device.EMULATION else ("cuda",),
            location=f"{_PACKAGE}.cuda",
            step=True,
            gaps=True,
            shared=True,
            missing=None if device.EMULATION else device.why_not(),
        ),
        Engine(
            name="mobius",
            summary="the paper's two scans over all of T, for comparison",
            devices=("cpu", "cuda"),
            location=f"{_PACKAGE}.torch.expanded:mobius",
            gaps=True,
        ),
        Engine(
            name="torch_scan",
            summary="one scan by torch's private associative_scan, for comparison",
            devices=("cpu", "cuda"),
            location=f"{_PACKAGE}.torch.expanded:torch_associative",
            gaps=True,
            eager_only=True,  # torch's scan uses vmap inside, which fails under dispatch modes
            missing=_torch_scan_missing(),
        ),
    )
}
"""Every engine behind the registered op, in the order ``auto`` prefers them."""

NATIVE = "cpu"
"""The engine that CPU tensors should use; without it they are some fifty times slower."""

_auto_means = ["auto"]  # a stack; a plain list because compilers cannot trace context variables

REFERENCE = "reference"
"""The loop of ``ops/reference.py``: plain torch code, differentiated by autograd."""


@contextlib.contextmanager
def use_engine(name: str) -> Iterator[None]:
    """Inside this context ``engine="auto"`` means ``name``, also in layers and models.

    A call that names an engine explicitly is not affected. A call that ``name`` cannot serve raises
    an error. The setting applies to the whole process, not to a thread.

    Args:
        name: an engine that ``kla check`` lists, ``"reference"``, or ``"auto"`` for the default.

    Raises:
        ValueError: there is no such engine.
    """
    _require_known(name)
    _auto_means.append(name)
    try:
        yield
    finally:
        _auto_means.pop()


def meant(name: str) -> str:
    """What the user chose through ``engine=`` or ``use_engine``; ``"auto"`` if neither was used.

    Raises:
        ValueError: there is no such engine.
    """
    _require_known(name)
    return _auto_means[-1] if name == "auto" else name


def resolve(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    step: bool = False,
    gaps: bool = False,
    slots: int = 1,
) -> str:
    """Name of the engine that serves a call.

    Args:
        name: an engine, or ``"auto"``.
        device: device of the tensors.
        dtype: dtype of v.
        step: whether it is a single token, for which ``"auto"`` needs a single-token kernel.
        gaps: whether the call has dt.
        slots: number of slots that share each precision.

    Returns:
        A key of ``ENGINES``, or ``REFERENCE``.

    Raises:
        ValueError: unknown name, or an engine that cannot serve the call.
    """
    name = meant(name)
    if name == "auto":
        return _auto(device, dtype, step, gaps=gaps, slots=slots)
    if name == REFERENCE:
        return name
    reason = ENGINES[name].why_not(device, dtype, gaps=gaps, slots=slots)
    if reason is not None:
        other = _auto(device, dtype, step, gaps=gaps, slots=slots)
        raise ValueError(
            f"engine {name!r} cannot serve this call: {reason}. "
            f"engine={other!r} can; so can engine='reference'."
        )
    return name


def _require_known(name: str) -> None:
    known = ["auto", REFERENCE, *ENGINES]
    if name not in known:
        raise ValueError(f"{unknown('engine', name, known)} See `kla check`.")


def _auto(
    device: torch.device,
    dtype: torch.dtype,
    step: bool,
    *,
    gaps: bool = False,
    slots: int = 1,
) -> str:
    for engine in ENGINES.values():  # in the order of preference
        reason = engine.why_not(device, dtype, gaps=gaps, slots=slots)
        wanted = device.type not in engine.never_auto and slots >= engine.least_slots
        if reason is None and wanted and (engine.step or not step):
            return engine.name
        # Not while compiling: a warning inside a graph would break it.
        if (
            engine.missing
            and engine.name == NATIVE
            and device.type == "cpu"
            and not torch.compiler.is_compiling()
        ):
            _warn_slow(engine.missing)
    return REFERENCE


@functools.cache
def _warn_slow(reason: str) -> None:
    """Warn once that the fast engine is missing; the call proceeds."""
    warnings.warn(
        f"kla_scan runs the slow torch engine on CPU tensors: {reason}. "
        "`kla check` shows what is usable; engine='associative' silences this.",
        stacklevel=5,
    )
