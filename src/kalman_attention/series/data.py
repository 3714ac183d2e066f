"""Input data: arrays, tensors or pandas, with time stamps of any spacing and missing values.

NaN is a missing value: time passes and nothing is observed. Time stamps must be sorted. Two values
with the same stamp are two observations of one instant, which a gap of 0 treats exactly.
"""

import datetime
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]

_LARGEST = 1e75
"""Largest value: covariances of variances grow with the fourth power of the values."""


@dataclass(frozen=True)
class Stamps:
    """Time stamps of a series.

    Attributes:
        labels: the stamps as given, ``[T]``: numbers, or ``datetime64``.
        unit: the unit of time if the stamps are dates; None if they are numbers.
        index: the pandas index that they come from, for results returned as pandas objects.
    """

    labels: Array
    unit: np.timedelta64 | None = None
    index: Any = None

    def __len__(self) -> int:
        return len(self.labels)

    def elapsed(self, since: Any = None) -> NDArray[np.float64]:
        """Time since the first stamp, or since another one, in units."""
        past = self.labels - (self.labels[0] if since is None else since)
        # Dividing dates by a unit casts both to the finer resolution, in which centuries overflow.
        scale = 1.0 if self.unit is None else _resolution(past) / self.unit
        found: NDArray[np.float64] = (
            past.astype(np.int64 if self.unit is not None else float) * scale
        )
        return found

    def later(self, steps: int) -> "Stamps":
        """Stamps after the last one at the typical gap; a pandas frequency continues exactly."""
        offset = getattr(self.index, "freq", None) or getattr(self.index, "inferred_freq", None)
        if self.unit is not None and offset is not None:
            index = pandas().date_range(self.index[-1], periods=steps + 1, freq=offset)[1:]
            return Stamps(_dates(index), self.unit, index)
        gaps = np.diff(self.labels)
        gaps = gaps[gaps > gaps.dtype.type(0)]
        if not len(gaps):
            raise ValueError("one time stamp has no spacing: pass the time stamps to forecast.")
        ahead = Stamps(self.labels[-1] + np.median(gaps) * np.arange(1, steps + 1), self.unit)
        index = None if self.index is None else ahead.pandas_index()
        return Stamps(ahead.labels, self.unit, index)

    def filled(self, count: int) -> "Stamps":
        """The stamps, and evenly spaced ones between the first and the last."""
        first, span = self.labels[0], self.labels[-1] - self.labels[0]
        between = first + span * np.arange(1, count) / count
        return Stamps(np.sort(np.concatenate([self.labels, between])), self.unit)

    def pandas_index(self) -> Any:
        """The stamps as a pandas index."""
        return pandas().Index(self.labels) if self.index is None else self.index


