"""The paper's figures, as far as arithmetic can check them."""

import pytest

from kalman_attention import published
from kalman_attention.evaluation.questions import BENCHMARKS

MEANS = {
    "GPT-45M": 34.78,
    "Mamba-45M": 37.08,
    "GDN-45M": 36.25,
    "KLA-45M": 37.68,
    "GPT+KLA-45M": 38.33,
    "GPT-180M": 42.20,
    "Mamba-180M": 42.30,
    "GDN-180M": 41.93,
    "KLA-180M": 42.78,
    "GPT+KLA-180M": 44.95,
}
"""The last column of the same table."""


@pytest.mark.parametrize("model", published.ZERO_SHOT)
def test_means_are_those_of_the_paper(model):
    scores = published.ZERO_SHOT[model]
    assert len(scores) == len(BENCHMARKS)
    assert sum(scores) / len(scores) == pytest.approx(MEANS[model], abs=0.0051)
    right = [s * published.ZERO_SHOT_ITEMS / 100 for s in scores]
    assert right == pytest.approx([round(count) for count in right])
