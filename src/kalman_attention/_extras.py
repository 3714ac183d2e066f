"""Libraries of optional extras, imported when they are needed."""

import importlib
from typing import Any

_PACKAGES = {"sklearn": "scikit-learn"}
"""Names on the package index that differ from the name of the module."""


def library(name: str, extra: str) -> Any:
    """Import a module of another package; if it is missing, the error names the extra.

    Args:
        name: name of the module.
        extra: extra of this package that installs it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        module = name.partition(".")[0]
        raise ValueError(
            f"this needs {_PACKAGES.get(module, module)}, which is not installed: "
            f"pip install 'kalman_attention[{extra}]'"
        ) from error
