"""A sequence that is split over real processes is filtered as if it were whole."""

import pytest

from tests.parallel.launch import torchrun

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("ranks", [2, 4])
def test_values_and_gradients_are_those_of_the_whole(ranks):
    # Scans, layers and models in float64, to 1e-12: uneven cuts, empty pieces, padding.
    assert "exact" in torchrun(ranks, "tests.parallel.exactness")
