"""Estimates of a series at given times: means, variances, and bands."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kalman_attention.series.data import Stamps, pandas

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """Gaussian estimates at time stamps.

    Attributes:
        stamps: the time stamps.
        mean: ``[T]``, or ``[T, D]`` for D series with the same stamps.
        variance: of the shape of the mean; infinite where nothing is known yet.
        names: names of D series.
    """

    stamps: Stamps
    mean: Array
    variance: Array
    names: Sequence[Hashable] | None = None

    def __len__(self) -> int:
        return len(self.mean)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """The mean, for functions that accept an array."""
        return np.array(self.mean, dtype=dtype, copy=True if copy is None else copy)

    @property
    def times(self) -> NDArray[Any]:
        """The time stamps, as numbers or dates."""
        return self.stamps.labels

    @property
    def std(self) -> Array:
        """Standard deviation."""
        found: Array = np.sqrt(self.variance)
        return found

    @property
    def predicted_mean(self) -> Any:
        """The mean, as a pandas object if the stamps come from pandas."""
        return labelled(self.mean, self.stamps, self.names)

    @property
    def se_mean(self) -> Array:
        """Standard deviation, under the name that statsmodels uses."""
        return self.std

    @staticmethod
    def quantile(share: float) -> float:
        """Quantile of the standard normal distribution."""
        return math.sqrt(2.0) * float(torch.erfinv(torch.tensor(2.0 * share - 1.0).double()))

    def bounds(self, alpha: float = 0.05) -> tuple[Array, Array]:
        """Lower and upper end of bands of level 1 - alpha."""
        if not 0.0 < alpha < 1.0:
            raise ValueError(
                f"alpha must be between 0 and 1, got {alpha}: it is one minus the level, 0.05 for "
                "95 % bands."
            )
        half = self.quantile(1.0 - 0.5 * alpha) * self.std
        return self.mean - half, self.mean + half

    def conf_int(self, alpha: float = 0.05) -> Array:
        """Bands of level 1 - alpha, ``[T, 2]`` (``[T, D, 2]``): lower and upper end."""
        return np.stack(self.bounds(alpha), -1)

    def summary_frame(self, alpha: float = 0.05) -> Any:
        """A pandas table with the columns of statsmodels: mean, standard error and bands.

        Args:
            alpha: one minus the level of the bands.
        """
        if self.mean.ndim > 1:
            raise ValueError("a table shows one series: call results[i] for one of them.")
        lower, upper = self.bounds(alpha)
        columns = {
            "mean": self.mean,
            "mean_se": self.std,
            "mean_ci_lower": lower,
            "mean_ci_upper": upper,
        }
        return pandas().DataFrame(columns, index=self.stamps.pandas_index())


def labelled(values: Array, stamps: Stamps, names: Sequence[Hashable] | None) -> Any:
    """Numbers ``[T]`` or ``[T, D]``, as pandas objects if the stamps come from pandas."""
    if stamps.index is None:
        return values
    if names is None:
        return pandas().Series(values, index=stamps.index)
    return pandas().DataFrame(values, index=stamps.index, columns=list(names))
