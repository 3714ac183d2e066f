"""Compile every kernel ahead of time, without a device, and collect what ptxas reports."""

import re
import subprocess
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from kalman_attention.ops.contract import CHUNK
from kalman_attention.ops.triton.bwd import (
    COLUMNS,
    adjoint_kernel,
    adjoint_summary_kernel,
    incoming_kernel,
    sum_kernel,
)
from kalman_attention.ops.triton.fwd import (
    filter_kernel,
    starts_kernel,
    step_kernel,
    summary_kernel,
)
from kalman_attention.ops.triton.launch import OPTIONS
from kalman_attention.ops.triton.schedule import (
    BACKWARD_LANES,
    FORWARD_LANES,
    WINDOW,
    cut,
    lanes_for,
)
from kalman_attention.tools.resources import KernelResources

NAMES = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}

TOKENS = ("q", "k", "v", "lam_v", "dt", "y", "y_var", "dy", "dy_var", "dv", "dlam_v")
"""Arrays in the dtype of the tokens; all others are in that of the arithmetic."""

FIXED = {"mask": "*u8", "cu_seqlens": "*i64", "dynamics": "*fp64"}
"""Arrays with a fixed dtype."""

PLAIN = ("mask", "cu_seqlens", "y_var", "saved")
"""Optional arguments of a forward pass."""

SLOTS = (16, 32)
"""N of the variants; the paper's language models have 16 and 32."""


class Variant(NamedTuple):
    """One way to compile a kernel.

    Attributes:
        kernel: the function.
        lanes: lanes of a program.
        tokens: dtype of q, k, v, lam_v.
        N: slots.
        share: slots that share a variance.
        absent: arguments that are None.
        gaps: whether time passes between tokens.
        what: description of the variant.
    """

    kernel: Any
    lanes: int
    tokens: torch.dtype = torch.float32
    N: int = SLOTS[0]
    share: int = 1
    absent: tuple[str, ...] = ()
    gaps: bool = False
    what: str = "all options"

    @property
    def arithmetic(self) -> torch.dtype:
        """Dtype of beliefs and dynamics."""
        return torch.float64 if self.tokens == torch.float64 else torch.float32

    def __str__(self) -> str:
        tile = self.constants()
        name = str(self.tokens).removeprefix("torch.")
        if "BLOCK_G" not in tile:
            return name
        sizes = [tile[f"BLOCK_{axis}"] for axis in "MGD"]
        lanes = " x ".join(str(x) for x in sizes if x > 1)
        return f"{name}, {lanes} lanes, {self.what}"

    def constants(self) -> dict[str, Any]:
        """Constants of the kernel at the sizes of the paper's shape, and absent arguments."""
        plain = self.share == 1 and not self.gaps
        lanes = lanes_for(self.arithmetic, self.lanes, plain=plain)
        tile = cut(1, CHUNK, self.N, 960, lanes, self.share)
        every = {
            "CHUNK": CHUNK,
            "WINDOW": WINDOW,
            "BLOCK": COLUMNS,
            "BLOCK_M": tile.block_m,
            "BLOCK_G": tile.block_g,
            "BLOCK_D": tile.block_d,
        }
        found = {p.name: every[p.name] for p in self.kernel.params if p.is_constexpr}
        absent = self.absent if self.gaps else (*self.absent, "dt", "ddt")
        return found | {p.name: None for p in self.kernel.params if p.name in absent}

    def signature(self) -> dict[str, str]:
        """Type of every argument."""
        constants = self.constants()
        types = {p.name: p.annotation_type or self._type(p.name) for p in self.kernel.params}
        return types | dict.fromkeys(constants, "constexpr")

    def _type(self, name: str) -> str:
        if name in FIXED:
            return FIXED[name]
        if name in TOKENS:
            return f"*{NAMES[self.tokens]}"
        return f"*{NAMES[self.arithmetic]}"


def variants() -> Iterator[Variant]:
    """Every kernel as a call in float32, bfloat16, half or float64 would compile it."""
    main = Variant(filter_kernel, FORWARD_LANES), Variant(adjoint_kernel, BACKWARD_LANES)
    others = (
        Variant(summary_kernel, FORWARD_LANES),
        Variant(starts_kernel, FORWARD_LANES),
        Variant(adjoint_summary_kernel, BACKWARD_LANES),
        Variant(incoming_kernel, BACKWARD_LANES),
        Variant(step_kernel, FORWARD_LANES),
        Variant(sum_kernel, 1),
    )
    bare = (PLAIN, ("mask", "cu_seqlens", "dy_var"))
    for variant, absent in zip(main, bare, strict=True):
        yield variant
        yield variant._replace(absent=absent, what="no options")
        yield variant._replace(tokens=torch.bfloat16)
        yield variant._replace(tokens=torch.float16)
        yield variant._replace(tokens=torch.float64)
        yield variant._replace(N=SLOTS[1])
        yield variant._replace(share=SLOTS[0], what="one block of slots")
        yield variant._replace(share=4, what="blocks of four slots")
        yield variant._replace(gaps=True, what="gaps")
        yield variant._replace(gaps=True, tokens=torch.float64, what="gaps")
        yield variant._replace(gaps=True, share=4, what="gaps, blocks of four slots")
    for variant in others:
        yield variant
        yield variant._replace(tokens=torch.float64)
        if variant.kernel is not sum_kernel:
            yield variant._replace(share=4, what="blocks of four slots")
        if any(p.name == "dt" for p in variant.kernel.params):
            yield variant._replace(gaps=True, what="gaps")


def resources(architectures: Sequence[str]) -> list[KernelResources]:
    """Compile all variants for all architectures, such as ``["sm_80", "sm_90"]``.

    Needs no device. Not possible in Triton's interpreter (TRITON_INTERPRET=1).
    """
    return [measure(variant, arch) for arch in architectures for variant in variants()]


def measure(variant: Variant, architecture: str) -> KernelResources:
    """Compile one variant and parse what ptxas reports about it."""
    compiled = compile_variant(variant, architecture)
    ptx = compiled.asm["ptx"]
    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assert target is not None
    said = _assemble(ptx, target[1])
    registers = re.search(r"Used (\d+) registers", said)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert registers is not None, said
    assert spills is not None, said
    return KernelResources(
        kernel=variant.kernel.__name__,
        variant=str(variant),
        architecture=architecture,
        registers=int(registers[1]),
        spill_bytes=int(spills[1]) + int(spills[2]),
        shared_bytes=compiled.metadata.shared,
    )


def compile_variant(variant: Variant, architecture: str) -> Any:
    """The compiled kernel, with its intermediate forms in ``asm``."""
    if not hasattr(variant.kernel, "params"):
        raise ValueError("kernels cannot be compiled while TRITON_INTERPRET=1 is set; unset it")
    source = ASTSource(
        fn=variant.kernel, signature=variant.signature(), constexprs=variant.constants()
    )
    target = GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return triton.compile(source, target=target, options=OPTIONS)


def _assemble(ptx: str, target: str) -> str:
    """The output of ``ptxas -v`` for a piece of PTX, with the options that Triton passes."""
    number = int(re.findall(r"\d+", target)[0])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [get_ptxas(number).path, "-v", "-lineinfo", "--regAllocOptLevel=2"]
        command += [f"--gpu-name={target}", str(path), "-o", f"{path}.cubin"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr
