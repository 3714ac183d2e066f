"""The harness with local files: the official questions, and scores that a plain sum confirms."""

import json
import math
from pathlib import Path

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("lm_eval", reason="needs lm-eval: pip install 'kalman_attention[eval]'")

import datasets
import lm_eval.tasks
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks._yaml_loader import load_yaml

from kalman_attention.evaluation.questions import BENCHMARKS
from kalman_attention.evaluation.zero_shot import HarnessModel, evaluate_zero_shot, local_task
from tests.evaluation.checkpoints import model, tokenizer
from tests.evaluation.test_likelihood import one_by_one

FILES = Path(__file__).parent / "fixtures"


def records(name):
    return [json.loads(line) for line in (FILES / BENCHMARKS[name].path).read_text().splitlines()]


def choices(record):
    letters = list("ABCDE"[: len(record["choices"])])
    return {
        "choices": {"text": record["choices"], "label": letters},
        "answerKey": letters[record["gold"]],
    }


def hellaswag(record, second):
    label, _, text = record["query"].partition(": ")
    first = text[: len(text) - len(second)].rstrip()
    return {
        "activity_label": label,
        "ctx_a": first,
        "ctx_b": second,
        "endings": record["choices"],
        "label": str(record["gold"]),
    }


def winogrande(record):
    one, two = record["context_options"]
    same = next(i for i in range(len(one)) if one[i:] != two[i:] and one[:i] == two[:i] and
                one[i] != two[i])  # fmt: skip
    return {
        "sentence": f"{one[:same]}_ {record['continuation']}",
        "option1": one[same:],
        "option2": two[same:],
        "answer": str(record["gold"] + 1),
    }


def boolq(record):
    passage, _, question = record["query"].removeprefix("Passage: ").partition("\nQuestion: ")
    return {"passage": passage, "question": question.removesuffix("?"), "label": record["gold"]}


ORIGINAL = {
    "lambada_openai": lambda r: {"text": f"{r['context']} {r['continuation']}"},
    "piqa": lambda r: {
        "goal": r["query"].removeprefix("Question: ").rstrip("\n"),
        "sol1": r["choices"][0],
        "sol2": r["choices"][1],
        "label": r["gold"],
    },
    "arc_easy": lambda r: {"question": r["query"], **choices(r)},
    "arc_challenge": lambda r: {"question": r["query"], **choices(r)},
    "winogrande": winogrande,
    "openbookqa": lambda r: {"question_stem": r["query"], **choices(r)},
    "boolq": boolq,
}
"""What the original data set has for a record of a local file."""


OFFICIAL = {
    "lambada_openai": "lambada/lambada_openai.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "piqa": "piqa/piqa.yaml",
    "arc_easy": "arc/arc_easy.yaml",
    "arc_challenge": "arc/arc_challenge.yaml",
    "winogrande": "winogrande/default.yaml",
    "openbookqa": "openbookqa/openbookqa.yaml",
    "boolq": "super_glue/boolq/default.yaml",
}
"""Where the harness keeps its own definitions."""


def official(name):
    """The harness's own task, given the original form of our records instead of the network."""
    if name == "hellaswag":
        rows = [
            hellaswag(record, second)
            for record, second in zip(records(name), ["he", "", "the other Person"], strict=True)
        ]
    else:
        rows = [ORIGINAL[name](record) for record in records(name)]
    parts = dict.fromkeys(("train", "validation", "test"), datasets.Dataset.from_list(rows))
    config = load_yaml(Path(lm_eval.tasks.__file__).parent / OFFICIAL[name])
    assert config["task"] == name
    config |= {"custom_dataset": lambda **_: parts, "metadata": {}}
    return ConfigurableTask(config=config)


def asked(task):
    task.set_config(key="num_fewshot", value=0)
    task.build_all_requests(rank=0, world_size=1)
    return [instance.args for instance in task.instances]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_local_files_ask_what_the_official_tasks_ask(name):
    ours, theirs = asked(local_task(name, FILES)), asked(official(name))
    assert ours == theirs
    assert ours == [pair for q in BENCHMARKS[name].read(FILES) for pair in q.pairs()]


