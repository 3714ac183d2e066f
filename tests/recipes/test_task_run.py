import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file

from kalman_attention.evaluation.synthetic import MacroAccuracy, predicted_tokens
from kalman_attention.evaluation.uncertainty import attention_maps
from kalman_attention.published import MAD_TASKS
from kalman_attention.recipes import mad, process_noise
from kalman_attention.recipes.cell import Results
from kalman_attention.recipes.inspection import load_trained, sample_maps, variance_trace
from kalman_attention.recipes.registry import load_experiment
from kalman_attention.recipes.runner import run_cells
from kalman_attention.train.snapshot import load_weights

QUIET = {"say": lambda line: None}


def smoke(experiment: str, labels: str) -> list:
    return [c for c in load_experiment(experiment).cells("smoke") if c.matches(labels)]


@pytest.mark.parametrize(
    ("experiment", "labels"),
    [
        ("mad", "kla/compression"),
        ("mad", "kla+/compression"),
        ("mad", "mlstm/memorization"),
        ("mad", "gla/fuzzy_recall"),
        ("mad", "kla+/recall"),
        ("mad-bare", "kla/compression"),
        ("mad-bare", "mamba/selective_copying"),
        ("mad-variations", "kla/fuzzy_recall/3 x epochs"),
        ("mad-variations", "kla/selective_copying/embeddings 0.3"),
        ("process-noise", "kla,p=0/noisy_recall"),
        ("ou-depth", "none/2blocks"),
        ("mqar", "gated_deltanet/d64"),
        ("a5", "attention/length4"),
        ("a5-curriculum", "kla/length4"),
        ("state-tracking", "rotating-kla"),
        ("state-tracking", "mamba/parity"),
        ("rotation", "shared 4, rotating/recall"),
        ("rotation", "tracking initialisation/selective_copying"),
    ],
)
def test_a_cell_trains_and_ends_in_the_table(tmp_path, experiment, labels):
    cells = smoke(experiment, labels)
    assert len(cells) == 1
    found = run_cells(cells, Results(tmp_path, "smoke"), **QUIET)
    (result,) = found
    assert 0.0 <= result["metrics"]["accuracy"] <= 1.0
    assert result["curve"][-1]["accuracy"] == result["last"]["accuracy"]
    assert result["parameters"] > 0
    text = "".join(
        cell
        for table in load_experiment(experiment).tables("smoke", found)
        for row in table.rows
        for cell in row
    )
    accuracy = 100 * result["metrics"]["accuracy"]
    if result["lengths"]:  # what is asked in the end is shown, not what was watched
        assert f"{100 * result['lengths']['8']['accuracy']:.0f}" in text
    else:
        assert f"{accuracy:.1f}" in text or f"{accuracy:.0f} /" in text


def test_the_ablation_changes_nothing_but_the_noise():
    learned = [c for c in mad.cells("cpu") if c.matches("kla/seed0")]
    learned = [
        c for c in learned if c.matches("lr0.003" if c.matches("fuzzy_recall") else "lr0.001")
    ]
    cells = process_noise.cells("cpu")
    assert cells[: len(learned)] == learned  # computed once, by whichever comes first
    assert len(learned) == len(MAD_TASKS)
    for with_noise, without in zip(learned, cells[len(learned) :], strict=True):
        assert without.run.model.kla.process_noise == "zero"
        layer = dataclasses.replace(without.run.model.kla, process_noise="learned")
        model = dataclasses.replace(without.run.model, kla=layer)
        assert dataclasses.replace(without.run, model=model) == with_noise.run


def test_the_seed_gives_the_first_weights():
    run = smoke("mad", "mamba/recall")[0].run
    first, second = run.make_model().state_dict(), run.make_model().state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("model", ["mamba", "kla+"])
