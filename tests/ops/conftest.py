"""Make uninitialised memory loud: every ``torch.empty`` of an op test is filled with NaN."""

from collections.abc import Iterator

import pytest
import torch

from tests.interpreter import patch_once_per_launch

patch_once_per_launch()


@pytest.fixture(autouse=True)
def _loud_memory() -> Iterator[None]:
    # Deterministic mode fills empty tensors with NaN, and forbids nondeterministic kernels.
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