def plain_scores(net, text, benchmark, bos):
    """Accuracy by sums of log-probabilities: no harness, no batches."""
    acc = norm = 0
    questions = benchmark.read(FILES)
    begin = [text.bos] if bos else []
    for question in questions:
        sums, greedy = [], []
        for context, continuation in question.pairs():
            before = [*begin, *text.encode(context)]
            whole = [*begin, *text.encode(context + continuation)]
            log_prob, hit = one_by_one(net, whole[: len(before)], whole[len(before) :])
            sums.append(log_prob)
            greedy.append(hit)
        if benchmark.name == "lambada_openai":
            acc += greedy[0]
            continue
        acc += sums.index(max(sums)) == question.gold
        sizes = [len(choice) for choice in question.choices]
        if len(sizes) == len(sums):
            shares = [s / n for s, n in zip(sums, sizes, strict=True)]
            norm += shares.index(max(shares)) == question.gold
    return acc / len(questions), norm / len(questions)


@pytest.mark.parametrize("bos", [True, False])
def test_scores_are_those_of_plain_sums(bos):
    net, text = model(seed=3), tokenizer()
    found = evaluate_zero_shot(HarnessModel(net, text, bos=bos), data=FILES)
    assert list(found["tasks"]) == list(BENCHMARKS)
    for name, scores in found["tasks"].items():
        acc, norm = plain_scores(net, text, BENCHMARKS[name], bos)
        count = len(records(name))
        assert scores["items"] == count
        assert scores["acc"] == pytest.approx(acc)
        assert scores["acc_stderr"] == pytest.approx(math.sqrt(acc * (1 - acc) / (count - 1)))
        if "acc_norm" in scores:
            assert scores["acc_norm"] == pytest.approx(norm)
        assert BENCHMARKS[name].metric in scores
    assert found["settings"]["bos"] is bos


def responses(name, **options):
    harness = HarnessModel(model(), tokenizer(), **options)
    task = local_task(name, FILES)
    asked(task)
    return [r for r, _ in harness.loglikelihood(task.instances, disable_tqdm=True)]


@pytest.mark.parametrize("num_samples", [0, 4])
def test_scores_do_not_depend_on_the_batch(num_samples):
    for name in ("hellaswag", "winogrande"):
        one, two, many = (
            responses(name, batch_size=n, num_samples=num_samples) for n in (1, 3, 64)
        )
        assert one == pytest.approx(two, abs=1e-4)
        assert one == pytest.approx(many, abs=1e-4)


def test_options_change_the_scores():
    plain = responses("piqa")
    assert plain != pytest.approx(responses("piqa", bos=False), abs=1e-3)
    assert plain != pytest.approx(responses("piqa", num_samples=4), abs=1e-6)


def test_the_harness_gives_the_same_for_the_huggingface_model():
    pytest.importorskip("transformers")
    from lm_eval.models.huggingface import HFLM
    from transformers import PreTrainedTokenizerFast

    from kalman_attention.models.hf import KLAForCausalLM

    text = tokenizer()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=text.raw, bos_token=text.bos_token, pad_token=text.bos_token
    )
    stock = HFLM(
        pretrained=KLAForCausalLM.from_native(model()).eval(),
        tokenizer=fast,
        batch_size=4,
        add_bos_token=False,
    )
    for name in ("arc_easy", "lambada_openai"):
        task = local_task(name, FILES)
        asked(task)
        theirs = [r for r, _ in stock.loglikelihood(task.instances, disable_tqdm=True)]
        assert responses(name, bos=False) == pytest.approx(theirs, abs=1e-3)


def test_limit_takes_the_first():
    harness = HarnessModel(model(), tokenizer())
    found = evaluate_zero_shot(harness, ["boolq"], data=FILES, limit=2)
    assert found["tasks"]["boolq"]["items"] == 2
    assert found["settings"]["limit"] == 2


def test_rolling_likelihood_is_that_of_the_text():
    net, text = model(), tokenizer()
    task = local_task("piqa", FILES)
    asked(task)
    instance = task.instances[0]
    written = instance.args[0]
    [found] = HarnessModel(net, text).loglikelihood_rolling([instance])
    assert found == pytest.approx(one_by_one(net, [text.bos], text.encode(written))[0], abs=1e-3)


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match="unknown task with local files 'mmlu'"):
        local_task("mmlu", FILES)
    with pytest.raises(ValueError, match=r"piqa needs piqa/piqa.jsonl in"):
        local_task("piqa", tmp_path)
    (tmp_path / "piqa.jsonl").write_text('{"query": "x", "choices": ["a"], "gold": 1}\n')
    with pytest.raises(ValueError, match=r"line 1 of .* is not a record of piqa"):
        local_task("piqa", tmp_path)
    (tmp_path / "piqa.jsonl").write_text("")
    with pytest.raises(ValueError, match="the file of piqa is empty"):
        local_task("piqa", tmp_path)
    with pytest.raises(NotImplementedError, match="only likelihoods"):
        HarnessModel(model(), tokenizer()).generate_until([])
