"""The door to the GPU kernels: shut on CPU, and what is passed through it when it is open."""

from functools import partial

import pytest
import torch

from kalman_attention.baselines import fla_kernels, gla


def test_shut_on_cpu(monkeypatch):
    monkeypatch.setattr(fla_kernels, "_load", lambda family, name: pytest.fail("was loaded"))
    assert fla_kernels.fla_kernel("gla", "chunk_gla", torch.zeros(1, 4, 2, 3)) is None


def test_absent_package_is_no_kernel():
    assert fla_kernels._load("no_such_family", "chunk") is None


def test_call_of_gla(monkeypatch):
    def chunk_gla(q, k, v, g, scale, initial_state, output_final_state):
        assert q.dtype == k.dtype == v.dtype == torch.bfloat16
        assert g.dtype == initial_state.dtype == torch.float32
        assert output_final_state
        return gla.gla_recurrence(q * scale, k, v, g, initial_state)

    kernel = partial(fla_kernels._call, chunk_gla)
    q, k, v = torch.randn(3, 1, 5, 2, 4).bfloat16()
    data = q.float(), k, v, -torch.rand(1, 5, 2, 4), torch.zeros(1, 2, 4, 4)
    expected = gla.gla_chunked(*data)
    monkeypatch.setattr(gla, "fla_kernel", lambda family, name, v: kernel)
    for one, other in zip(gla.gla_chunked(*data), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
