"""Random systems for tests, in float64 unless told otherwise, and the one comparison used."""

from typing import Any, NamedTuple

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

from kalman_attention import KLAState


class System(NamedTuple):
    """The positional arguments of ``kla_scan``."""

    q: Tensor
    k: Tensor
    v: Tensor
    lam_v: Tensor
    a_bar: Tensor
    p_bar: Tensor


def random_system(
    B: int = 2, T: int = 7, N: int = 3, D: int = 2, *, seed: int = 0, negative: bool = True
) -> System:
    """A system with decays of both signs (unless told otherwise) and some process noise."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=g, dtype=torch.float64)

    sign = torch.where(uniform(0, 1, N, D) < 0.3, -1.0, 1.0) if negative else 1.0
    return System(
        q=normal(B, T, N),
        k=normal(B, T, N),
        v=normal(B, T, D),
        lam_v=uniform(0.1, 3.0, B, T, D),
        a_bar=uniform(0.3, 1.0, N, D) * sign,
        p_bar=uniform(0.01, 0.5, N, D),
    )


def random_state(rows: int = 2, N: int = 3, D: int = 2, *, seed: int = 1) -> KLAState:
    """A belief that is not the prior."""
    g = torch.Generator().manual_seed(seed)
    mean, spread = torch.randn(2, rows, N, D, generator=g, dtype=torch.float64)
    return KLAState(mean=mean, variance=0.1 + spread**2)


def assert_close(actual: Any, expected: Any, rtol: float = 1e-12, atol: float = 1e-13) -> None:
    """Equality of tensors, or of tuples of tensors, to float64 rounding."""
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


def examples(count: int) -> settings:
    """How hypothesis runs here: by count only, so that a busy machine fails nothing."""
    return settings(deadline=None, max_examples=count, suppress_health_check=[HealthCheck.too_slow])


def scalars(low: float, high: float) -> st.SearchStrategy[Tensor]:
    """Float64 tensors without axes, for hypothesis."""
    return st.floats(low, high).map(lambda x: torch.tensor(x, dtype=torch.float64))


decays = st.one_of(scalars(1e-3, 1.0), scalars(-1.0, -1e-3))
noises = st.one_of(scalars(1e-6, 10.0), st.just(torch.zeros((), dtype=torch.float64)))
precisions = st.one_of(scalars(1e-6, 1e3), st.just(torch.zeros((), dtype=torch.float64)))
reals = scalars(-10.0, 10.0)
variances = scalars(1e-3, 1e3)
