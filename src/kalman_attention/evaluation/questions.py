"""The prompts of the paper's eight zero-shot tasks, from local files.

A file has one JSON record per line (see ``docs/evaluation.md``). A record is turned into the same
question as by lm-evaluation-harness: one or several contexts, one or several continuations, and the
index of the right pair. Context and continuation are separated by a space.
"""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

Record = dict[str, Any]


class Question(NamedTuple):
    """One item of a benchmark: either one context and several choices, or the reverse.

    Attributes:
        contexts: the contexts.
        choices: the possible continuations, without the space before them.
        gold: index of the right pair.
    """

    contexts: tuple[str, ...]
    choices: tuple[str, ...]
    gold: int

    def pairs(self) -> list[tuple[str, str]]:
        """Every context with its continuation, including the space."""
        many = max(len(self.contexts), len(self.choices))
        contexts = self.contexts * many if len(self.contexts) == 1 else self.contexts
        choices = self.choices * many if len(self.choices) == 1 else self.choices
        return [(c, f" {choice}") for c, choice in zip(contexts, choices, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A zero-shot task.

    Attributes:
        name: its name in lm-evaluation-harness.
        title: its name in the paper's table.
        path: path of its file, relative to the data folder.
        metric: the metric that the paper reports.
        question: turns a record into a ``Question``.
    """

    name: str
    title: str
    path: str
    metric: str
    question: Callable[[Record], Question]

    def read(self, folder: Path) -> list[Question]:
        """All items, in the order of the file."""
        path = folder / self.path
        path = path if path.is_file() else folder / path.name
        if not path.is_file():
            raise ValueError(
                f"{self.name} needs {self.path} in {folder}, which does not exist. Choose other "
                "tasks or another folder, or omit the folder to download the data from the hub."
            )
        found = []
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    found.append(self.question(json.loads(line)))
                except (ValueError, KeyError, TypeError, IndexError) as error:
                    raise ValueError(
                        f"line {number} of {path} is not a record of {self.name}: {error!r}."
                    ) from error
        return found


def _choose(context: str, record: Record) -> Question:
    choices = tuple(str(choice) for choice in record["choices"])
    gold = int(record["gold"])
    if not 0 <= gold < len(choices):
        raise IndexError(f"gold is {gold} but there are {len(choices)} choices")
    return Question((context,), choices, gold)


def _lambada(record: Record) -> Question:
    return Question((str(record["context"]),), (str(record["continuation"]),), 0)


_FRAGMENT = re.compile(r"(?:^|(?<=[.?!] ))[^.?!]*$")


def _hellaswag(record: Record) -> Question:
    """The harness capitalises the second part of a context, which begins a sentence.

    The files do not say where it begins; it is what follows the last end of a sentence.
    """
    query = str(record["query"])
    label, colon, text = query.partition(": ")
    found = _FRAGMENT.search(text)
    if colon and found and found.start() > 0:
        text = text[: found.start()] + text[found.start() :].capitalize()
    return _choose(label + colon + text, record)


def _piqa(record: Record) -> Question:
    return _choose(f"{str(record['query']).rstrip()}\nAnswer:", record)


def _arc(record: Record) -> Question:
    return _choose(f"Question: {record['query']}\nAnswer:", record)


def _winogrande(record: Record) -> Question:
    contexts = tuple(str(context) for context in record["context_options"])
    gold = int(record["gold"])
    if not 0 <= gold < len(contexts):
        raise IndexError(f"gold is {gold} but there are {len(contexts)} contexts")
    return Question(contexts, (str(record["continuation"]),), gold)


def _openbookqa(record: Record) -> Question:
    return _choose(str(record["query"]), record)


def _boolq(record: Record) -> Question:
    return _choose(f"{str(record['query']).removeprefix('Passage: ')}\nAnswer:", record)


BENCHMARKS = {
    each.name: each
    for each in (
        Benchmark(
            name="lambada_openai",
            title="LAMBADA",
            path="lambada/lambada_openai.jsonl",
            metric="acc",
            question=_lambada,
        ),
        Benchmark(
            name="hellaswag",
            title="HellaSwag",
            path="hellaswag/hellaswag_val.jsonl",
            metric="acc_norm",
            question=_hellaswag,
        ),
        Benchmark(name="piqa", title="PIQA", path="piqa/piqa.jsonl", metric="acc", question=_piqa),
        Benchmark(
            name="arc_easy",
            title="ARC-E",
            path="arc_easy/arc_easy.jsonl",
            metric="acc",
            question=_arc,
        ),
        Benchmark(
            name="arc_challenge",
            title="ARC-C",
            path="arc_challenge/arc_challenge.jsonl",
            metric="acc_norm",
            question=_arc,
        ),
        Benchmark(
            name="winogrande",
            title="WinoGrande",
            path="winogrande/winogrande.jsonl",
            metric="acc",
            question=_winogrande,
        ),
        Benchmark(
            name="openbookqa",
            title="OBQA",
            path="openbookqa/openbook_qa.jsonl",
            metric="acc",
            question=_openbookqa,
        ),
        Benchmark(
            name="boolq", title="BoolQ", path="boolq/boolq.jsonl", metric="acc", question=_boolq
        ),
    )
}
"""The tasks by name, in the order of the paper's table."""


def checksum(folder: Path) -> str:
    """A checksum of the files and of the questions made from them."""
    asked = {name: benchmark.read(folder) for name, benchmark in BENCHMARKS.items()}
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()
