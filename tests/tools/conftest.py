"""The roofline is counted in Triton's interpreter."""

from tests.interpreter import patch_once_per_launch

patch_once_per_launch()
