"""Files like those of PhysioNet 2012 and ETT, small and made up."""

import io
import random
import tarfile
from pathlib import Path

HEADER = "RecordID,SAPS-I,SOFA,Length_of_stay,Survival,In-hospital_death"


def write_stays(folder: Path, count: int, seed: int = 0) -> Path:
    """Stays whose heart rate is higher for those who die."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn, outcomes = random.Random(seed), [HEADER]
    with tarfile.open(folder / "set-a.tar.gz", "w:gz") as tar:
        for record in range(1000 + count, 1000, -1):
            died = int(drawn.random() < 0.4)
            rows = ["Time,Parameter,Value", f"00:00,RecordID,{record}", "00:00,Age,60"]
            rows += ["00:00,Height,-1"]
            for _ in range(8):
                clock = f"{drawn.randrange(48):02d}:{drawn.randrange(60):02d}"
                rows += [f"{clock},HR,{80 + 30 * died + drawn.gauss(0, 5):.1f}"]
                rows += [f"{clock},Temp,{drawn.gauss(37, 1):.1f}"] * (drawn.random() < 0.5)
            add(tar, f"set-a/{record}.txt", "\n".join(rows) + "\n")
            outcomes.append(f"{record},1,1,5,-1,{died}")
    (folder / "Outcomes-a.txt").write_text("\n".join(outcomes) + "\n")
    return folder


def add(tar: tarfile.TarFile, name: str, text: str) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(text)
    tar.addfile(info, io.BytesIO(text.encode()))


def write_table(folder: Path, rows: int) -> Path:
    """A table like ``ETTh1.csv``."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = random.Random(0)
    lines = ["date," + ",".join(f"c{i}" for i in range(7))]
    lines += [
        f"hour {t}," + ",".join(f"{drawn.gauss(0, 1):.3f}" for _ in range(7)) for t in range(rows)
    ]
    (folder / "ETTh1.csv").write_text("\n".join(lines) + "\n")
    return folder
