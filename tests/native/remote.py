"""The native library in another process, which may run in an emulator: a plugin of pytest.

``KLA_REMOTE_CPU`` is the command of that process, ``[emulator] calls LIBRARY``
(``tests/native/calls.cpp``). With ``-p tests.native.remote`` every call of the ``cpu`` engine goes
there: its structs and all arrays that they point to are sent, and what was written comes back. The
tests of the engine need no change, and no PyTorch for the emulated machine; `make emulate` runs
them.
"""

import ctypes
import os
import shlex
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

from kalman_attention.ops.cpu import library

SIZES = (4, 8, 2, 2)
"""Bytes of a number, by the type codes of ``csrc/kla_scan.h``."""

CHUNK = 64
Words = tuple[int, ...]


class Piece(NamedTuple):
    """Memory of this process that an argument points to.

    Attributes:
        place: number of the struct and of the word in it that hold the address.
        address: where it is; 0 where the array is absent.
        size: bytes.
        written: whether the call writes it.
    """

    place: tuple[int, int]
    address: int
    size: int
    written: bool = False


def _array(words: Words, at: int, shape: tuple[int, int, int], of: int = 0) -> Piece:
    """A ``kla_array`` of a shape [B, T, width], in the type that it names."""
    address, stride_b, stride_t, dtype = words[at : at + 4]
    B, T, width = shape
    count = (B - 1) * stride_b + (T - 1) * stride_t + width if B and T else 0
    return Piece((of, at), address, count * SIZES[dtype])


def _bytes(words: Words, at: int, shape: tuple[int, int]) -> Piece:
    """A mask: bytes with two strides."""
    address, stride_b, stride_t = words[at : at + 3]
    B, T = shape
    return Piece((0, at), address, (B - 1) * stride_b + (T - 1) * stride_t + 1 if B and T else 0)


def scan(params: Words, grads: Words = (), map_at: int = 0, *, name: str) -> Iterator[Piece]:
    """Arrays of ``kla_scan_params`` and ``kla_scan_grads``."""
    B, T, N, G, D, R = params[6:12]
    real, dt_channels = SIZES[params[2]], params[36]
    forward = name == "kla_scan_forward"
    for at, width in ((12, D), (16, D), (20, N), (24, N), (32, dt_channels)):
        yield _array(params, at, (B, T, width))
    yield _bytes(params, 28, (B, T))
    means, variances = R * N * D * real, R * G * D * real
    for at, size in ((37, G * D * real), (38, G * D * real), (39, means), (40, variances)):
        yield Piece((0, at), params[at], size)
    yield Piece((0, 41), params[41], 8 * (R + 1))
    for at in (42, 43):
        yield Piece((0, at), params[at], B * T * D * SIZES[params[15]], True)
    yield Piece((0, 44), params[44], means, True)
    yield Piece((0, 45), params[45], variances, True)
    chunks = T // CHUNK + R if params[41] else B * -(-T // CHUNK)
    linear = params[1] == 1
    yield Piece((0, 46), params[46], chunks * (N if linear else N + G) * D * real, forward)
    if grads:
        yield from _scan_grads(params, grads, means, variances)
    if map_at:
        filtering = name == "kla_scan_filter_map"
        size = 2 * means + (3 if filtering else 2) * variances
        yield Piece((2 if grads else 1, 0), map_at, size, True)


def _scan_grads(params: Words, grads: Words, means: int, variances: int) -> Iterator[Piece]:
    B, T, N, G, D = params[6:11]
    real = SIZES[params[2]]
    for at in (0, 4):
        yield _array(grads, at, (B, T, D), of=1)
    yield Piece((1, 8), grads[8], means)
    yield Piece((1, 9), grads[9], variances)
    # In the order of the struct: the word of the type of the input, and the width.
    like = ((15, D), (19, D), (23, N), (27, N))
    for at, (dtype, width) in enumerate(like, start=10):
        yield Piece((1, at), grads[at], B * T * width * SIZES[params[dtype]], True)
    for at, size in ((14, G * D * real), (15, G * D * real), (16, means), (17, variances)):
        yield Piece((1, at), grads[at], size, True)
    yield Piece((1, 18), grads[18], B * T * params[36] * SIZES[params[35]], True)


