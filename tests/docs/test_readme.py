"""The Python blocks of pages run: README's each alone, those of a page of docs in order."""

import re
import shlex
from pathlib import Path

import pytest

from kalman_attention.cli.main import parse

ROOT = Path(__file__).parents[2]
WITH_CODE = [
    "README.md",
    "docs/baselines.md",
    "docs/explore.md",
    "docs/huggingface.md",
    "docs/pretraining.md",
    "docs/state_tracking.md",
    "docs/training.md",
]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", WITH_CODE)
def test_python_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert blocks
    if "kalman_attention.data" in "".join(blocks):
        pytest.importorskip("tokenizers")
    if "evaluation.detection" in "".join(blocks):
        pytest.importorskip("sklearn")
        pytest.importorskip("torchmetrics")
    monkeypatch.chdir(tmp_path)  # some write files
    namespace: dict[str, object] = {}
    for block in blocks:
        if page == "README.md":
            namespace = {}  # people copy one block, not all those before it
        exec(compile(block, page, "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Those of blocks, and those in a sentence that have options.
    text = page.read_text()
    blocks = re.findall(r"```\n(.*?)```", text, re.DOTALL)
    lines = [line.split(" #")[0].removeprefix("$ ") for b in blocks for line in b.splitlines()]
    lines += [code for code in re.findall(r"`([^`]+)`", text) if " --" in code]
    monkeypatch.chdir(tmp_path)
    for line in lines:
        words = shlex.split(line) if line.startswith("kla ") else []
        if words and "--help" not in words:
            parse(words[1:])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)", page.read_text())
    missing = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert not missing