@dataclass(frozen=True)
class Panel:
    """One or more series, as input of the filter.

    Attributes:
        v: values, 0 where missing, ``[B, T]`` float64.
        seen: where there is a value, ``[B, T]``.
        dt: time before each value, 0 before the first and in padding, ``[B, T]``.
        stamps: time stamps of every series.
        names: names of the series; None for a series without one.
        shape: ``"one"``, ``"columns"`` (all with the same stamps) or ``"rows"`` (different ones).
    """

    v: Tensor
    seen: Tensor
    dt: Tensor
    stamps: Sequence[Stamps]
    names: Sequence[Hashable]
    shape: str = "one"

    @property
    def nobs(self) -> int:
        """Number of values that are not missing."""
        return int(self.seen.sum())

    def row(self, i: int) -> "Panel":
        """One of the series."""
        T = len(self.stamps[i])
        return Panel(
            v=self.v[i : i + 1, :T],
            seen=self.seen[i : i + 1, :T],
            dt=self.dt[i : i + 1, :T],
            stamps=[self.stamps[i]],
            names=[self.names[i]],
        )

    def at(self, extra: Stamps) -> "tuple[Panel, Tensor]":
        """The same values with additional stamps, and the positions of these, ``[n]``.

        An additional stamp comes after the values of that instant, with a gap of 0 between them.
        """
        (own,) = self.stamps
        if (own.unit is None) != (extra.unit is None):
            raise ValueError(
                "the stamps of the series and those passed must both be dates, or both numbers."
            )
        both = np.concatenate([own.elapsed(), extra.elapsed(own.labels[0])])
        order = np.argsort(both, kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        start, T = both[order[0]], len(own)
        pad = torch.zeros(1, len(extra), dtype=torch.float64)
        v, seen = torch.cat([self.v, pad], 1), torch.cat([self.seen, pad.bool()], 1)
        dt = np.diff(both[order], prepend=start)[None]
        found = Panel(
            v=v[:, order],
            seen=seen[:, order],
            dt=torch.from_numpy(dt),
            stamps=[own],
            names=self.names,
        )
        return found, torch.from_numpy(place[T:])


def read_panel(y: Any, times: Any = None, time_unit: Any = "D") -> Panel:
    """Read and check the values and time stamps of one or more series.

    Args:
        y: ``[T]``, or ``[T, D]`` for D series with the same stamps, as array, tensor or pandas; or
            a list of series of different lengths.
        times: stamps ``[T]``, or a list of them; by default the index of pandas, or 0, 1, 2 ...
        time_unit: the unit of time if stamps are dates: a numpy code such as "s", "h" or "D", or a
            timedelta.
    """
    if isinstance(y, list | tuple) and len(y) and np.ndim(y[0]) > 0:
        return _rows(y, times, time_unit)
    values = _values(y)
    stamps = read_stamps(times if times is not None else _index(y, len(values)), time_unit)
    if len(stamps) != len(values):
        raise ValueError(f"there are {len(values)} values and {len(stamps)} time stamps.")
    columns = values if values.ndim == 2 else values[:, None]
    names = list(getattr(y, "columns", range(columns.shape[1])))
    if values.ndim == 1:
        names = [getattr(y, "name", None)]
    shape = "one" if values.ndim == 1 else "columns"
    return _panel([(column, stamps) for column in columns.T], names, shape)


def read_stamps(times: Any, time_unit: Any = "D") -> Stamps:
    """Read time stamps and check that they are finite and sorted."""
    index = times if _is_pandas(times) and not hasattr(times, "iloc") else None
    if hasattr(index, "to_timestamp"):
        index = times = times.to_timestamp()  # a PeriodIndex: a period stands for its beginning
    labels = _labels(times)
    if labels.ndim != 1:
        raise ValueError(f"time stamps have shape {labels.shape}: pass one for each value, [T].")
    if labels.dtype.kind == "M":
        bad, unit = np.isnat(labels), _time_unit(time_unit)
    else:
        bad, unit = ~np.isfinite(labels), None
    if bad.any():
        raise ValueError(
            f"time stamp {int(bad.argmax())} is {labels[bad][0]}: remove or correct it."
        )
    back = labels[1:] < labels[:-1]
    if back.any():
        i = int(back.argmax()) + 1
        raise ValueError(
            f"time stamp {i}, {labels[i]}, is earlier than the previous one, {labels[i - 1]}: sort "
            "values and stamps together (pandas: y.sort_index()). Equal stamps are allowed."
        )
    return Stamps(labels, unit, index)


def _rows(y: Sequence[Any], times: Any, time_unit: Any) -> Panel:
    given = [None] * len(y) if times is None else times
    if len(given) != len(y):
        raise ValueError(f"there are {len(y)} series and time stamps for {len(given)}.")
    panels = [read_panel(_flat(x), t, time_unit) for x, t in zip(y, given, strict=True)]
    if any(panel.shape != "one" for panel in panels):
        raise ValueError(
            "every element of a list must be a series, [T]; for columns pass an array."
        )
    names = [panel.names[0] if panel.names[0] is not None else i for i, panel in enumerate(panels)]
    pairs = [(np.where(p.seen[0], p.v[0], np.nan), stamps) for p in panels for stamps in p.stamps]
    return _panel(pairs, names, "rows")


def _flat(x: Any) -> Any:
    if np.ndim(x) != 1:
        raise ValueError(f"a series in the list has shape {np.shape(x)}: each must be [T].")
    return x


def _panel(series: Sequence[tuple[Array, Stamps]], names: Sequence[Hashable], shape: str) -> Panel:
    T = max(len(stamps) for _, stamps in series)
    v, dt = np.full((len(series), T), np.nan), np.zeros((len(series), T))
    for i, (values, stamps) in enumerate(series):
        v[i, : len(values)] = values
        dt[i, 1 : len(values)] = np.diff(stamps.elapsed())
    seen = ~np.isnan(v)
    empty = ~seen.any(1)
    if empty.any():
        which = "" if shape == "one" else f" of series {names[int(empty.argmax())]!r}"
        raise ValueError(f"all values{which} are missing (NaN): there is nothing to learn from.")
    return Panel(
        v=torch.from_numpy(np.where(seen, v, 0.0)),
        seen=torch.from_numpy(seen),
        dt=torch.from_numpy(dt),
        stamps=[stamps for _, stamps in series],
        names=names,
        shape=shape,
    )


def _values(y: Any) -> NDArray[np.float64]:
    """Values as float64, missing ones as NaN."""
    y = y.detach().cpu() if isinstance(y, Tensor) else y
    y = np.ma.filled(y.astype(float), np.nan) if isinstance(y, np.ma.MaskedArray) else y
    try:
        values = np.asarray(y.to_numpy(float, na_value=np.nan) if _is_pandas(y) else y, float)
    except (TypeError, ValueError) as error:
        raise ValueError(f"values are not numbers: {error}.") from error
    if values.ndim not in (1, 2):
        raise ValueError(f"values have shape {values.shape}: pass [T], or [T, D] for D series.")
    if values.size == 0:
        raise ValueError(f"values have shape {values.shape}: the series is empty.")
    if np.isinf(values).any():
        i = np.argwhere(np.isinf(values))[0]
        raise ValueError(
            f"value {tuple(map(int, i)) if len(i) > 1 else int(i[0])} is infinite. Use NaN for "
            "missing values."
        )
    largest = np.abs(values[~np.isnan(values)]).max(initial=0.0)
    if largest > _LARGEST or 0.0 < largest < 1.0 / _LARGEST:
        raise ValueError(
            f"values are as large as {largest:g}: squares of their variances do not fit into "
            "float64. Measure them in another unit."
        )
    return values


def _index(y: Any, length: int) -> Any:
    return y.index if _is_pandas(y) else np.arange(length)


def _labels(times: Any) -> Array:
    times = times.detach().cpu().numpy() if isinstance(times, Tensor) else times
    labels = _dates(times) if _is_pandas(times) else np.asarray(times)
    if labels.dtype.kind == "O" and len(labels) and isinstance(labels[0], datetime.date):
        labels = labels.astype("datetime64[us]")
    if labels.dtype.kind not in "iufM":
        raise ValueError(
            f"time stamps are of type {labels.dtype}: pass numbers or dates (pandas: "
            "y.index = pd.to_datetime(y.index))."
        )
    return labels if labels.dtype.kind == "M" else labels.astype(float)


def _dates(index: Any) -> Array:
    """A pandas index or column as numpy; dates with a time zone are converted to UTC."""
    if getattr(getattr(index, "dtype", None), "tz", None) is not None:
        index = (index.dt if hasattr(index, "dt") else index).tz_convert(None)
    return np.asarray(index)


def _time_unit(unit: Any) -> np.timedelta64:
    """One unit of time: a numpy code, or a timedelta; months have no fixed length."""
    try:
        if isinstance(unit, str):
            unit = np.timedelta64(1, unit)  # type: ignore[call-overload]
        if isinstance(unit, datetime.timedelta | np.timedelta64):
            found = np.timedelta64(unit)
            if found / np.timedelta64(1, "ns") > 0:
                return found
    except (TypeError, ValueError):
        pass
    raise ValueError(
        f"time_unit is {unit!r}: pass 's', 'm' (minutes), 'h', 'D' or 'W', or a timedelta."
    )


def _resolution(x: Array) -> np.timedelta64:
    """The unit of an array of timedelta64."""
    return np.ones(1, x.dtype)[0]  # type: ignore[no-any-return]


def _is_pandas(x: Any) -> bool:
    return type(x).__module__.partition(".")[0] == "pandas"


def pandas() -> Any:
    """The library, if it is installed; it is not needed for arrays and tensors."""
    try:
        import pandas as found
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "tables need pandas: pip install 'kalman_attention[series]'"
        ) from error
    return found