def frames(params: Words, grads: Words = (), *, name: str) -> Iterator[Piece]:
    """Arrays of ``kla_frames_params`` and ``kla_frames_grads``."""
    B, T, G, m, n_h, R = params[4:10]
    forward, real = name == "kla_frames_forward", SIZES[params[3]]
    N, frame = G * m, R * G * m * m * 8
    for at, width in ((10, N), (14, N), (18, n_h * N)):
        yield _array(params, at, (B, T, width))
    yield _bytes(params, 22, (B, T))
    yield Piece((0, 26), params[26], 8 * (R + 1))
    for at in (27, 28):
        yield Piece((0, at), params[at], B * T * N * real, True)
    yield Piece((0, 29), params[29], frame, forward)
    if grads:
        for at in (0, 4):
            yield _array(grads, at, (B, T, N), of=1)
        yield Piece((1, 8), grads[8], frame)
        for at, width in ((9, N), (10, N), (11, n_h * N)):
            yield Piece((1, at), grads[at], B * T * width * real, True)


def conv(params: Words, grads: Words = (), *, name: str) -> Iterator[Piece]:
    """Arrays of ``kla_conv_params`` and ``kla_conv_grads``, float32."""
    B, T, D, K = params[2:6]
    yield _array((*params[6:9], 0), 0, (B, T, D))._replace(place=(0, 6))
    sizes = {9: B * (K - 1) * D, 10: K * D, 11: D}
    for at, count in sizes.items():
        yield Piece((0, at), params[at], 4 * count)
    yield Piece((0, 12), params[12], 4 * B * T * D, True)
    if grads:
        yield _array((*grads[:3], 0), 0, (B, T, D), of=1)
        for at, count in enumerate((B * T * D, *sizes.values()), start=3):
            yield Piece((1, at), grads[at], 4 * count, True)


def over_rows(params: Words, grads: Words = (), *, name: str) -> Iterator[Piece]:
    """Arrays of ``kla_softplus_params`` and ``kla_norm_params``, and of their gradients."""
    rows, D = params[4:6]
    real, softplus = SIZES[params[3]], name.startswith("kla_softplus")
    forward, result = name.endswith("forward"), rows * D * (4 if softplus else real)
    yield Piece((0, 6), params[6], ((rows - 1) * params[7] + D) * real if rows else 0)
    yield Piece((0, 8), params[8], 4 * D)
    at = 12 if softplus else 10
    yield Piece((0, at), params[at], result, forward)
    if grads:
        yield Piece((1, 0), grads[0], result)
        yield Piece((1, 1), grads[1], rows * D * real, True)
        yield Piece((1, 2), grads[2], 4 * D, True)


