"""``docs/tasks.md``: its pictures are what the command prints, and no task is missing."""

import re

import pytest

from kalman_attention.cli.main import main
from kalman_attention.tasks.registry import TASKS
from tests.docs.markdown import ROOT, code, table_rows

TEXT = (ROOT / "docs" / "tasks.md").read_text()
SHOWN = re.findall(r"```\n\$ kla (task show (\w+)[^\n]*)\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize(("command", "name", "output"), SHOWN, ids=[shown[1] for shown in SHOWN])
def test_pictures_are_what_the_command_prints(capsys, monkeypatch, command, name, output):
    monkeypatch.setenv("COLUMNS", "100")
    assert name in TASKS
    assert main(command.split()) == 0
    assert capsys.readouterr().out == output


def test_python_blocks_run():
    namespace = {}
    for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
        exec(compile(block, "docs/tasks.md", "exec"), namespace)
    assert namespace["inputs"].shape == (12_800, 256)
    assert bool(namespace["loss"].isfinite())


def test_every_task_has_a_picture_and_a_row():
    assert {name for _, name, _ in SHOWN} == set(TASKS) - {"parity", "a4xz5", "z60", "s5", "mqar"}
    rows = {name: row for row in table_rows(TEXT) for name in code(row[0]) if name in TASKS}
    assert set(rows) == set(TASKS)
    for name, row in rows.items():
        task = TASKS[name]()
        found = [int(cell.replace(",", "")) for cell in row[1:5]]
        sizes = [task.size(split) for split in ("train", "test")]
        assert found == [task.vocab_size, task.input_len, *sizes]
