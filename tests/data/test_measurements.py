"""Measured series are read as they are written."""

import tarfile

import pytest
import torch

from kalman_attention.data.measurements import CHANNELS, read_stays, read_table
from tests.data.stays import HEADER, add, write_stays, write_table

AGE, HEART, HEIGHT = (CHANNELS.index(name) for name in ("Age", "HR", "Height"))


def one_stay(folder, *rows: str):
    folder.mkdir(exist_ok=True)
    with tarfile.open(folder / "set-a.tar.gz", "w:gz") as tar:
        add(tar, "set-a/7.txt", "\n".join(["Time,Parameter,Value", *rows]) + "\n")
    (folder / "Outcomes-a.txt").write_text(f"{HEADER}\n7,1,1,5,-1,1\n")
    return folder


def test_a_stay_by_hand(tmp_path):
    rows = ["00:00,RecordID,7", "00:00,Age,54", "00:00,Height,-1", "01:30,HR,80", "01:30,HR,90"]
    found = read_stays(one_stay(tmp_path, *rows, "02:00,HR,70"))
    assert found.times.tolist() == [[0.0, 1.5, 2.0]]
    assert found.observed.sum() == 3
    assert not found.observed[..., HEIGHT].any()  # -1 is how the files say that it is not known
    assert found.values[0, 0, AGE] == 54
    assert found.values[0, 1, HEART] == 85  # the mean of two at one instant
    assert found.died.tolist() == [1]
    coarse = read_stays(tmp_path, minutes=60)
    assert coarse.times.tolist() == [[0.0, 2.0]]
    assert coarse.values[0, 1, HEART] == 80


def test_stays_are_in_the_order_of_their_numbers_and_padded(tmp_path):
    found = read_stays(write_stays(tmp_path, 12))
    assert found.values.shape == (12, found.times.shape[1], 41)
    assert (found.times.diff(dim=1)[found.mask[:, 1:]] > 0).all()
    assert (found.times.diff(dim=1) >= 0).all()
    assert not found.observed[~found.mask].any()
    lines = (tmp_path / "Outcomes-a.txt").read_text().splitlines()[1:]
    by_record = dict(sorted((line.split(",")[0], int(line[-1])) for line in lines))
    assert found.died.tolist() == list(by_record.values())


def test_a_table(tmp_path):
    found = read_table(write_table(tmp_path, 5) / "ETTh1.csv")
    assert found.shape == (5, 7)
    assert found.dtype == torch.float32


def test_missing_files_and_records_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"set-a\.tar\.gz does not exist"):
        read_stays(tmp_path)
    with pytest.raises(ValueError, match=r"a\.csv does not exist"):
        read_table(tmp_path / "a.csv")
    one_stay(tmp_path, "00:00,Age,54")
    (tmp_path / "Outcomes-a.txt").write_text(f"{HEADER}\n8,1,1,5,-1,1\n")
    with pytest.raises(ValueError, match="no outcome of record 7"):
        read_stays(tmp_path)
