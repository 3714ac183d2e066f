"""The engines of this machine, for parametrised tests."""

import pytest
import torch
from _pytest.mark import ParameterSet

from kalman_attention.ops.engines import ENGINES, Engine
from tests.interpreter import INTERPRETING

CPU = torch.device("cpu")


def _parameter(engine: Engine) -> ParameterSet:
    reason = engine.why_not(CPU, torch.float32)
    skip = pytest.mark.skipif(reason is not None, reason=str(reason))
    return pytest.param(engine.name, marks=[skip])


_ON_CPU = [e for e in ENGINES.values() if not e.devices or "cpu" in e.devices]
EVERY_ENGINE = [_parameter(engine) for engine in _ON_CPU]
COMPILED_ENGINES = [_parameter(engine) for engine in _ON_CPU if not engine.eager_only]


def affordable(few: int, many: int) -> int:
    """How much of something to test: few in Triton's interpreter, many everywhere else."""
    return few if INTERPRETING else many
