"""What is read from disk is checked: a bad file ends the command with a message that names it."""

import dataclasses
import json
import resource
import signal
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("tokenizers")

from kalman_attention._files import sha256
from kalman_attention.cli.main import main
from kalman_attention.data.shards import ShardedTokens
from kalman_attention.evaluation.checkpoint import load_checkpoint, save_checkpoint
from kalman_attention.models.checksums import CHECKSUMS, MANIFEST, digest
from kalman_attention.models.storage import CONFIG, WEIGHTS, load_model, model_files, save_model
from kalman_attention.recipes import mad
from kalman_attention.recipes.cell import Results
from kalman_attention.recipes.pretrain import recipe
from kalman_attention.train.checkpoint import CheckpointError, read_checkpoint, write_checkpoint
from kalman_attention.train.snapshot import OPTIMISER, load_optimiser
from tests.data.small import shards
from tests.evaluation.checkpoints import model, tokenizer
from tests.first_hour import hostile
from tests.first_hour.hostile import Case, copied
from tests.processes import assert_refused, kla
from tests.test_import_rules import PACKAGE

MEMORY = 4 << 30
"""Bytes of address space; torch alone takes about half of them."""


class TooSlow(BaseException):
    """Not an Exception, so that no handler of the command takes it for an error of its own."""


