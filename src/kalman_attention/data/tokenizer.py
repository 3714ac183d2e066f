"""Byte-level BPE: train a tokenizer, or use any HuggingFace tokenizer.

A folder of shards or a checkpoint contains its tokenizer as ``tokenizer.json`` (the format of the
``tokenizers`` library) and ``tokenizer_config.json`` (which names the start-of-text token).
``Tokenizer.save`` and ``Tokenizer.load`` implement that convention; transformers'
``AutoTokenizer`` reads the same two files.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kalman_attention._files import whole_file, write_json
from kalman_attention._reading import open_file, read_json

if TYPE_CHECKING:
    import tokenizers

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"

BOS = "<|bos|>"
SPECIALS = (BOS, *(f"<|reserved_{i}|>" for i in range(8)))
"""The last nine entries of a trained vocabulary. Text is never encoded as one of them."""

BYTE_VOCABULARY = 256 + len(SPECIALS)
"""The smallest vocabulary: every byte, and the specials."""

PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)"
    r"|[^\r\n\p{L}\p{N}]?+\p{L}+"
    r"|\p{N}{1,2}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
"""Where text is split before merging: as for GPT-4, but with at most two digits in a run."""

# A limit against files that are not ours: tables over larger ids would exhaust the memory.
MOST_TOKENS = 1 << 24
"""Largest vocabulary."""

# So that a few long documents do not dominate the vocabulary.
TRAINING_CHARACTERS = 10_000
"""Characters of each document that are used for training a tokenizer."""


class Tokenizer:
    """Text to token ids and back.

    Args:
        raw: a tokenizer of the ``tokenizers`` library.
        bos: its start-of-text token, with which every document begins.
    """

    def __init__(self, raw: "tokenizers.Tokenizer", bos: str) -> None:
        raw.no_truncation()
        raw.no_padding()
        raw.encode_special_tokens = True  # "<|bos|>" in a text is text
        found = raw.token_to_id(bos)
        if found is None:
            raise ValueError(f"the tokenizer has no token {bos!r} to start documents with.")
        self.raw, self.bos_token, self.bos = raw, bos, found
        if not raw.get_vocab(with_added_tokens=False):
            raise ValueError("the vocabulary is empty: no text can be encoded.")
        if self.vocab_size > MOST_TOKENS:
            raise ValueError(
                f"the largest token id is {self.vocab_size - 1:,}, but must not exceed "
                f"{MOST_TOKENS - 1:,}."
            )

    @property
    def vocab_size(self) -> int:
        """Number of token ids, specials included."""
        return max(self.raw.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def fingerprint(self) -> str:
        """A hash that two tokenizers share only if they are equal."""
        content = json.loads(self.raw.to_str())
        text = json.dumps([content, self.bos_token], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without start of text."""
        ids: list[int] = self.raw.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of several texts."""
        found = self.raw.encode_batch_fast(list(texts), add_special_tokens=False)
        return [each.ids for each in found]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        text: str = self.raw.decode(list(ids), skip_special_tokens=True)
        return text

    def stream(self) -> Callable[[int], str]:
        """A function that decodes ids one by one; incomplete characters give an empty string."""
        tokenizers = _library()
        decoder = tokenizers.decoders.DecodeStream(skip_special_tokens=True)
        return lambda i: decoder.step(self.raw, i) or ""

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of every token; a character that several tokens make is with the last."""
        piece = self.stream()
        return [piece(i) for i in ids]

    def special_ids(self) -> list[int]:
        """Ids of special tokens."""
        return sorted(i for i, t in self.raw.get_added_tokens_decoder().items() if t.special)

    def token_bytes(self) -> NDArray[np.int64]:
        """Bytes of text per token, 0 for special tokens, ``[vocab_size]``."""
        parts = json.loads(self.raw.to_str())
        if not _byte_level(parts.get("decoder")):
            raise ValueError(
                "the bytes of a token are known only for byte-level tokenizers, and this one is "
                "of another kind. Count the bytes of the text instead."
            )
        sizes = np.zeros(self.vocab_size, dtype=np.int64)
        for token, i in self.raw.get_vocab(with_added_tokens=False).items():
            sizes[i] = len(token)  # one letter of the byte alphabet per byte
        for i, added in self.raw.get_added_tokens_decoder().items():
            sizes[i] = 0 if added.special else len(added.content.encode())
        return sizes

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the two files of the convention into an existing folder."""
        folder = Path(folder)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": self.bos_token,
            "clean_up_tokenization_spaces": False,
            "split_special_tokens": True,
        }
        write_json(folder / TOKENIZER_CONFIG, config)
        with whole_file(folder / TOKENIZER) as file:
            file.write(self.raw.to_str().encode())

    @classmethod
    def load(cls, source: str | os.PathLike[str], *, bos: str | None = None) -> "Tokenizer":
        """Read a tokenizer.

        Args:
            source: a folder with ``tokenizer.json``, such a file, or a name on the hub.
            bos: start-of-text token; None takes the one that ``tokenizer_config.json`` names, or
                the end-of-text token if there is none.
        """
        tokenizers = _library()
        path = Path(source)
        file = path / TOKENIZER if path.is_dir() else path
        # A path that looks local is never looked up on the hub.
        if not (file.exists() or file.is_symlink()):
            if path.is_dir() or path.suffix == ".json" or str(source).startswith((".", "/")):
                raise ValueError(
                    f"there is no tokenizer in {source}: {file.name} is missing. Folders of shards "
                    "and checkpoints contain one; name another with --tokenizer."
                )
            return _from_hub(str(source), bos)
        open_file(file).close()  # rejects pipes, for which the library would wait
        try:
            raw = tokenizers.Tokenizer.from_file(str(file))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the library is not an Exception
            raise ValueError(f"{file} is not a tokenizer that can be read: {error}.") from error
        config = file.parent / TOKENIZER_CONFIG
        named = read_json(config) if config.exists() or config.is_symlink() else {}
        try:
            return cls(raw, bos or _named_bos(raw, named))
        except ValueError as error:
            raise ValueError(f"{file} with {config.name}: {error}") from error


def train_tokenizer(
    documents: Iterable[str],
    vocab_size: int,
    *,
    max_characters: int = 2_000_000_000,
    fewer: bool = False,
) -> Tokenizer:
    """Train a byte-level BPE; the same documents always give the same tokenizer.

    Args:
        documents: text to train on, in order.
        vocab_size: entries, including nine special tokens; start of text is ``vocab_size - 9``.
        max_characters: maximum number of characters to read.
        fewer: accept fewer entries if the text is too short, instead of raising an error.
    """
    tokenizers = _library()
    if vocab_size < BYTE_VOCABULARY:
        raise ValueError(
            f"a byte-level vocabulary needs at least {BYTE_VOCABULARY} entries, got {vocab_size}."
        )
    raw = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=False, fuse_unk=False))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(PATTERN), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    raw.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIALS),
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    raw.train_from_iterator(_crop(documents, max_characters), trainer)
    learned = raw.get_vocab_size() + len(SPECIALS)
    if learned != vocab_size and not fewer:
        raise ValueError(
            f"the text is too short to learn {vocab_size:,} tokens: it gives {learned:,}. Ask for "
            f"at most {learned:,} (--vocab-size), or use more text or a tokenizer (--tokenizer)."
        )
    raw.add_special_tokens(list(SPECIALS))
    return Tokenizer(raw, BOS)


def _crop(documents: Iterable[str], budget: int) -> Iterable[str]:
    for text in documents:
        text = text[:TRAINING_CHARACTERS]
        budget -= len(text)
        yield text
        if budget <= 0:
            return


def _from_hub(name: str, bos: str | None) -> Tokenizer:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        file = hf_hub_download(name, TOKENIZER)
    except Exception as error:  # no network, no such name, no access: the message says which
        raise ValueError(
            f"the tokenizer {name!r} is neither a local file nor available from the hub: {error}"
        ) from error
    with suppress(EntryNotFoundError):  # then start of text is found by its usual names
        hf_hub_download(name, TOKENIZER_CONFIG)
    return Tokenizer.load(file, bos=bos)


_USUAL = (BOS, "<s>", "<|begin_of_text|>", "<bos>", "[BOS]", "<|endoftext|>")


def _named_bos(raw: "tokenizers.Tokenizer", config: dict[str, Any]) -> str:
    for key in ("bos_token", "eos_token"):
        token = config.get(key)
        token = token.get("content") if isinstance(token, dict) else token
        if token and not isinstance(token, str):
            raise ValueError(f"{key} must be text, got {token!r}.")
        if token:
            return str(token)
    for token in _USUAL:
        if raw.token_to_id(token) is not None:
            return token
    raise ValueError(
        f"the tokenizer has no start-of-text token ({TOKENIZER_CONFIG} has no bos_token), but "
        "every document starts with one. Name it with --bos."
    )


def _byte_level(decoder: dict[str, Any] | None) -> bool:
    if decoder is None:
        return False
    inner = decoder.get("decoders", [])
    return decoder.get("type") == "ByteLevel" or any(d.get("type") == "ByteLevel" for d in inner)


def _library() -> Any:
    try:
        import tokenizers
    except ModuleNotFoundError as error:
        raise ValueError(
            "tokenizers is not installed: pip install 'kalman_attention[data]'"
        ) from error
    return tokenizers
