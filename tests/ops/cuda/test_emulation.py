"""The emulation itself: does it notice a kernel that is wrong?"""

import ctypes
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from kalman_attention.ops.cuda.params import ARRAYS, Params
from kalman_attention.ops.cuda.program import CSRC

GXX = shutil.which("g++")
pytestmark = pytest.mark.skipif(GXX is None, reason="g++ is not on PATH")

KERNELS = """
#include "params.h"
struct Box { float x[64]; };
template <int MODE> void turn(const kla::Params& p) {
  KLA_SHARED(Box, box);
  const int i = static_cast<int>(threadIdx.x);
  float* y = static_cast<float*>(p.y) + 64 * blockIdx.x;
  box.x[i] = static_cast<float>(i);
  if (MODE == 1 || (MODE == 2 && i < 3)) __syncthreads();
  if (MODE == 2) __shfl_xor_sync(~0u, 1.0f, 1);
  y[i] = box.x[63 - i];
}
KLA_KERNEL(missing_barrier, 64, 1) { turn<0>(p); }
KLA_KERNEL(right, 64, 1) { turn<1>(p); }
KLA_KERNEL(torn, 64, 1) { turn<2>(p); }
KLA_KERNEL(lanes, 64, 1) {
  const int i = static_cast<int>(threadIdx.x);
  static_cast<float*>(p.y)[i] = __shfl_xor_sync(~0u, static_cast<float>(i), 5);
}
"""
WORDS = [(name, 4 if name in ARRAYS else 1) for name in Params._fields]
Y = sum(size for name, size in WORDS[: Params._fields.index("y")])  # word that holds y


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("emulation")
    (folder / "kernels.cpp").write_text(KERNELS)
    sources = [str(folder / "kernels.cpp"), str(CSRC / "cuda/emulation/library.cpp")]
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-DKLA_EMULATE_CUDA", '-DKLA_PROGRAM="test"']
    target = str(folder / "test.so")
    assert GXX is not None
    subprocess.run([GXX, *flags, f"-I{CSRC / 'cuda'}", *sources, "-o", target], check=True)
    return ctypes.CDLL(str(Path(target)))


def run(library: ctypes.CDLL, name: bytes, seed: int) -> tuple[int, list[float]]:
    y = (ctypes.c_float * 128)()
    words = [0] * sum(size for _, size in WORDS)
    words[Y] = ctypes.addressof(y)
    params = struct.pack(f"={len(words)}q", *words)
    launch = library.kla_emulate
    launch.argtypes = [ctypes.c_char_p, ctypes.c_char_p, *[ctypes.c_int64] * 2, ctypes.c_char_p]
    launch.argtypes += [ctypes.c_int64, ctypes.c_uint64]
    blocks = 1 if name == b"lanes" else 2
    return launch(b"test", name, blocks, 64, params, len(params), seed), list(y)


TURNED = [63.0 - i for i in range(64)] * 2


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_right_kernel_is_right_in_every_order(library: ctypes.CDLL, seed: int) -> None:
    assert run(library, b"right", seed) == (0, TURNED)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_missing_barrier_shows(library: ctypes.CDLL, seed: int) -> None:
    status, y = run(library, b"missing_barrier", seed)
    assert status == 0
    assert any(x != x for x in y), "what was not yet written must read as NaN"


def test_threads_that_wait_for_ever_are_noticed(library: ctypes.CDLL) -> None:
    assert run(library, b"torn", 0)[0] == 3


@pytest.mark.parametrize("seed", [0, 3])
def test_shuffles_trade_within_a_warp(library: ctypes.CDLL, seed: int) -> None:
    assert run(library, b"lanes", seed)[1][:64] == [float(i ^ 5) for i in range(64)]