def test_another_set_chooses_the_weights_than_the_one_that_counts(tmp_path, model):
    (cell,) = smoke("mad", f"{model}/selective_copying")
    run = dataclasses.replace(
        cell.run, training=dataclasses.replace(cell.run.training, epochs=3, lr=0.02)
    )
    found = run.execute(tmp_path, show=False)
    assert found["validation"]["accuracy"] == max(p["accuracy"] for p in found["curve"])
    task, trained = run.make_task(), run.make_model()
    load_weights(trained, tmp_path / "best")
    rows = task.generate("test", seed=0, count=64)
    test, other = ([z[part] for z in rows] for part in (slice(32), slice(32, None)))
    assert not (test[0].unsqueeze(1) == other[0]).all(-1).any()
    metric = MacroAccuracy()
    torch.manual_seed(0)
    samples = 10 if model == "kla+" else 0
    metric.update(predicted_tokens(trained.eval(), test[0], num_samples=samples), test[1])
    assert found["metrics"]["accuracy"] == metric.compute()
    assert task.generate("test", seed=0).inputs.equal(test[0])
    # Without it, the test set is the one that is watched.
    watched = dataclasses.replace(run, validation_size=None).execute(tmp_path / "2", show=False)
    assert "validation" not in watched
    assert watched["metrics"]["accuracy"] == max(p["accuracy"] for p in watched["curve"])


def test_evaluation_has_batches_of_its_own(tmp_path):
    (cell,) = smoke("mad-bare", "mamba/selective_copying")
    run = dataclasses.replace(cell.run, eval_batch_size=3)
    found = run.execute(tmp_path, show=False)
    task, trained = run.make_task(), run.make_model()
    load_weights(trained, tmp_path / "best")
    test, by_three, whole = task.generate("test", seed=0), MacroAccuracy(), MacroAccuracy()
    predicted = predicted_tokens(trained.eval(), test.inputs)
    whole.update(predicted, test.targets)
    for start in range(0, len(predicted), 3):
        part = slice(start, start + 3)
        by_three.update(predicted[part], test.targets[part])
    assert found["metrics"]["accuracy"] == pytest.approx(by_three.compute(), abs=1e-12)
    assert by_three.compute() != pytest.approx(whole.compute(), abs=1e-4)


def test_a_stopped_cell_goes_on_to_the_same_bits(tmp_path):
    (cell,) = smoke("mad", "kla/recall")
    whole, cut = Results(tmp_path / "whole", "smoke"), Results(tmp_path / "cut", "smoke")
    run_cells([cell], whole, **QUIET)
    training = dataclasses.replace(cell.run.training, epochs=None, max_steps=1)
    folder = cut.workplace(cell)
    dataclasses.replace(cell.run, training=training).execute(folder, show=False)
    run_cells([cell], cut, **QUIET)
    weights = [load_file(r.workplace(cell) / "last" / "model.safetensors") for r in (whole, cut)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_looking_into_a_trained_model(tmp_path):
    results = Results(tmp_path, "smoke")
    (cell,) = smoke("mad", "kla/selective_copying")
    assert load_trained(results, cell) is None
    run_cells([cell], results, **QUIET)
    trained = load_trained(results, cell)
    assert trained is not None
    T = trained.sequence.inputs.shape[1]
    trace = variance_trace(trained)
    assert trace.variance.shape == trace.gain.shape == (T, 128)
    copied = trained.sequence.targets[0][trained.sequence.targets[0] >= 0]
    assert trained.sequence.inputs[0, trace.marked].tolist() == copied.tolist()
    maps = sample_maps(trained)
    assert len(maps) == 4
    for channel, found in maps.items():
        expected = attention_maps(
            trained.model, trained.sequence.inputs, block=-1, channels=[channel]
        )
        torch.testing.assert_close(found, expected[0, 0])
        assert torch.equal(found, found.tril())
        assert found.shape == (T, T)


def test_lengths_grow_in_training_and_others_are_asked_in_the_end(tmp_path):
    (cell,) = smoke("state-tracking", "rotating-kla")
    run = dataclasses.replace(cell.run, grow_below=100.0)
    found = run.execute(tmp_path, show=False)
    assert set(found["lengths"]) == {"8", "16"}
    stored = json.loads((tmp_path / "last" / "checkpoint.json").read_text())
    assert (
        stored["state"]["batches"]["length"] == 6
    )  # from 2, one longer after each of four updates
    asked = [0.0 <= m["token_accuracy"] <= 1.0 for m in found["lengths"].values()]
    assert asked == [True, True]
    with pytest.raises(ValueError, match="fresh=True"):
        dataclasses.replace(cell.run, fresh=False)
