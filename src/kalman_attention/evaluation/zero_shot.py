"""Zero-shot evaluation through lm-evaluation-harness, with data from local files or the hub."""

import contextlib
import io
import logging
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets
from lm_eval import evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager

from kalman_attention._text import unknown
from kalman_attention.data.tokenizer import Tokenizer
from kalman_attention.evaluation.likelihood import continuations, document_nats
from kalman_attention.evaluation.questions import BENCHMARKS, Benchmark, Question
from kalman_attention.models.language_model import LanguageModel


class HarnessModel(TemplateLM):
    """A language model with the interface of the harness: log-likelihoods of continuations.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        bos: whether every context begins with start of text (an empty one always does).
        batch_size: rows per batch; the scores do not depend on it.
        max_length: maximum number of tokens the model reads.
        num_samples: number of posterior samples (KLA+); 0 uses the posterior mean.
        seed: seed of the samples.
        report: called with the number of finished requests.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        *,
        bos: bool = True,
        batch_size: int = 16,
        max_length: int = 2048,
        num_samples: int = 0,
        seed: int = 0,
        report: Callable[[int], object] | None = None,
    ) -> None:
        super().__init__()
        self.model, self.text, self.bos, self.report = model, tokenizer, bos, report
        self.options = {
            "batch_size": batch_size,
            "max_length": max_length,
            "num_samples": num_samples,
            "seed": seed,
        }

    @property
    def eot_token_id(self) -> int:
        """The start-of-text token, used as the context if there is none."""
        return self.text.bos

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Token ids, after start of text if requested."""
        begin = self.bos if add_special_tokens is None else add_special_tokens
        return [self.text.bos] * begin + self.text.encode(string)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        found: list[Any] = [None] * len(pairs)
        scores = continuations(self.model, pairs, **self.options)
        for done, (place, likelihood) in enumerate(scores, 1):
            found[place] = tuple(likelihood)
            if self.report:
                self.report(done)
        return found

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Log-probabilities of whole texts, with the state carried from chunk to chunk."""
        samples = {name: self.options[name] for name in ("num_samples", "seed")}
        texts = (request.args[0] for request in requests)
        return [
            -document_nats(self.model, self.text.bos, self.text.encode(text), **samples)
            for text in texts
        ]

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Not supported."""
        raise NotImplementedError("tasks that generate text are not supported, only likelihoods.")


def evaluate_zero_shot(
    harness: HarnessModel,
    names: Sequence[str] = tuple(BENCHMARKS),
    *,
    data: Path | None = None,
    limit: int | None = None,
) -> dict[str, Any]:
    """Score a model.

    Args:
        harness: the model with its options.
        names: tasks: with ``data``, names from ``BENCHMARKS``; otherwise any task of the harness.
        data: folder with local files; None downloads the data from the hub.
        limit: use only the first ``limit`` items of each task.

    Returns:
        ``{"settings": ..., "tasks": {name: {"items", "metric", "acc", "acc_stderr", ...}}}``,
        with scores between 0 and 1.
    """
    with _quiet():
        tasks = [local_task(name, data) for name in names] if data else _hub_tasks(names)
        found = evaluate(
            lm=harness,
            task_dict=_by_name(tasks),
            limit=limit,
            bootstrap_iters=1000,
            log_samples=False,
        )
    assert found is not None
    scores = {}
    for name in found["results"]:
        metrics = {k.partition(",")[0]: v for k, v in found["results"][name].items() if "," in k}
        paper = BENCHMARKS.get(name)
        items = found["n-samples"][name]["effective"]
        scores[name] = {"items": items, "metric": paper.metric if paper else None, **metrics}
    settings = {
        "bos": harness.bos,
        "limit": limit,
        "data": "hub" if data is None else "local files",
        **{k: v for k, v in harness.options.items() if k != "batch_size"},
        "harness": f"lm-eval {version('lm-eval')}",
    }
    return {"settings": settings, "tasks": scores}


def local_task(name: str, data: Path) -> ConfigurableTask:
    """A task of the harness that reads a local file and asks the same as the official one."""
    if name not in BENCHMARKS:
        raise ValueError(unknown("task with local files", name, BENCHMARKS))
    return ConfigurableTask(config=_config(BENCHMARKS[name], BENCHMARKS[name].read(data)))


def _config(benchmark: Benchmark, questions: list[Question]) -> dict[str, Any]:
    if not questions:
        raise ValueError(f"the file of {benchmark.name} is empty.")
    records = [question._asdict() for question in questions]
    config: dict[str, Any] = {
        "task": benchmark.name,
        "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(records)},
        "test_split": "test",
        "output_type": "multiple_choice",
        "num_fewshot": 0,
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        "metadata": {},
    }
    if benchmark.name == "lambada_openai":
        return config | {
            "output_type": "loglikelihood",
            "doc_to_text": lambda doc: doc["contexts"][0],
            "doc_to_target": lambda doc: f" {doc['choices'][0]}",
            "metric_list": [{"metric": "acc"}],
        }
    if len(questions[0].contexts) > 1:
        # With several contexts, the harness expects the index of the right one as the text.
        return config | {
            "doc_to_text": lambda doc: doc["gold"],
            "doc_to_target": lambda doc: doc["choices"][0],
            "doc_to_choice": lambda doc: doc["contexts"],
            "metric_list": [{"metric": "acc"}],
        }
    return config | {
        "doc_to_text": lambda doc: doc["contexts"][0],
        "doc_to_target": lambda doc: doc["gold"],
        "doc_to_choice": lambda doc: doc["choices"],
    }


def _hub_tasks(names: Sequence[str]) -> list[Any]:
    try:
        found = TaskManager().load(list(names))
    except Exception as error:  # no network, or no such dataset: the harness says which
        raise ValueError(
            f"cannot download the data from the hub: {error}. Pass local files with --task-data."
        ) from error
    return list(found["tasks"].values())


def _by_name(tasks: list[Any]) -> dict[str, Any]:
    for task in tasks:
        task.set_config(key="num_fewshot", value=0)
    return {"tasks": {task.config.task: task for task in tasks}, "groups": {}}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the progress bars of the harness, and its warnings about options not used here."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    nowhere = io.StringIO()
    try:
        with contextlib.redirect_stderr(nowhere), contextlib.redirect_stdout(nowhere):
            yield
    finally:
        logger.setLevel(before)
