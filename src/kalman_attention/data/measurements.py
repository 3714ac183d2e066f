"""Measured series: stays in intensive care (PhysioNet 2012), and loads of transformers (ETT).

Both are read from local files; nothing is downloaded. PhysioNet's Challenge 2012:
``set-a.tar.gz`` and ``Outcomes-a.txt``. ETT: ``ETTh1.csv``.
"""

import csv
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

# fmt: off
CHANNELS = (
    "Age", "Gender", "Height", "ICUType", "Weight", "Albumin", "ALP", "ALT", "AST", "Bilirubin",
    "BUN", "Cholesterol", "Creatinine", "DiasABP", "FiO2", "GCS", "Glucose", "HCO3", "HCT", "HR",
    "K", "Lactate", "Mg", "MAP", "MechVent", "Na", "NIDiasABP", "NIMAP", "NISysABP", "PaCO2",
    "PaO2", "pH", "Platelets", "RespRate", "SaO2", "SysABP", "Temp", "TroponinI", "TroponinT",
    "Urine", "WBC",
)
# fmt: on
"""Quantities measured in a stay; the first four only once, on admission."""

_NUMBER = {name: i for i, name in enumerate(CHANNELS)}


class Stays(NamedTuple):
    """Stays in intensive care, padded to the longest, in the order of their record numbers.

    Attributes:
        values: ``[n, T, 41]`` float32, 0 where nothing was measured.
        observed: True where a value was measured, ``[n, T, 41]`` bool.
        times: hours since admission, ``[n, T]`` float32.
        mask: ``[n, T]`` bool, False for padding.
        died: whether the patient died in hospital, ``[n]`` int64.
    """

    values: Tensor
    observed: Tensor
    times: Tensor
    mask: Tensor
    died: Tensor


def read_stays(folder: str | os.PathLike[str], *, minutes: int = 1) -> Stays:
    """Read PhysioNet's set a.

    Several measurements of a channel at one instant are averaged. The files mark unknown values by
    -1, which are left out.

    Args:
        folder: folder with ``set-a.tar.gz`` and ``Outcomes-a.txt``.
        minutes: times are rounded to multiples of this.
    """
    folder = Path(folder)
    archive, outcomes = folder / "set-a.tar.gz", folder / "Outcomes-a.txt"
    for path in (archive, outcomes):
        if not path.exists():
            raise ValueError(
                f"{path} does not exist. The data is that of PhysioNet's Challenge 2012: name the "
                "folder that contains set-a.tar.gz and Outcomes-a.txt."
            )
    with outcomes.open(encoding="utf-8", newline="") as file:
        died = {row["RecordID"]: int(row["In-hospital_death"]) for row in csv.DictReader(file)}
    stays = dict(sorted(_stays(archive, minutes)))
    missing = [record for record in stays if record not in died]
    if missing or not stays:
        raise ValueError(
            f"{outcomes} has no outcome of record {missing[0] if missing else '(none)'}."
        )
    return _padded(list(stays.values()), [died[record] for record in stays])


_Stay = tuple[np.ndarray[tuple[int], np.dtype[np.int64]], list[tuple[int, int, float]]]


def _stays(archive: Path, minutes: int) -> Iterator[tuple[str, _Stay]]:
    """Record number and content of every stay: its times, and (instant, channel, value)."""
    with tarfile.open(archive) as tar:
        for member in tar:
            file = tar.extractfile(member) if member.name.endswith(".txt") else None
            if file is None:
                continue
            found = []
            for line in file.read().decode().splitlines()[1:]:
                clock, name, value = line.split(",")
                if name in _NUMBER and float(value) != -1.0:
                    hours, _, rest = clock.partition(":")
                    time = round((60 * int(hours) + int(rest)) / minutes)
                    found.append((time, _NUMBER[name], float(value)))
            times, place = np.unique([time for time, *_ in found], return_inverse=True)
            placed = [(int(i), c, v) for i, (_, c, v) in zip(place, found, strict=True)]
            yield Path(member.name).stem, (times.astype(np.int64) * minutes, placed)


def _padded(stays: list[_Stay], died: list[int]) -> Stays:
    shape = (len(stays), max(len(times) for times, _ in stays), len(CHANNELS))
    total, count = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    hours, mask = np.zeros(shape[:2], np.float32), np.zeros(shape[:2], bool)
    for n, (times, placed) in enumerate(stays):
        hours[n, : len(times)], mask[n, : len(times)] = times / 60.0, True
        hours[n, len(times) :] = hours[n, len(times) - 1] if len(times) else 0.0
        for i, channel, value in placed:
            total[n, i, channel] += value
            count[n, i, channel] += 1.0
    values = torch.from_numpy(total / np.maximum(count, 1.0))
    observed = torch.from_numpy(count > 0.0)
    return Stays(
        values, observed, torch.from_numpy(hours), torch.from_numpy(mask), torch.tensor(died)
    )


def read_table(path: str | os.PathLike[str]) -> Tensor:
    """Numbers of a table whose first column is the time, such as ``ETTh1.csv``, ``[rows, C]``."""
    path = Path(path)
    if not path.exists():
        raise ValueError(f"{path} does not exist: name a csv file with times in its first column.")
    with path.open(encoding="utf-8", newline="") as file:
        rows = [[float(x) for x in row[1:]] for row in list(csv.reader(file))[1:]]
    return torch.tensor(rows)
