"""The byte counts of the roofline are those of the kernels, load by load and store by store."""

import pytest
import torch

from kalman_attention.ops.triton.schedule import BACKWARD_LANES, FORWARD_LANES
from kalman_attention.tools.roofline import (
    DEVICES,
    Sizes,
    Tiling,
    backward_work,
    expanded_bytes,
    forward_work,
    least_bytes,
)
from kalman_attention.tools.selfcheck import Case, make_call
from tests.interpreter import INTERPRETING, WINDOW, shrink

SIZES = Sizes(B=1, T=37, D=5, N=3)


class Counter:
    def __init__(self) -> None:
        self.bytes = 0


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """Counts the bytes of all loads and stores that the interpreter executes."""
    pytest.importorskip("triton")
    if not INTERPRETING:
        pytest.skip("needs TRITON_INTERPRET=1")
    from triton.runtime import interpreter

    builder, count = type(interpreter.interpreter_builder), Counter()
    load, store = builder.create_masked_load, builder.create_masked_store

    def note(pointers, mask) -> None:
        element = pointers.get_element_ty()
        count.bytes += int(mask.data.sum()) * element.primitive_bitwidth // 8

    def counted_load(self, pointers, mask, *rest):
        note(pointers, mask)
        return load(self, pointers, mask, *rest)

    def counted_store(self, pointers, value, mask, *rest):
        note(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    monkeypatch.setattr(builder, "create_masked_load", counted_load)
    monkeypatch.setattr(builder, "create_masked_store", counted_store)
    return count


@pytest.mark.parametrize("fill", [1, 512], ids=["serial", "split"])
def test_bytes_are_counted_as_the_kernels_move_them(
    counter: Counter, fill: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kalman_attention.ops.checks import check_scan
    from kalman_attention.ops.triton import backward, forward

    shrink(monkeypatch, fill=fill, lanes=16)
    B, T, D, N = SIZES
    tensors = [x.float() for x in make_call(Case(B=B, T=T, N=N, D=D)).tensors[:6]]
    inputs = check_scan(*tensors, None, None, None)
    tiling = Tiling.of(SIZES, 16)._replace(window=WINDOW)
    assert (tiling.segments > 1) == (fill > 1)
    result = forward(inputs, return_variance=False, save=True)
    assert counter.bytes == forward_work(SIZES, tiling, save=True).requested_bytes
    counter.bytes = 0
    backward(inputs, result.checkpoints, torch.ones_like(inputs.v), None, None, None)
    assert counter.bytes == backward_work(SIZES, tiling).requested_bytes


def test_memory_never_moves_more_than_asked_for_nor_less_than_the_least() -> None:
    for sizes in (Sizes(1, 65_536, 960, 16), Sizes(32, 2048, 960, 16), Sizes(4, 512, 256, 32)):
        passes = {
            False: forward_work(sizes, Tiling.of(sizes, FORWARD_LANES), save=False),
            True: backward_work(sizes, Tiling.of(sizes, BACKWARD_LANES)),
        }
        for backward, work in passes.items():
            assert least_bytes(sizes, backward=backward) <= work.memory_bytes
            assert work.memory_bytes <= work.requested_bytes
            assert work.memory_bytes < expanded_bytes(sizes, backward=backward)
            for device in DEVICES:
                assert work.seconds(device) >= work.memory_bytes / device.bandwidth
