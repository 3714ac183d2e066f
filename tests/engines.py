"""The engines of this machine, for parametrised tests."""

import pytest
import torch

from kalman_attention.ops.engines import ENGINES

CPU = torch.device("cpu")

EVERY_ENGINE = [
    pytest.param(
        engine.name,
        marks=[
            pytest.mark.skipif(
                (reason := engine.why_not(CPU, torch.float32)) is not None, reason=str(reason)
            )
        ],
    )
    for engine in ENGINES.values()
    if not engine.devices or "cpu" in engine.devices
]
