"""Files that appear whole: new ones only, through no link, with the permissions of the umask."""

import os
import stat
import subprocess
import sys

import pytest

from kalman_attention._files import sweep, whole_file, write_atomically, write_file

posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX permissions and links")

UMASK = """
import os, sys
from pathlib import Path
from kalman_attention._files import write_atomically, write_file
os.umask(int(sys.argv[1], 8))
write_atomically(Path("moved"), b"1")
write_file(Path("written"), b"1")
print(*(oct(os.stat(name).st_mode & 0o777) for name in ("moved", "written")))
"""


@posix
@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_permissions_are_those_of_the_umask(tmp_path, mask):
    # In a process of its own: the umask belongs to all threads.
    command = [sys.executable, "-c", UMASK, oct(mask)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [oct(0o666 & ~mask)] * 2


def test_an_older_file_stays_until_the_new_one_is_whole(tmp_path):
    path = tmp_path / "a.json"
    write_atomically(path, b"old")
    with pytest.raises(TypeError), whole_file(path) as file:
        file.writelines([b"half of the n", None])
    assert path.read_bytes() == b"old"
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["a.json"]


@posix
def test_no_link_is_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    path = tmp_path / "a.json"
    path.symlink_to(victim)
    write_atomically(path, b"new")  # the link is replaced, what it leads to is not touched
    assert not path.is_symlink()
    assert path.read_bytes() == b"new"
    link = tmp_path / "weights"
    link.symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_file(link, b"new")
    assert victim.read_bytes() == b"precious"


def test_parts_have_names_that_nobody_can_guess(tmp_path):
    path = tmp_path / "a.json"
    names = set()
    for _ in range(5):
        with whole_file(path):
            (part,) = (p for p in tmp_path.iterdir() if p != path)
            assert stat.S_ISREG(part.lstat().st_mode)
            names.add(part.name)
    assert len(names) == 5


def test_what_a_killed_process_left_is_swept(tmp_path):
    (tmp_path / ".a.json.0123456789abcdef.part").write_bytes(b"half")
    (tmp_path / "a.json").write_bytes(b"whole")
    sweep(tmp_path)
    assert os.listdir(tmp_path) == ["a.json"]