def memory(params: Words, grads: Words = (), *, name: str) -> Iterator[Piece]:
    """Arrays of ``kla_memory_params`` and ``kla_memory_grads``."""
    B, T, H, K, V, decays = params[4:10]
    forward, real = name == "kla_memory_forward", SIZES[params[3]]
    widths = (H * K, H * K, H * V, H * decays, H)  # of q, k, v, alpha, beta
    for at, width in zip(range(11, 31, 4), widths, strict=True):
        yield _array(params, at, (B, T, width))
    state = B * H * K * V * real
    yield Piece((0, 31), params[31], state)
    yield Piece((0, 32), params[32], B * T * H * V * real, True)
    yield Piece((0, 33), params[33], state, True)
    yield Piece((0, 34), params[34], -(-T // CHUNK) * state, forward)
    yield Piece((0, 35), params[35], B * T * H * V * real if params[10] else 0, forward)
    if grads:
        yield _array(grads, 0, (B, T, H * V), of=1)
        yield Piece((1, 4), grads[4], state)
        for at, width in enumerate(widths, start=5):
            yield Piece((1, at), grads[at], B * T * width * real, True)
        yield Piece((1, 10), grads[10], state, True)


def _matrix(words: Words, at: int, real: int) -> Iterator[Piece]:
    weight, bias, out, width = words[at : at + 4]
    yield Piece((0, at), weight, out * width * real)
    yield Piece((0, at + 1), bias, out * real)


def product(params: Words, *, name: str) -> Iterator[Piece]:
    """Arrays of ``kla_product_params``."""
    R, real = params[4], SIZES[params[3]]
    yield from _matrix(params, 5, real)
    yield Piece((0, 9), params[9], R * params[8] * real)
    yield Piece((0, 10), params[10], R * params[7] * real, True)


def layer(params: Words, *, name: str) -> Iterator[Piece]:
    """Arrays of ``kla_layer_params``."""
    real = SIZES[params[3]]
    R, N, G, D, K = params[4:9]
    width, window = params[20], R * max(K - 1, 0) * D * real
    yield Piece((0, 16), params[16], width * real)
    for at in (17, 23, 27, 31, 39):
        yield from _matrix(params, at, real)
    yield Piece((0, 21), params[21], K * D * real)
    for at in (22, 36, 37, 38):
        yield Piece((0, at), params[at], D * real)
    yield Piece((0, 35), params[35], 4 * D)
    for at in (43, 44):
        yield Piece((0, at), params[at], 4 * G * D)
    yield Piece((0, 45), params[45], R)
    sizes = (R * width * real, window, 4 * R * N * D, 4 * R * G * D)
    for at, size in enumerate((*sizes, *sizes), start=46):
        yield Piece((0, at), params[at], size, at >= 50)


FUNCTIONS: dict[str, Callable[..., Iterator[Piece]]] = {
    "kla_scan_forward": scan,
    "kla_scan_backward": scan,
    "kla_scan_smooth": scan,
    "kla_scan_smooth_backward": scan,
    "kla_scan_filter_map": lambda params, at, *, name: scan(params, map_at=at, name=name),
    "kla_scan_adjoint_map": scan,
    "kla_frames_forward": frames,
    "kla_frames_backward": frames,
    "kla_conv_forward": conv,
    "kla_conv_backward": conv,
    "kla_softplus_forward": over_rows,
    "kla_softplus_backward": over_rows,
    "kla_norm_forward": over_rows,
    "kla_norm_backward": over_rows,
    "kla_memory_forward": memory,
    "kla_memory_backward": memory,
    "kla_product": product,
    "kla_layer_step": layer,
}


class Remote:
    """Looks like the loaded library; one call at a time.

    Args:
        command: the process that runs the calls.
    """

    def __init__(self, command: list[str]) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe)
        self._lock = threading.Lock()
        self.calls = 0

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name not in FUNCTIONS:
            raise AttributeError(name)
        return lambda *arguments: self._call(name, arguments)

    def kla_abi_version(self) -> int:
        return self._send("kla_abi_version", [], [])

    def kla_isa_available(self) -> int:
        return self._send("kla_isa_available", [], [])

    def kla_pool_in_use(self) -> int:
        return self._send("kla_pool_in_use", [], [])

    def kla_status_text(self, status: int) -> bytes:
        return f"status {status} from {self._process.args}".encode()

    def _call(self, name: str, arguments: tuple[bytes | int, ...]) -> int:
        structs = [x for x in arguments if isinstance(x, bytes)]
        read = [
            struct.unpack(f"={len(x) // 8}q", x) if isinstance(x, bytes) else x for x in arguments
        ]
        pieces = FUNCTIONS[name](*read, name=name)
        return self._send(name, structs, [piece for piece in pieces if piece.address])

    def _send(self, name: str, structs: list[bytes], pieces: list[Piece]) -> int:
        memory, places = bytearray(), []
        for piece in pieces:
            memory += bytes(-len(memory) % 64)
            places += [*piece.place, len(memory)]
            memory += ctypes.string_at(piece.address, piece.size)
        head = struct.pack("=4q", len(name), len(structs), len(pieces), len(memory))
        words = [struct.pack("=q", len(x) // 8) + x for x in structs]
        request = [head, name.encode(), *words, struct.pack(f"={len(places)}q", *places), memory]
        with self._lock:
            self.calls += 1
            result, found = self._ask(b"".join(request), len(memory))
        for piece, offset in zip(pieces, places[2::3], strict=True):
            if piece.written:
                ctypes.memmove(piece.address, found[offset : offset + piece.size], piece.size)
        return result

    def _ask(self, request: bytes, size: int) -> tuple[int, bytes]:
        to, back = self._process.stdin, self._process.stdout
        assert to is not None
        assert back is not None
        to.write(request)
        to.flush()
        answer = back.read(8 + size)
        if len(answer) != 8 + size:
            raise RuntimeError(f"{self._process.args} ended with {self._process.wait()}")
        return struct.unpack_from("=q", answer)[0], answer[8:]

    def close(self) -> None:
        """Let the process end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def install(command: list[str]) -> Remote:
    """Send all calls of the engine to a new process from now on."""
    remote = Remote(command)
    library._open = lambda: (remote, "")  # type: ignore[assignment,return-value]
    return remote


if "pytest" in sys.modules and "KLA_REMOTE_CPU" in os.environ:
    REMOTE = install(shlex.split(os.environ["KLA_REMOTE_CPU"]))

    def pytest_report_header() -> str:
        """Say which code the tests are about."""
        info = library.info()
        return f"cpu engine: {os.environ['KLA_REMOTE_CPU']}, ABI {info.abi}, {', '.join(info.isas)}"

    def pytest_terminal_summary(terminalreporter) -> None:
        """A plugin that no call went through would prove nothing."""
        terminalreporter.write_line(f"{REMOTE.calls} calls of the native library ran there")

    def pytest_unconfigure() -> None:
        """Nothing is left running."""
        REMOTE.close()
