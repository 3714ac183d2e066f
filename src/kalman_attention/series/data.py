"""What users bring: arrays, tensors or pandas, with time stamps of any spacing and missing values.

NaN is a missing value: time passes, nothing is seen. Time stamps are sorted. Two values with the
same stamp are two observations of one instant, which a gap of 0 makes exact.
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


@dataclass(frozen=True)
class Stamps:
    """Time stamps of a series.

    Attributes:
        labels: as they were given, ``[T]``: numbers, or ``datetime64``.
        unit: of time, where labels are dates; None where they are numbers.
        index: the pandas index that they come from, for what goes back to pandas.
    """

    labels: Array
    unit: np.timedelta64 | None = None
    index: Any = None

    def __len__(self) -> int:
        return len(self.labels)

    def elapsed(self, since: Any = None) -> NDArray[np.float64]:
        """Time since the first stamp, or another one, in units."""
        past = self.labels - (self.labels[0] if since is None else since)
        # Dividing dates by a unit casts both to the finer of the two, in which centuries overflow.
        scale = 1.0 if self.unit is None else _resolution(past) / self.unit
        found: NDArray[np.float64] = (
            past.astype(np.int64 if self.unit is not None else float) * scale
        )
        return found

    def later(self, steps: int) -> "Stamps":
        """Stamps that follow the last one at the usual gap; a pandas frequency goes on exactly."""
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
        """The stamps, and others evenly between the first and the last."""
        first, span = self.labels[0], self.labels[-1] - self.labels[0]
        between = first + span * np.arange(1, count) / count
        return Stamps(np.sort(np.concatenate([self.labels, between])), self.unit)

    def pandas_index(self) -> Any:
        """As pandas has it."""
        return pandas().Index(self.labels) if self.index is None else self.index


@dataclass(frozen=True)
class Panel:
    """One series or many, on the way into the filter.

    Attributes:
        v: values, 0 where there is none, ``[B, T]`` float64.
        seen: where there is one, ``[B, T]``.
        dt: time before each value, 0 before the first and in padding, ``[B, T]``.
        stamps: of every series.
        names: of the series; None for one that has none.
        shape: ``"one"``, ``"columns"`` (all on the same stamps) or ``"rows"`` (each on its own).
    """

    v: Tensor
    seen: Tensor
    dt: Tensor
    stamps: Sequence[Stamps]
    names: Sequence[Hashable]
    shape: str = "one"

    @property
    def nobs(self) -> int:
        """Number of values that are there."""
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
        """The same values on stamps that include others, and where the others are, ``[n]``.

        A stamp that is asked for comes after the values of that instant, so that a gap of 0 leads
        from them to it.
        """
        (own,) = self.stamps
        if (own.unit is None) != (extra.unit is None):
            raise ValueError("the series and the time stamps asked for must both be dates, or not.")
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
    """Values and time stamps of one series or many, checked.

    Args:
        y: ``[T]``, or ``[T, D]`` for D series on the same stamps, as array, tensor or pandas; or a
            list of series of their own lengths.
        times: stamps ``[T]``, or a list of them; by default the index of pandas, or 0, 1, 2 ...
        time_unit: what one unit of time is where stamps are dates: a letter of numpy such as "s",
            "h" or "D", or a timedelta.
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
    """Time stamps, checked: finite and sorted."""
    index = times if _is_pandas(times) and not hasattr(times, "iloc") else None
    if hasattr(index, "to_timestamp"):
        index = times = times.to_timestamp()  # a PeriodIndex: a month begins where it begins
    labels = _labels(times)
    if labels.ndim != 1:
        raise ValueError(f"time stamps have shape {labels.shape}: pass one for each value, [T].")
    if labels.dtype.kind == "M":
        bad, unit = np.isnat(labels), _time_unit(time_unit)
    else:
        bad, unit = ~np.isfinite(labels), None
    if bad.any():
        raise ValueError(
            f"time stamp {int(bad.argmax())} is {labels[bad][0]}: drop it, or mend it."
        )
    back = labels[1:] < labels[:-1]
    if back.any():
        i = int(back.argmax()) + 1
        raise ValueError(
            f"time stamp {i}, {labels[i]}, is before the one in front of it, {labels[i - 1]}: sort "
            "values and stamps together (pandas: y.sort_index()). Equal stamps are allowed."
        )
    return Stamps(labels, unit, index)


def _rows(y: Sequence[Any], times: Any, time_unit: Any) -> Panel:
    given = [None] * len(y) if times is None else times
    if len(given) != len(y):
        raise ValueError(f"there are {len(y)} series and time stamps for {len(given)}.")
    panels = [read_panel(_flat(x), t, time_unit) for x, t in zip(y, given, strict=True)]
    if any(panel.shape != "one" for panel in panels):
        raise ValueError("a list holds one series in each place, [T]; for columns pass an array.")
    names = [panel.names[0] if panel.names[0] is not None else i for i, panel in enumerate(panels)]
    pairs = [(np.where(p.seen[0], p.v[0], np.nan), stamps) for p in panels for stamps in p.stamps]
    return _panel(pairs, names, "rows")


def _flat(x: Any) -> Any:
    if np.ndim(x) != 1:
        raise ValueError(f"a list of series holds one of shape {np.shape(x)}: each must be [T].")
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
            f"value {tuple(map(int, i)) if len(i) > 1 else int(i[0])} is infinite. Where nothing "
            "was seen write NaN."
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
    """A pandas index or column as numpy; dates with a time zone as those of UTC."""
    if getattr(getattr(index, "dtype", None), "tz", None) is not None:
        index = (index.dt if hasattr(index, "dt") else index).tz_convert(None)
    return np.asarray(index)


def _time_unit(unit: Any) -> np.timedelta64:
    """One unit of time: a letter of numpy, or a length of time; months have no fixed length."""
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
    """What one count of an array of timedelta64 is."""
    return np.ones(1, x.dtype)[0]  # type: ignore[no-any-return]


def _is_pandas(x: Any) -> bool:
    return type(x).__module__.partition(".")[0] == "pandas"


def pandas() -> Any:
    """The library, for those who have it: it is not needed for arrays and tensors."""
    try:
        import pandas as found
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "tables need pandas: pip install 'kalman_attention[series]'"
        ) from error
    return found
