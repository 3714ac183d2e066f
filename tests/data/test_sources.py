"""Documents from files of every kind."""

import gzip
import json
import sys
import types

import pytest

pytest.importorskip("tokenizers")

from kalman_attention.data import sources
from kalman_attention.data.sources import Corpus, Document, documents, hub_parts


def read(*inputs, skip=0, **options):
    corpus = Corpus(inputs=tuple(str(each) for each in inputs), **options)
    return list(documents(corpus, skip))


def texts(*inputs, **options):
    return [document.text for document in read(*inputs, **options)]


def test_text_files_and_folders_in_order(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfwith a mark")
    (tmp_path / "a.md").write_text("first\n")
    (tmp_path / "c.png").write_bytes(b"\x89PNG")
    (tmp_path / ".hidden.txt").write_text("no")
    with gzip.open(tmp_path / "d.txt.gz", "wb") as file:
        file.write("gepackt \u00e4".encode())
    assert texts(tmp_path) == ["first\n", "with a mark", "gepackt \u00e4"]
    assert texts(tmp_path / "b.txt", tmp_path / "a.md") == ["with a mark", "first\n"]


def test_separator_also_across_blocks(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("one<|end|>\ntwo \u00e4\u00f6<|end|>three")
    for block in (1, 2, 7, 1000):
        monkeypatch.setattr(sources, "_BLOCK", block)
        assert texts(path, separator="<|end|>") == ["one", "two \u00e4\u00f6", "three"]


def test_long_files_are_cut_at_line_ends(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    whole = "".join(f"line number {i}, \u00e4\n" for i in range(100))
    path.write_text(whole)
    for block in (3, 64, 10_000):
        monkeypatch.setattr(sources, "_BLOCK", block)
        pieces = texts(path, document_bytes=100)
        assert "".join(pieces) == whole
        assert len(pieces) > 10
        assert all(piece.endswith("\n") for piece in pieces if piece)
    assert texts(path, document_bytes=0) == [whole]


def test_a_file_without_lines_is_cut_between_characters(tmp_path):
    path = tmp_path / "a.txt"
    whole = "\u4f60\U0001f600\u00e4a" * 500
    path.write_text(whole)
    found = read(path, document_bytes=101)
    assert len(found) > 10
    assert "".join(document.text for document in found) == whole
    assert not any(document.replaced for document in found)


def test_bad_utf8_is_replaced_and_counted(tmp_path):
    (tmp_path / "a.txt").write_bytes("real \ufffd, ".encode() + b"bad \xff\xfe.")
    assert read(tmp_path / "a.txt") == [Document("real \ufffd, bad \ufffd\ufffd.", 2)]
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "half \\ud800 \xff"}\n{"text": "fine"}\n')
    assert read(tmp_path / "b.jsonl") == [Document("half \ufffd \ufffd", 2), Document("fine", 0)]


@pytest.mark.parametrize(
    ("content", "fine"),
    [
        ("\u00e4\u4f60".encode() * 40_000, True),  # cut inside a character after 65,536 bytes
        (b"some text with a stray \xff byte; " * 3 + b"and much without one. " * 100, True),
        ("Gr\u00fc\u00dfe aus K\u00f6ln, und sch\u00f6ne! ".encode("latin-1") * 50, False),
        ("plain text".encode("utf-16"), False),
        (b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 4, False),
    ],
    ids=["text", "stray", "latin-1", "utf-16", "png"],
)
def test_what_is_not_text_is_refused_by_its_content(tmp_path, content, fine):
    for name in ("a.txt", "a.txt.gz", "a.jsonl"):
        path = tmp_path / name
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        Corpus(inputs=(str(path),), replace_invalid=True).check()
        if fine:
            Corpus(inputs=(str(path),)).check()
        else:
            with pytest.raises(ValueError, match=r"is not UTF-8 text: .*--replace-invalid"):
                Corpus(inputs=(str(path),)).check()


def test_empty_files_are_named(tmp_path):
    for name in "abcd":
        (tmp_path / f"{name}.txt").write_text("")
    with pytest.raises(ValueError, match=r"a\.txt is empty"):
        Corpus(inputs=(str(tmp_path / "a.txt"),)).check()
    with pytest.raises(ValueError, match=r"c\.txt and 1 more files are empty"):
        Corpus(inputs=(str(tmp_path),)).check()
    (tmp_path / "d.txt").write_text("text")
    Corpus(inputs=(str(tmp_path),)).check()


def test_jsonl_fields_and_refusals(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "x"}\n\n{"body": "y"}\n')
    assert texts(path, text_field="body") == ["x", "y"]
    with pytest.raises(ValueError, match=r"line 1 of .* has no text in 'text'; it has 'body'"):
        texts(path)
    path.write_text('{"text": "x"}\n{"te')
    with pytest.raises(ValueError, match=r"line 2 of .* is not JSON"):
        texts(path)


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")

    path = tmp_path / "a.parquet"
    written = [f"text {i}" for i in range(3000)]
    table = pyarrow.table({"text": [*written, None], "id": list(range(3001))})
    parquet.write_table(table, path, row_group_size=1000)
    assert texts(path) == [*written, ""]
    assert texts(path, skip=2999) == ["text 2999", ""]
    with pytest.raises(ValueError, match="no column 'body'; it has text, id"):
        texts(path, text_field="body")


def test_any_number_of_documents_can_be_skipped(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": str(i)}) + "\n" for i in range(5))
    )
    (tmp_path / "b.txt").write_text("x|y|z")
    every = texts(tmp_path, separator="|")
    for skip in range(len(every) + 2):
        assert texts(tmp_path, separator="|", skip=skip) == every[skip:]


def test_missing_file(tmp_path):
    with pytest.raises(ValueError, match="no file or folder"):
        texts(tmp_path / "nothing.txt")


def test_standard_library_is_the_same_every_time():
    found = sources.standard_library()
    assert len(found) > 300
    assert found == sources.standard_library()
    assert {"argparse.py", "json"} <= {path.name for path in found} | {p.parent.name for p in found}
    assert not [path for path in found if "site-packages" in path.parts]


def test_a_change_of_contents_shows(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one")
    corpus = Corpus(inputs=(str(path),))
    before = corpus.describe()
    path.write_text("two")
    assert corpus.describe() != before


def test_hub_names():
    assert hub_parts("hub:a/b") == ("a/b", None, "train")
    assert hub_parts("hub:a/b:c:test") == ("a/b", "c", "test")
    assert hub_parts(sources.FINEWEB_EDU) == ("HuggingFaceFW/fineweb-edu", "sample-100BT", "train")
    with pytest.raises(ValueError, match="a hub data set is written"):
        hub_parts("hub:a:b:c:d")


class FakeStream(list):
    def shuffle(self, *, seed, buffer_size):
        assert (seed, buffer_size) == (42, 10_000)
        return FakeStream(reversed(self))

    def skip(self, count):
        return FakeStream(self[count:])


def test_hub_documents_are_streamed_shuffled_and_skipped(monkeypatch):
    calls = []

    def load_dataset(*args, **options):
        calls.append((args, options))
        return FakeStream({"text": f"document {i}"} for i in range(4))

    fake = types.SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert texts("hub:a/b:c", skip=1) == ["document 2", "document 1", "document 0"]
    assert calls == [(("a/b", "c"), {"split": "train", "streaming": True})]
    with pytest.raises(ValueError, match="must be the only input"):
        texts("hub:a/b", "hub:c/d")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"kalman_attention\[data\]"):
        texts("hub:a/b")
