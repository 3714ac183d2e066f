"""Libraries that an extra of the package brings: imported when they are needed."""

import importlib
from typing import Any

_PACKAGES = {"sklearn": "scikit-learn"}
"""Names on the package index, where they are not those of the module."""


def library(name: str, extra: str) -> Any:
    """A module of another package; if it is missing, an error that names the extra.

    Args:
        name: of the module.
        extra: of this package that brings it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        module = name.partition(".")[0]
        raise ValueError(
            f"this needs {_PACKAGES.get(module, module)}, which is not installed: "
            f"pip install 'kalman_attention[{extra}]'"
        ) from error
