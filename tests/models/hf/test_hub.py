"""Folders on their own: found by the Auto classes, also where nobody imported us; and back."""

import ast
import json
import subprocess
import sys

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from kalman_attention import load_model, save_model
from kalman_attention.cli.main import main
from kalman_attention.evaluation.checkpoint import load_checkpoint
from kalman_attention.hf import (
    KLAForCausalLM,
    KLAForSequenceClassification,
    KLAForTokenClassification,
)
from tests.models import small as native_models
from tests.models.hf.small import PAD, config, padded, small, text

FRESH = """
import sys
{before}
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
ids = torch.tensor([[3, 1, 4, 1, 5]])
print(model.generate(ids, max_new_tokens=6, do_sample=False)[0].tolist())
"""

GONE = """
import importlib.abc
class Gone(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "kalman_attention":
            raise ModuleNotFoundError("No module named 'kalman_attention'")
sys.meta_path.insert(0, Gone())
"""


def in_a_fresh_process(folder, cache, before=""):
    return run_alone(["-c", FRESH.format(before=before), str(folder)], cache)


def run_alone(arguments, cache):
    """Python with these arguments, offline, with nothing of ours imported before."""
    environment = {"HF_HOME": str(cache), "PATH": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )


def test_a_process_that_never_imported_us(tmp_path):
    model = small("attention + kla")
    model.save_pretrained(tmp_path / "model")
    run = in_a_fresh_process(tmp_path / "model", tmp_path / "cache")
    assert run.returncode == 0, run.stderr
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    assert run.stdout.strip() == str(
        model.generate(ids, max_new_tokens=6, do_sample=False)[0].tolist()
    )


PIPELINE = """
import sys
from transformers import pipeline
write = pipeline("text-generation", sys.argv[1], trust_remote_code=True)
print(repr(write("ab ba", max_new_tokens=6, do_sample=False)[0]["generated_text"]))
"""

TASK = """
task: parity
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: ["a", "b"]
doc_to_target: label
metric_list: [{{metric: acc}}]
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A folder that ``kla export`` wrote, with its tokenizer."""
    pytest.importorskip("tokenizers")
    from tests.evaluation.checkpoints import checkpoint

    folder = tmp_path_factory.mktemp("exported")
    run = checkpoint(folder / "run", plan="attention + kla")
    assert main(["export", str(run), "--to", "hf", str(folder / "hf")]) == 0
    return folder / "hf"


def test_a_pipeline_in_a_process_that_never_imported_us(exported, tmp_path):
    run = run_alone(["-c", PIPELINE, str(exported)], tmp_path / "cache")
    assert run.returncode == 0, run.stderr
    model, tokenizer = load_checkpoint(exported)
    prompt = tokenizer.encode("ab ba")
    tokens = model.generate(torch.tensor([prompt]), max_new_tokens=6).tokens[0].tolist()
    assert ast.literal_eval(run.stdout) == tokenizer.decode([*prompt, *tokens])


@pytest.mark.slow
def test_the_harness_in_a_process_that_never_imported_us(exported, tmp_path):
    pytest.importorskip("lm_eval")
    pytest.importorskip("datasets")
    data, tasks = tmp_path / "docs.jsonl", tmp_path / "tasks"
    rows = [{"text": f"line {i} says", "label": i % 2} for i in range(4)]
    data.write_text("\n".join(json.dumps(row) for row in rows))
    tasks.mkdir()
    (tasks / "parity.yaml").write_text(TASK.format(data=data))
    arguments = f"pretrained={exported},trust_remote_code=True,dtype=float32"
    out = tmp_path / "out.json"
    command = (
        f"-m lm_eval --model hf --tasks parity --device cpu --log_samples --include_path {tasks}"
    )
    options = ["--model_args", arguments, "--output_path", str(out)]
    run = run_alone([*command.split(), *options], tmp_path / "cache")
    assert run.returncode == 0, run.stderr
    (found,) = tmp_path.glob("**/samples_parity_*.jsonl")
    model, tokenizer = load_checkpoint(exported)
    for line in found.read_text().splitlines():
        sample = json.loads(line)
        for choice, response in zip([" a", " b"], sample["filtered_resps"], strict=True):
            text = tokenizer.encode(sample["doc"]["text"])
            both = tokenizer.encode(sample["doc"]["text"] + choice)
            log_probs = model(torch.tensor([both])).logits.log_softmax(-1)[0]
            score = sum(log_probs[t - 1, both[t]] for t in range(len(text), len(both)))
            assert float(response[0]) == pytest.approx(float(score.detach()), abs=1e-3)