@pytest.fixture(autouse=True)
def in_bounded_time():
    """A read that waits for ever, as of a pipe, fails its test."""

    def stop(*_):
        raise TooSlow

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Good folders: a checkpoint, shards, a finished run on them, and results of one cell."""
    root = tmp_path_factory.mktemp("good")
    (root / "text.txt").write_text("the filter sees noisy values")
    data = shards(root)
    for name in ("model", "run"):
        save_checkpoint(model(), ShardedTokens(data).tokenizer(), root / name)
        (root / name / CHECKSUMS).unlink()  # the hostile have none, or a good one
    chosen = recipe("kla-nano", seq_len=32, micro_batch=2, batch_tokens=64, tokens=128)
    _write(root / "run/pretrain.json", _origin(chosen, data))
    summary = {"model": "kla-nano", "parameters": 3, "tokens": 128}
    _write(root / "run/summary.json", summary)
    _write(root / "run/metrics.jsonl", {"kind": "eval", "step": 2, "bits_per_byte": 3.5})
    results, cell = Results(root / "results", "smoke"), mad.cells("smoke")[0]
    point = {"step": 1, "accuracy": 0.5}
    metrics = {"accuracy": 0.5, "token_accuracy": 0.5}
    results.save(cell, {"metrics": metrics, "curve": [point]})
    return root


def _origin(chosen, data):
    index = sha256(data / "index.json")
    return {
        "recipe": dataclasses.asdict(chosen),
        "data": {"folder": str(data), "index": index},
        "about": {},
    }


def _write(path, data):
    path.write_text(json.dumps(data) + "\n")


def cases(found):
    return pytest.mark.parametrize("case", found, ids=[case.name for case in found])


def refused(capsys, command, *words):
    """The command ends with one message, which holds the words."""
    code = main([str(part) for part in command])
    said = capsys.readouterr()
    assert code in (1, 2), said.out
    message = said.err
    assert message.count("error: ") == 1
    assert not [word for word in words if word not in message], message


def spoilt(good, tmp_path, name, case):
    folder = copied(good / name, tmp_path / name)
    case.spoil(folder)
    return folder


def test_the_good_folders_are_good(good, tmp_path, capsys):
    text = good / "text.txt"
    assert main(["eval", str(good / "model"), "--text", str(text)]) == 0
    assert main(["generate", str(good / "model"), "the", "--max-new-tokens", "2"]) == 0
    assert main(["eval", str(good / "run")]) == 0
    assert main(["report", str(good / "results"), "--out", str(tmp_path / "page.html")]) == 0
    pytest.importorskip("matplotlib")
    out = tmp_path / "compare"
    assert main(["compare", str(good / "run"), "--seconds", "0", "--out", str(out)]) == 0
    assert "3.5" not in capsys.readouterr().err


@cases(hostile.CONFIGS + hostile.MODELS + hostile.TOKENIZERS)
def test_checkpoints(good, tmp_path, capsys, case: Case):
    folder = spoilt(good, tmp_path, "model", case)
    refused(capsys, ["eval", folder, "--text", good / "text.txt"], case.file, *case.also)


@cases([hostile.CONFIGS[2], hostile.MODELS[3], hostile.MODELS[16], hostile.TOKENIZERS[1]])
def test_generate(good, tmp_path, capsys, case: Case):
    folder = spoilt(good, tmp_path, "model", case)
    refused(capsys, ["generate", folder, "the"], case.file)


@cases(hostile.INDICES)
def test_shards(good, tmp_path, capsys, case: Case):
    folder = spoilt(good, tmp_path, "shards", case)
    refused(capsys, ["eval", good / "model", "--shards", folder], case.file, *case.also)


@cases(hostile.RUNS)
def test_runs(good, tmp_path, capsys, case: Case):
    refused(capsys, ["eval", spoilt(good, tmp_path, "run", case)], case.file, *case.also)


@cases(hostile.COMPARED)
def test_compared_runs(good, tmp_path, capsys, case: Case):
    pytest.importorskip("matplotlib")
    folder = spoilt(good, tmp_path, "run", case)
    command = ["compare", folder, "--seconds", "0", "--out", tmp_path / "out"]
    refused(capsys, command, case.file, *case.also)


@cases(hostile.CELLS)
def test_results(good, tmp_path, capsys, case: Case):
    root = copied(good / "results", tmp_path / "results")
    (file,) = root.rglob("cells/*.json")
    file.rename(file.with_name(hostile.CELL))
    case.spoil(file.parent)
    file.with_name(hostile.CELL).rename(file)
    refused(capsys, ["report", root], file.name, *case.also)


def limited():
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"plan": "kla*1000000"}, [CONFIG, "4,096 blocks"]),
        ({"vocab_size": 10**12}, [WEIGHTS, "vocab_size"]),
        ({"kla__d_inner": 10**9}, [WEIGHTS, "has the shape"]),
    ],
    ids=["a million blocks", "vocabulary", "channels"],
)
def test_a_small_file_takes_no_memory(good, tmp_path, changes, words):
    folder = copied(good / "model", tmp_path / "model")
    hostile.fields(CONFIG, **changes)(folder)
    command = ("generate", str(folder), "the")
    assert_refused(kla(*command, cwd=tmp_path, timeout=120, preexec_fn=limited), *words)


def test_files_without_an_end_take_no_memory(good, tmp_path):
    folder = copied(good / "model", tmp_path / "model")
    hostile.replaced(WEIGHTS, hostile.a_device)(folder)
    command = ("generate", str(folder), "the")
    assert_refused(kla(*command, cwd=tmp_path, timeout=120, preexec_fn=limited), WEIGHTS)


@pytest.mark.parametrize("file", [CONFIG, WEIGHTS])
@pytest.mark.parametrize("verb", ["eval", "generate", "compare"])
def test_one_flipped_bit(good, tmp_path, capsys, verb, file):
    place = {CONFIG: b'"norm_eps": 1e-05', WEIGHTS: b""}[file]
    folder = copied(good / "run", tmp_path / "run")
    save_model(load_model(folder), folder)
    data = (folder / file).read_bytes()
    where = data.index(place) + len(place) - 1 if place else len(data) - 9
    (folder / file).write_bytes(data[:where] + bytes([data[where] ^ 1]) + data[where + 1 :])
    command = {
        "eval": ["eval", folder],
        "generate": ["generate", folder, "the"],
        "compare": ["compare", folder, "--seconds", "0", "--out", tmp_path / "out"],
    }[verb]
    refused(capsys, command, str(folder / file), "damaged", "SHA-256")


def test_one_flipped_bit_in_a_process_of_its_own(good, tmp_path):
    folder = copied(good / "model", tmp_path / "model")
    save_model(load_model(folder), folder)
    hostile.flip(WEIGHTS, 0.9, bit=3)(folder)
    text = str(good / "text.txt")
    assert_refused(kla("eval", str(folder), "--text", text, cwd=tmp_path), WEIGHTS, "SHA-256")


@pytest.mark.parametrize("whole", range(4))
def test_a_crash_while_saving_leaves_a_folder_that_loads(tmp_path, monkeypatch, whole):
    from kalman_attention.models import checksums, storage

    save_model(model(seed=0), tmp_path)
    real, written = storage.write_atomically, []

    def dies(path, data):
        if len(written) == whole:
            raise OSError("crash")
        written.append(path.name)
        real(path, data)

    for module in (storage, checksums):
        monkeypatch.setattr(module, "write_atomically", dies)
    with pytest.raises(OSError, match="crash") if whole < 3 else nullcontext():
        save_model(model(seed=1), tmp_path)
    assert load_model(tmp_path).config == model().config
    assert (tmp_path / CHECKSUMS).exists() == (whole == 3)


def test_checkpoints_of_training_are_checked(good, tmp_path, capsys):
    run = copied(good / "run", tmp_path / "run")
    for name in (CONFIG, WEIGHTS):
        (run / name).unlink()
    step = write_checkpoint(run / "checkpoints", 3, model_files(model()), {})
    assert main(["eval", str(run)]) == 0
    hostile.flip(WEIGHTS, 0.9, bit=3)(step)
    refused(capsys, ["eval", run], str(step / WEIGHTS), "SHA-256")


@pytest.mark.parametrize(
    "changes",
    [
        {"step": "3"},
        {"state": []},
        {"files": [1]},
        {"files": {"../../model.safetensors": {"bytes": 1, "sha256": "0"}}},
        {"files": {WEIGHTS: {"bytes": "1"}}},
        {"files": {WEIGHTS: 3}},
        {"format": 2},
    ],
)
def test_manifests_with_a_good_digest(tmp_path, changes):
    folder = write_checkpoint(tmp_path, 3, model_files(model()), {})
    manifest = json.loads((folder / MANIFEST).read_text()) | changes
    del manifest["digest"]
    canonical = json.dumps(manifest, sort_keys=True).encode()
    (folder / MANIFEST).write_text(json.dumps({"digest": digest(canonical), **manifest}))
    with pytest.raises(CheckpointError, match=MANIFEST):
        read_checkpoint(folder)


@pytest.mark.parametrize(
    "name", ["exp_avg/nowhere", "exp_avg/head.weight"], ids=["no parameter", "another shape"]
)
def test_states_of_optimisers(tmp_path, name):
    own = model()
    save_file({name: torch.zeros(3)}, tmp_path / OPTIMISER)
    with pytest.raises(ValueError, match=f"{name} in .*{OPTIMISER} does not match"):
        load_optimiser(own, torch.optim.AdamW(own.parameters()), tmp_path)


def test_weights_that_overflow_have_no_score(good, tmp_path, capsys):
    folder = copied(good / "model", tmp_path / "model")
    hostile.weights(lambda tensors: tensors["head.weight"].fill_(3e38))(folder)
    command = ["eval", folder, "--text", good / "text.txt"]
    refused(capsys, command, str(folder), "not finite")
    refused(capsys, ["generate", folder, "the"], str(folder), "NaN")


@pytest.mark.parametrize(
    "name",
    ["variance-smoke/variance.svg", "scaling-smoke/scan.json", "verdicts.json", "lm/kla.json"],
)
def test_reports_do_not_follow_links_out_of_their_folder(good, tmp_path, capsys, name):
    secret = tmp_path / "secret"
    secret.write_text("{}")
    root = copied(good / "results", tmp_path / "root")
    place = root / name
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(secret)
    refused(capsys, ["report", root], str(place), "leads out of")


def test_reports_do_not_follow_links_to_cells(good, tmp_path, capsys):
    root = copied(good / "results", tmp_path / "root")
    (place,) = root.rglob("cells/*.json")
    place.rename(tmp_path / "secret.json")
    place.symlink_to(tmp_path / "secret.json")
    refused(capsys, ["report", root], str(place), "leads out of")


def test_reports_may_follow_links_within_their_folder(good, tmp_path):
    root = copied(good / "results", tmp_path / "root")
    (root / "variance-smoke").mkdir()
    (root / "picture.svg").write_text("<svg>mine</svg>")
    (root / "variance-smoke/variance.svg").symlink_to("../picture.svg")
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (root / "report.html").symlink_to(secret)
    assert main(["report", str(root)]) == 0
    assert secret.read_text() == "secret"
    assert not (root / "report.html").is_symlink()
    assert "<img" in (root / "report.html").read_text()


def test_nothing_unpickles():
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        found = [w for w in ("torch.load(", "np.load(", "allow_pickle", "pickle.") if w in text]
        assert not found, (path, found)


def test_pickles_of_transformers_are_refused(tmp_path):
    pytest.importorskip("transformers")
    from kalman_attention.models.hf import KLAForCausalLM

    own = KLAForCausalLM.from_native(model())
    own.save_pretrained(tmp_path)
    assert (tmp_path / CHECKSUMS).is_file()
    KLAForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="safetensors only"):
        KLAForCausalLM.from_pretrained(tmp_path, use_safetensors=False)
    hostile.flip(WEIGHTS, 0.9, bit=3)(tmp_path)
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        KLAForCausalLM.from_pretrained(tmp_path)
    for name in (WEIGHTS, CHECKSUMS):
        (tmp_path / name).unlink()
    torch.save(own.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises((ValueError, OSError), match="safetensors"):
        KLAForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (hostile.fields(CONFIG, hidden_size="x"), [CONFIG, "whole number"]),
        (hostile.fields(CONFIG, layer_mixers=["kla"] * 5000), [CONFIG, "4,096"]),
        (hostile.fields(CONFIG, vocab_size=10**12), [WEIGHTS, "vocab_size"]),
        (hostile.fields(CONFIG, state_size=10**12), [WEIGHTS, "has the shape"]),
        (hostile.removed("lm_head"), [WEIGHTS, "no head.weight"]),
        (hostile.cut(WEIGHTS, 0.5), [WEIGHTS, "damaged"]),
    ],
    ids=["width", "blocks", "vocabulary", "slots", "no head", "cut"],
)
def test_folders_of_transformers(good, tmp_path, capsys, spoil, words):
    pytest.importorskip("transformers")
    from kalman_attention.models.hf import KLAForCausalLM

    folder = copied(good / "model", tmp_path / "model")
    KLAForCausalLM.from_native(model()).save_pretrained(folder)
    (folder / CHECKSUMS).unlink()
    spoil(folder)
    refused(capsys, ["eval", folder, "--text", good / "text.txt"], *words)


def test_several_files_of_weights(tmp_path):
    pytest.importorskip("transformers")
    from kalman_attention.models.hf import KLAForCausalLM

    own = model()
    KLAForCausalLM.from_native(own).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    tokenizer().save(tmp_path)
    ids = torch.arange(20).view(2, 10)
    assert torch.equal(load_checkpoint(tmp_path).model(ids).logits, own(ids).logits)
    hostile.fields(f"{WEIGHTS}.index.json", weight_map={"x": "../x.safetensors"})(tmp_path)
    with pytest.raises(ValueError, match=r"index\.json"):
        load_checkpoint(tmp_path)


def test_loading_keeps_what_a_model_is(tmp_path):
    torch.manual_seed(0)
    own = model("attention + kla", tie_embeddings=True)
    own.embedding.bfloat16()
    before = torch.get_rng_state()
    save_model(own, tmp_path)
    found = load_model(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)  # loading draws nothing
    assert found.head.weight is found.embedding.weight
    assert not [name for name, x in found.named_parameters() if x.is_meta]
    assert {n: x.dtype for n, x in found.named_parameters()} == {
        n: x.dtype for n, x in own.named_parameters()
    }
