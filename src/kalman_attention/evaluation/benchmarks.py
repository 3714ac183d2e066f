"""The paper's eight zero-shot tasks: their prompts, from local files.

A file has one JSON record per line (see ``docs/evaluation.md``). What becomes of a record is what
lm-evaluation-harness makes of the original one: one or several contexts, one or several
continuations, and which pair is right. A space stands between the two.
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
        contexts: what comes before.
        choices: what may follow; without the space between.
        gold: place of the right pair.
    """

    contexts: tuple[str, ...]
    choices: tuple[str, ...]
    gold: int

    def pairs(self) -> list[tuple[str, str]]:
        """Every context with its continuation, the space included."""
        many = max(len(self.contexts), len(self.choices))
        contexts = self.contexts * many if len(self.contexts) == 1 else self.contexts
        choices = self.choices * many if len(self.choices) == 1 else self.choices
        return [(c, f" {choice}") for c, choice in zip(contexts, choices, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A task.

    Attributes:
        name: as in lm-evaluation-harness.
        title: as in the paper's table.
        path: of its file, below the folder of all.
        metric: the one the paper reports.
        question: from a record.
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
                f"{self.name} needs {self.path} in {folder}, which is not there. Choose other "
                "tasks, another folder, or none to fetch the data from the hub."
            )
        found = []
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    found.append(self.question(json.loads(line)))
                except (ValueError, KeyError, TypeError, IndexError) as error:
                    raise ValueError(
                        f"line {number} of {path} is no record of {self.name}: {error!r}."
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
    """The harness capitalises the second part of a context, the beginning of a sentence.

    The files have lost where it begins; it is the words after the last end of a sentence.
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
    """What tells these files, and what is asked of them, from others."""
    asked = {name: benchmark.read(folder) for name, benchmark in BENCHMARKS.items()}
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()