def test_without_the_package_the_error_says_what_to_install(tmp_path):
    small("kla*2").save_pretrained(tmp_path / "model")
    run = in_a_fresh_process(tmp_path / "model", tmp_path / "cache", GONE)
    assert run.returncode != 0
    assert "pip install kalman_attention" in run.stderr.splitlines()[-1]


def test_trusted_and_local_code_are_the_same_class(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    small("kla*2").save_pretrained(tmp_path / "model")
    for trust in (None, True):
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "model", trust_remote_code=trust)
        assert type(found) is KLAForCausalLM
        found.save_pretrained(tmp_path / "again")
        assert {x.name for x in (tmp_path / "again").glob("*.py")} == {"modeling_kla.py"}


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("plan", ["kla*2", "attention + kla"])
def test_sequences_are_classified_by_their_last_token(plan, left, tmp_path):
    torch.manual_seed(0)
    options = {"num_labels": 3, "pad_token_id": PAD}
    model = KLAForSequenceClassification(config(plan, **options)).eval()
    prompts, rows, mask = padded([3, 6], left=left)
    labels = torch.tensor([2, 0])
    found = model(rows, attention_mask=mask, labels=labels)
    assert found.logits.shape == (2, 3)
    for prompt, logits in zip(prompts, found.logits, strict=True):
        hidden = model.model(prompt).last_hidden_state[:, -1]
        torch.testing.assert_close(model.score(hidden)[0], logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.loss, torch.nn.functional.cross_entropy(found.logits, labels))
    found.loss.backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters())
    model.save_pretrained(tmp_path)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert type(again) is KLAForSequenceClassification
    assert torch.equal(again(rows, attention_mask=mask).logits, found.logits)


def test_every_token_is_classified(tmp_path):
    torch.manual_seed(0)
    model = KLAForTokenClassification(config("attention + kla", num_labels=5)).eval()
    ids, labels = text(2, 7), text(2, 7, seed=3) % 5
    labels[0, :2] = -100
    found = model(ids, labels=labels)
    expected = model.score(model.model(ids).last_hidden_state)
    assert torch.equal(found.logits, expected)
    torch.testing.assert_close(
        found.loss, torch.nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten())
    )
    model.save_pretrained(tmp_path)
    again = AutoModelForTokenClassification.from_pretrained(tmp_path)
    assert torch.equal(again(ids).logits, found.logits)
    # A trained language model lends its trunk.
    small("attention + kla", seed=4).save_pretrained(tmp_path / "lm")
    trunk = KLAForTokenClassification.from_pretrained(tmp_path / "lm", num_labels=5).model
    assert torch.equal(
        trunk.embedding.weight, small("attention + kla", seed=4).model.embedding.weight
    )


def test_each_loader_names_the_other(tmp_path):
    save_model(native_models.small(), tmp_path / "native")
    small().save_pretrained(tmp_path / "hf")
    with pytest.raises(ValueError, match=r"transformers model: .*KLAForCausalLM.from_pretrained"):
        load_model(tmp_path / "hf")
    with pytest.raises(ValueError, match=r"native model: .*load_model"):
        KLAForCausalLM.from_pretrained(tmp_path / "native")


def test_export_and_back(tmp_path, capsys):
    pytest.importorskip("tokenizers")
    from tests.evaluation.checkpoints import checkpoint, model

    run = checkpoint(tmp_path / "run", plan="attention + kla")
    assert main(["export", str(run), "--to", "hf", str(tmp_path / "hf")]) == 0
    assert "trust_remote_code=True" in capsys.readouterr().out
    ids = torch.tensor([[5, 7, 11, 13]])
    expected = model("attention + kla")(ids).logits
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    torch.testing.assert_close(theirs(ids).logits, expected)
    back = load_checkpoint(tmp_path / "hf")
    torch.testing.assert_close(back.model(ids).logits, expected)
    assert theirs.config.bos_token_id == back.tokenizer.bos
