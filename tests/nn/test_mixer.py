"""States as nested named tuples: one way through all of them."""

from typing import Any, NamedTuple

import torch

from kalman_attention.nn.mixer import map_state, state_tensors


class Inner(NamedTuple):
    mean: torch.Tensor
    note: Any


class Outer(NamedTuple):
    conv: torch.Tensor
    inner: Inner
    length: int


def test_states_are_walked():
    state = Outer(torch.zeros(3, 2), Inner(torch.ones(3), None), 7)
    assert [(name, tuple(x.shape)) for name, x in state_tensors(state)] == [
        ("conv", (3, 2)),
        ("inner.mean", (3,)),
    ]
    found = map_state(lambda x: x[:2], state)
    assert isinstance(found, Outer)
    assert isinstance(found.inner, Inner)
    assert (found.conv.shape, found.inner.mean.shape) == ((2, 2), (2,))
    assert (found.inner.note, found.length) == (None, 7)
    assert map_state(lambda x: x, None) is None
    assert not list(state_tensors(None))
