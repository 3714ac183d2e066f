"""What the tests of many processes share."""

import pytest
import torch

from tests.train.conftest import no_flush as no_flush


@pytest.fixture
def one_thread():
    """Every process has one thread: those of the tests share two cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
