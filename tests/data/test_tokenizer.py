"""The tokenizer: what it learns, what it never does, and its files."""

import json

import pytest

pytest.importorskip("tokenizers")

import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from kalman_attention.data import tokenizer as tokenizing
from kalman_attention.data.tokenizer import BOS, SPECIALS, Tokenizer, train_tokenizer
from tests.data.small import text

TEXTS = [text(i, 30) for i in range(40)]
TOKENIZER = train_tokenizer(TEXTS, 310)
BYTES = TOKENIZER.token_bytes()


def test_specials_come_last_and_bos_is_the_first_of_them():
    assert TOKENIZER.vocab_size == 310
    assert TOKENIZER.bos == 310 - 9
    assert TOKENIZER.special_ids() == list(range(301, 310))
    assert len(SPECIALS) == 9
    assert 32_768 - 9 == 32_759


@given(st.text())
def test_any_text_survives(written):
    ids = TOKENIZER.encode(written)
    assert TOKENIZER.decode(ids) == written
    assert not set(ids) & set(TOKENIZER.special_ids())
    assert BYTES[ids].sum() == len(written.encode())


@given(st.text())
def test_a_stream_of_tokens_is_the_text(written):
    piece = TOKENIZER.stream()
    assert "".join(piece(i) for i in TOKENIZER.encode(written)) == written


def test_specials_in_a_text_are_text():
    written = f"a {BOS} b {SPECIALS[3]}"
    ids = TOKENIZER.encode(written)
    assert max(ids) < TOKENIZER.bos
    assert TOKENIZER.decode(ids) == written


def test_digits_are_cut_into_runs_of_two():
    taught = train_tokenizer(["1234567890 " * 50, "2024 2024 " * 50, *TEXTS], 310)
    pieces = [taught.decode([i]).strip() for i in taught.encode("12345678 2024")]
    assert max(len(piece) for piece in pieces if piece.isdigit()) == 2


def test_training_is_repeatable_and_crops_documents(monkeypatch):
    assert tokenizing.TRAINING_CHARACTERS == 10_000
    monkeypatch.setattr(tokenizing, "TRAINING_CHARACTERS", 300)
    again = train_tokenizer(iter(TEXTS), 310)
    assert again.fingerprint == TOKENIZER.fingerprint
    tail = [each.ljust(300) + "unseen" * 50 for each in TEXTS]
    same = [each.ljust(300) for each in TEXTS]
    assert train_tokenizer(tail, 310).fingerprint == train_tokenizer(same, 310).fingerprint
    few = train_tokenizer(TEXTS, 290, max_characters=1)
    assert few.fingerprint == train_tokenizer(TEXTS[:1], 290).fingerprint


def test_refusals_of_training():
    with pytest.raises(ValueError, match="too short to learn 9,000 tokens: it gives"):
        train_tokenizer(TEXTS[:1], 9000)
    with pytest.raises(ValueError, match="at least 265"):
        train_tokenizer(TEXTS, 264)


def test_files(tmp_path):
    TOKENIZER.save(tmp_path)
    found = Tokenizer.load(tmp_path)
    assert found.fingerprint == TOKENIZER.fingerprint
    assert found.bos == TOKENIZER.bos
    assert found.encode(TEXTS[0]) == TOKENIZER.encode(TEXTS[0])
    assert Tokenizer.load(tmp_path / "tokenizer.json").fingerprint == TOKENIZER.fingerprint
    other = Tokenizer.load(tmp_path, bos=SPECIALS[1])
    assert other.fingerprint != TOKENIZER.fingerprint


def test_transformers_reads_the_same_files(tmp_path):
    transformers = pytest.importorskip("transformers")
    TOKENIZER.save(tmp_path)
    found = transformers.AutoTokenizer.from_pretrained(tmp_path)
    written = f"{TEXTS[0]} {BOS} 12345  \n"
    assert found.encode(written, add_special_tokens=False) == TOKENIZER.encode(written)
    assert found.bos_token_id == TOKENIZER.bos
    assert found.decode(TOKENIZER.encode(written)) == written


def test_refusals_of_loading(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer.json is missing"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="not a tokenizer that can be read"):
        Tokenizer.load(tmp_path)


def test_a_tokenizer_of_another_kind(tmp_path):
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "[UNK]": 1}, "[UNK]"))
    raw.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="has no start-of-text token"):
        Tokenizer.load(tmp_path)
    config = {"eos_token": {"content": "[UNK]"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = Tokenizer.load(tmp_path)
    assert found.bos == 1
    with pytest.raises(ValueError, match="only for byte-level tokenizers"):
        found.token_bytes()
    with pytest.raises(ValueError, match="has no token"):
        Tokenizer.load(tmp_path, bos="<nope>")
