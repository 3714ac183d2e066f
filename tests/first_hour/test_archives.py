"""What is published: a source archive and a wheel. `make wheel-check` builds both and runs this.

``KLA_TEST_DIST`` is the folder that has them. The tests of ``test_install.py`` then install that
wheel, and this file installs the archive, both where no compiler can be found.
"""

import email
import re
import subprocess
import tarfile
import venv
import zipfile
from pathlib import Path, PurePosixPath

import pytest
import torch

import kalman_attention
from tests.first_hour.test_install import DIST, INSTALL, ROOT, one, without_compilers

pytestmark = [
    pytest.mark.skipif(not DIST, reason="needs built archives; `make wheel-check` builds them"),
    pytest.mark.xdist_group("install"),
]


@pytest.fixture(scope="module")
def wheel() -> zipfile.ZipFile:
    return zipfile.ZipFile(one("*.whl"))


@pytest.fixture(scope="module")
def sources() -> set[str]:
    """Paths in the source archive, without its only folder."""
    with tarfile.open(one("*.tar.gz")) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


def test_the_wheel_has_the_library_and_not_its_sources(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    assert "kalman_attention/ops/cpu/_kla_cpu.so" in names
    # The CUDA kernels are compiled where they run, from their sources and the shared headers.
    assert "kalman_attention/csrc/cuda/kla_scan_fwd.cu" in names
    assert not [name for name in names if name.endswith(".cpp") or "csrc/cpu/" in name]


def test_the_wheel_has_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = [PurePosixPath(name) for name in wheel.namelist()]
    tops = {name.parts[0] for name in names}
    assert tops == {
        "kalman_attention",
        f"kalman_attention-{kalman_attention.__version__}.dist-info",
    }
    ours = {p.relative_to(ROOT / "src") for p in (ROOT / "src").rglob("*.py")}
    assert {Path(name) for name in names if name.suffix == ".py"} == ours
    assert PurePosixPath("kalman_attention/py.typed") in names
    assert not [name for name in names if "__pycache__" in name.parts]


def test_the_wheel_is_for_one_platform_and_every_python(wheel: zipfile.ZipFile) -> None:
    (info,) = (name for name in wheel.namelist() if name.endswith(".dist-info/WHEEL"))
    (tag,) = re.findall(r"^Tag: (.+)$", wheel.read(info).decode(), re.MULTILINE)
    python, abi, platform = tag.split("-")
    assert (python, abi) == ("py3", "none")
    assert platform != "any"


def test_the_metadata(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    found = email.message_from_bytes(wheel.read(name))
    assert found["Name"] == "kalman_attention"
    assert found["Version"] == kalman_attention.__version__
    assert found["License-Expression"] == "MIT"
    assert found["Description-Content-Type"] == "text/markdown"
    minor = [f"Programming Language :: Python :: 3.{i}" for i in range(10, 15)]
    assert set(minor) <= set(found.get_all("Classifier", []))
    needed = [line for line in found.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert {re.split(r"[<>=]", line)[0] for line in needed} == {"numpy", "safetensors", "torch"}


def test_the_source_archive_builds_and_tests_itself(sources: set[str]) -> None:
    needed = ["CMakeLists.txt", "LICENSE", "Makefile", "README.md", "constraints.txt", "mkdocs.yml"]
    assert {*needed, "src/kalman_attention/csrc/cpu/kernel.cpp", "tests/conftest.py"} <= sources


def test_the_source_archive_has_no_results_and_nothing_generated(sources: set[str]) -> None:
    folders = {name.split("/")[0] for name in sources}
    assert not folders & {"results", "runs", "build", "dist", ".venv", ".ci", ".github", ".git"}
    assert not [name for name in sources if name.endswith((".so", ".pyc"))]
    # It is downloaded by everybody whose platform has no wheel.
    assert one("*.tar.gz").stat().st_size < 10e6


def test_without_a_compiler_the_archive_still_installs(tmp_path: Path) -> None:
    """And the check says what is missing and how to get it."""
    venv.create(tmp_path / "venv", with_pip=True)
    found = tmp_path / "venv" / "bin"

    def run(*command: str | Path) -> str:
        options = {"cwd": tmp_path, "env": without_compilers(), "text": True}
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, **options).stdout

    # torch is the one of these tests: the wheel's environment shows that a new one does it.
    run(found / "pip", *INSTALL, "--no-deps", one("*.tar.gz"))
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    assert not list(site.glob("kalman_attention/ops/cpu/*.so"))
    (site / "others.pth").write_text(str(Path(torch.__file__).parents[1]))
    said = run(found / "kla", "check", "--run")
    assert "put a C++17 compiler" in said
    assert "auto on cpu means: associative" in said
    assert "MISSES" not in said
