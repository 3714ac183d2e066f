"""What the tests of many processes share."""

import pytest
import torch


@pytest.fixture
def one_thread():
    """Every process has one thread: those of the tests share two cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
