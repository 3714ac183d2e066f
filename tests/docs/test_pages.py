"""Pages keep their promises: links lead somewhere, Python blocks run, commands exist and run."""

import re
import shlex
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kalman_attention
from kalman_attention.cli.main import main, parse
from kalman_attention.models.mixers import MIXERS
from tests.data.small import text
from tests.docs.markdown import PAGES, ROOT, anchors, blocks, commands, links, name_of

WITH_CODE = [page for page in PAGES if blocks(page.read_text(), "python")]
CURRENT = [p for p in PAGES if p.name != "CHANGELOG.md" and p.parent.name != "dev"]
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
WITH_COMMANDS = [page for page in GUIDES if commands(page.read_text())]
NEEDS = {"kalman_attention.data": "tokenizers", "kalman_attention.hf": "transformers"}
SMOKE = {
    "data": "--vocab-size 300 --shard-tokens 2000 --workers 1",
    "pretrain": "--tokens 256 --batch-tokens 64 --seq-len 16 --micro-batch 4 --eval-every 2",
}
"""What makes a command of a guide small, by verb."""


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    broken = [target for target in links(page.read_text()) if not leads_somewhere(page, target)]
    assert not broken


def leads_somewhere(page: Path, target: str) -> bool:
    path, _, anchor = target.partition("#")
    found = page.parent / path if path else page
    if not found.exists() or not found.resolve().is_relative_to(ROOT):
        return False
    return not anchor or (found.suffix == ".md" and anchor in anchors(found.read_text()))


@pytest.mark.parametrize(
    ("target", "leads"),
    [
        ("engines.md", True),
        ("engines.md#switches-for-developers", True),
        ("#gradients", True),
        ("engines.md#no-such-heading", False),
        ("no_such_page.md", False),
        ("../../outside", False),
        ("api/ops.md#kalman_attention.kla_scan", True),
    ],
)
def test_a_broken_link_is_noticed(target: str, leads: bool) -> None:
    assert leads_somewhere(ROOT / "docs" / "engines.md", target) is leads


@pytest.fixture
def own_mixers() -> Iterator[None]:
    """Mixers that a page registers are gone for the tests after it."""
    before = dict(MIXERS)
    yield
    MIXERS.clear()
    MIXERS.update(before)


@pytest.mark.usefixtures("no_flush", "own_mixers")
@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = blocks(page.read_text(), "python")
    for module, package in NEEDS.items():
        if module in "".join(found):
            pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)  # some write files
    alone(monkeypatch)
    namespace: dict[str, object] = {}
    for block in found:
        if page.name == "README.md":
            namespace = {}  # people copy one block, not all those before it
        exec(compile(block, name_of(page), "exec"), namespace)


def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment that torchrun gives to a single process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    found = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in found.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("page", CURRENT, ids=name_of)
def test_commands_exist(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Those of blocks, and those in a sentence that have options.
    text = page.read_text()
    lines = commands(text)
    lines += [code for code in re.findall(r"`(kla [^`]+)`", text) if " --" in code]
    monkeypatch.chdir(tmp_path)
    for line in lines:
        words = shlex.split(line)
        if not {"--help", "--version"} & set(words):
            parse(words[1:])


@pytest.mark.slow
@pytest.mark.usefixtures("no_flush")
@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name_of)
def test_commands_of_guides_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("tokenizers", "transformers", "matplotlib"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text("\n".join(text(i, 30) for i in range(200)), encoding="utf-8")
    for line in commands(page.read_text()):
        words = shlex.split(line)[1:]
        monkeypatch.setattr(sys, "argv", ["kla", *words])
        assert main([*words, *SMOKE.get(words[0], "").split()]) == 0, line


def test_the_citations_agree() -> None:
    page, file = ((ROOT / name).read_text() for name in ("docs/cite.md", "CITATION.cff"))
    assert f"version = {{{kalman_attention.__version__}}}" in page
    assert f"\nversion: {kalman_attention.__version__}\n" in file
    software, paper = re.findall(r'title: "(.+)"', file)
    assert f"{{{software}}}" in page
    assert f"{{{paper}}}" in page
    assert all("2602.10743" in text for text in (page, file))
