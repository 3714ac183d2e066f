"""Without the extra these tests are skipped, and say so."""

import importlib.util

import pytest

MISSING = "the data pipeline needs tokenizers: pip install 'kalman_attention[data]'"


class Skipped(pytest.Module):
    def collect(self):
        pytest.skip(MISSING, allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    if importlib.util.find_spec("tokenizers") is None:
        return Skipped.from_parent(parent, path=module_path)
    return None
