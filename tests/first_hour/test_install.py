"""The README's plain install: a new environment with what ``pip install .`` brings, no more.

With ``KLA_TEST_DIST``, a folder of built archives, the wheel there is installed instead, where no
compiler can be found; `make wheel-check` does that.
"""

import os
import re
import shlex
import subprocess
import venv
from pathlib import Path

import pytest

from tests.docs.markdown import commands

ROOT = Path(__file__).parents[2]
DIST = os.environ.get("KLA_TEST_DIST", "")
PACKAGE = "src/kalman_attention"
INSTALL = ("install", "-q", "--no-compile", "-c", ROOT / "constraints.txt")

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("KLA_TEST_INSTALL") != "1" and not DIST,
        reason="installs torch into a new environment; `make test` does it (KLA_TEST_INSTALL=1)",
    ),
    pytest.mark.xdist_group("install"),  # one environment, whatever the number of workers
]


@pytest.fixture(scope="module")
def binaries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a new environment with the package and its declared dependencies."""
    folder = tmp_path_factory.mktemp("plain")
    venv.create(folder / "venv", with_pip=True)
    found = folder / "venv" / "bin"
    # Nothing is written into the checkout. The kernels are not optimised, which takes minutes: the
    # environment of these tests was built from the same CMakeLists.txt with the flags of a release.
    build = ["-C", f"build-dir={folder / 'build'}", "-C", "cmake.build-type=Debug", ROOT]
    done = _run(found / "pip", *INSTALL, *([one("*.whl")] if DIST else build), cwd=folder)
    assert done.returncode == 0, done.stderr
    return found


def one(pattern: str) -> Path:
    """The archive of the folder that a pattern means."""
    (found,) = Path(DIST).resolve().glob(pattern)
    return found


def without_compilers() -> dict[str, str]:
    """The environment of a machine where nobody has installed one."""
    # CMake looks in places of its own too, unless it is told a name.
    return _clean() | {"CC": "no-compiler", "CXX": "no-compiler", "PATH": "/nowhere"}


def _clean() -> dict[str, str]:
    """No variable that would let the new environment see another one."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "KLA_CUDA_EMULATION", "KLA_CPU_LIBRARY")
    return {name: value for name, value in os.environ.items() if name not in hidden}


def _run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = without_compilers() if DIST else _clean()
    options = {"capture_output": True, "text": True, "check": False}
    return subprocess.run(command, cwd=cwd, env=env, **options)


def test_it_brings_what_it_declares_and_the_checker_is_content(
    binaries: Path, tmp_path: Path
) -> None:
    listed = _run(binaries / "pip", "list", "--format=freeze", cwd=tmp_path).stdout
    names = {line.partition("==")[0].lower() for line in listed.splitlines()}
    assert {"kalman_attention", "numpy", "safetensors", "torch"} <= names
    assert not names & {
        "matplotlib",
        "tokenizers",
        "transformers",
    }  # else this tests another install
    assert _run(binaries / "pip", "check", cwd=tmp_path).returncode == 0


def test_the_version_is_that_of_the_package(binaries: Path, tmp_path: Path) -> None:
    (version,) = re.findall(r'__version__ = "(.+)"', (ROOT / PACKAGE / "__init__.py").read_text())
    assert _run(binaries / "kla", "--version", cwd=tmp_path).stdout == f"kla {version}\n"
    shown = _run(binaries / "pip", "show", "kalman_attention", cwd=tmp_path).stdout
    assert f"\nVersion: {version}\n" in shown


def test_kla_check_runs_every_engine(binaries: Path, tmp_path: Path) -> None:
    (line,) = commands((ROOT / "README.md").read_text())  # a second one would need a test as well
    done = _run(binaries / "kla", *shlex.split(line)[1:], cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "auto on cpu means: cpu" in done.stdout
    assert "MISSES" not in done.stdout


def test_every_verb_explains_itself(binaries: Path, tmp_path: Path) -> None:
    said = _run(binaries / "kla", "--help", cwd=tmp_path).stdout
    verbs = re.findall(r"^    (\w+)(?:  |$)", said, re.MULTILINE)
    assert len(verbs) >= 12
    for verb in verbs:
        done = _run(binaries / "kla", verb, "--help", cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, ""), verb


def test_a_verb_that_needs_an_extra_names_it(binaries: Path, tmp_path: Path) -> None:
    done = _run(binaries / "kla", "data", cwd=tmp_path)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "pip install 'kalman_attention[data]'" in done.stderr


def test_the_templates_of_pages_are_there(binaries: Path, tmp_path: Path) -> None:
    ours = {path.name for path in (ROOT / PACKAGE / "report/templates").iterdir()}
    program = (
        "from kalman_attention.report.page import TEMPLATES; "
        "print(*(path.name for path in TEMPLATES.iterdir()))"
    )
    done = _run(binaries / "python", "-c", program, cwd=tmp_path)
    assert set(done.stdout.split()) == ours, done.stderr


def test_the_readme_blocks_run(binaries: Path, tmp_path: Path) -> None:
    """All but those that import an extra, one after another in one program."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    plain = [block for block in blocks if "transformers" not in block]
    assert 4 < len(plain) < len(blocks)
    (tmp_path / "readme.py").write_text("\n".join(plain))
    done = _run(binaries / "python", "-W", "error", "readme.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
