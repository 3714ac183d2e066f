"""The door to the GPU kernels: shut on CPU, and open it passes what the kernels take."""

import inspect
from functools import partial

import pytest
import torch

from kalman_attention.baselines import common, gated_deltanet, gla
from kalman_attention.benchmarks.mixers import hidden


def test_shut_on_cpu(monkeypatch):
    monkeypatch.setattr(common, "_load", lambda family, name: pytest.fail("was loaded"))
    k = v = torch.zeros(1, 4, 2, 3)
    assert common.fla_kernel("gla", "chunk_gla", k, v) is None


def test_absent_package_is_no_kernel():
    with hidden("fla"):
        assert common._load("no_such_family", "chunk") is None


def stand_in(installed, rule):
    """Takes what the installed kernel takes, by its own signature, and computes by our rule."""
    signature = inspect.signature(installed)

    def kernel(*args, **options):
        given = signature.bind(*args, **options).arguments
        assert {given[name].dtype for name in "qkv"} == {torch.bfloat16}
        assert given["g"].dtype == given["initial_state"].dtype == torch.float32
        assert given["output_final_state"]
        gates = [given[name] for name in ("g", "beta") if name in given]
        q = given["q"] * given["scale"]
        return rule(q, given["k"], given["v"], *gates, given["initial_state"])

    return kernel


@pytest.mark.filterwarnings("ignore")  # fla warns on import that there is no GPU
def test_calls(monkeypatch):
    pytest.importorskip("fla", reason="the signatures are those of the installed fla-core")
    q, k, v = (torch.randn(3, 1, 5, 2, 4) / 2).bfloat16()
    state = torch.zeros(1, 2, 4, 4)
    by_channel, by_head, beta = -torch.rand(1, 5, 2, 4), -torch.rand(1, 5, 2), torch.rand(1, 5, 2)
    for module, rule, recurrence, data in (
        (gla, gla.gla_chunked, gla.gla_recurrence, (q.float(), k, v, by_channel, state)),
        (
            gated_deltanet,
            gated_deltanet.delta_chunked,
            gated_deltanet.delta_recurrence,
            (q.float(), k.float(), v, by_head, beta, state),
        ),
    ):
        expected, asked = rule(*data), []

        def opened(family, name, k, v, asked=asked, recurrence=recurrence):
            installed = common._load(family, name)
            assert installed is not None, f"fla.ops.{family} has no {name}"
            asked.append(name)
            return partial(common._call, stand_in(installed, recurrence))

        monkeypatch.setattr(module, "fla_kernel", opened)
        for one, other in zip(rule(*data), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        assert len(asked) == 1
