"""A small corpus, and shards of it."""

import random

from kalman_attention.data.build import BuildOptions, build
from kalman_attention.data.sources import Corpus

TALK = "the filter sees 1234 noisy values, believes them a little; \u00e4h! \u4f60\u597d"
WORDS = TALK.split()


def text(seed, words):
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(words))


def corpus(folder, documents=60, longest=40, **options):
    """Documents separated by blank lines in one file."""
    lengths = random.Random(0)
    texts = [text(i, lengths.randint(1, longest)) for i in range(documents)]
    path = folder / "corpus.txt"
    path.write_text("\n\n".join(texts), encoding="utf-8")
    return Corpus(inputs=(str(path),), separator="\n\n", **options), texts


def options(folder, **changes):
    """Shards of 200 tokens; a vocabulary that the small corpus can teach."""
    documents = changes.pop("documents", 60)
    found, _ = corpus(folder, documents)
    return BuildOptions(**{"corpus": found, "vocab_size": 300, "shard_tokens": 200, **changes})


def shards(folder, **changes):
    out = folder / "shards"
    build(out, options(folder, **changes), workers=1, quiet=True)
    return out


def contents(folder):
    """Every file of a folder, by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
