"""The door to the GPU kernels: shut on CPU, and what is passed through it when it is open."""

from functools import partial

import pytest
import torch

from kalman_attention.baselines import fla_kernels, gated_deltanet, gla
from kalman_attention.cli.bench_mixers import hidden


def test_shut_on_cpu(monkeypatch):
    monkeypatch.setattr(fla_kernels, "_load", lambda family, name: pytest.fail("was loaded"))
    k = v = torch.zeros(1, 4, 2, 3)
    assert fla_kernels.fla_kernel("gla", "chunk_gla", k, v) is None


def test_absent_package_is_no_kernel():
    with hidden("fla"):
        assert fla_kernels._load("no_such_family", "chunk") is None


def test_calls(monkeypatch):
    def chunk_gla(q, k, v, g, scale, initial_state, output_final_state):
        assert q.dtype == k.dtype == v.dtype == torch.bfloat16
        assert g.dtype == initial_state.dtype == torch.float32
        assert output_final_state
        return gla.gla_recurrence(q * scale, k, v, g, initial_state)

    def chunk_delta(q, k, v, g, beta, scale, initial_state, output_final_state):
        assert q.dtype == k.dtype == v.dtype == torch.bfloat16
        assert output_final_state
        return gated_deltanet.delta_recurrence(q * scale, k, v, g, beta, initial_state)

    q, k, v = (torch.randn(3, 1, 5, 2, 4) / 2).bfloat16()
    state = torch.zeros(1, 2, 4, 4)
    by_channel, by_head, beta = -torch.rand(1, 5, 2, 4), -torch.rand(1, 5, 2), torch.rand(1, 5, 2)
    for module, kernel, rule, data in (
        (gla, chunk_gla, gla.gla_chunked, (q.float(), k, v, by_channel, state)),
        (
            gated_deltanet,
            chunk_delta,
            gated_deltanet.delta_chunked,
            (q.float(), k.float(), v, by_head, beta, state),
        ),
    ):
        expected = rule(*data)
        opened = partial(fla_kernels._call, kernel)
        monkeypatch.setattr(module, "fla_kernel", lambda family, name, k, v, opened=opened: opened)
        for one, other in zip(rule(*data), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
