"""The tables of state tracking, from results that were made up."""

import dataclasses

import pytest

from kalman_attention.recipes.state_tracking import (
    MODELS,
    SCALES,
    TASKS,
    cells,
    fewest_blocks,
    median,
    tables,
)
from kalman_attention.tasks.registry import make_task


def made_up(name: str, task: str, depth: int, seed: int, shares: list[float]) -> dict:
    labels = {"model": name, "task": task, "depth": f"{depth}blocks", "seed": f"seed{seed}"}
    lengths = zip(SCALES["cpu"].test_lens, shares, strict=True)
    return {"labels": labels, "lengths": {str(n): {"accuracy": x} for n, x in lengths}}


RESULTS = [
    made_up("rotating-kla", "a5", 1, 0, [1.0, 1.0, 1.0, 0.95, 0.5]),
    made_up("rotating-kla", "a5", 1, 1, [1.0, 0.9, 0.8, 0.0, 0.0]),
    made_up("rotating-kla", "a5", 1, 2, [0.0, 0.0, 0.0, 0.0, 0.0]),
    made_up("lstm", "a5", 2, 0, [1.0, 1.0, 0.5, 0.0, 0.0]),
    made_up("rotating-kla", "parity", 1, 0, [1.0, 1.0, 1.0, 1.0, 0.25]),
]


def row(title: str, name: str, depth: int) -> list[str]:
    (table,) = [t for t in tables("cpu", RESULTS) if t.title.startswith(title)]
    (found,) = [r[2:] for r in table.rows if r[:2] == [name, str(depth)]]
    return found


def test_tables_show_best_and_median_over_seeds_and_how_many_solve_it():
    whole = row("a5, sequences", "rotating-kla", 1)
    assert whole == ["100 / 100", "100 / 90", "100 / 80", "95 / 0", "50 / 0"]
    seeds = row("a5, seeds", "rotating-kla", 1)
    assert seeds == ["2 of 3", "2 of 3", "1 of 3", "1 of 3", "0 of 3"]
    assert row("a5, sequences", "mamba", 1) == ["-"] * 5
    assert row("parity", "rotating-kla", 1) == ["100", "100", "100", "100", "25"]
    assert median(RESULTS, "rotating-kla", "a5", 1, 64) == 0.9
    assert median(RESULTS, "kla", "a5", 1, 64) is None


def test_fewest_blocks_are_those_of_the_best_seed():
    setting = SCALES["cpu"]
    found = [fewest_blocks(RESULTS, setting, "rotating-kla", "a5", n) for n in setting.test_lens]
    assert found == [1, 1, 1, 1, None]
    found = [fewest_blocks(RESULTS, setting, "lstm", "a5", n) for n in setting.test_lens]
    assert found == [2, 2, None, None, None]


def test_cells_differ_in_model_group_depth_and_seed_only():
    found = cells("cpu")
    assert len({cell.name for cell in found}) == len(found) == 2 * len(MODELS) * (5 + 4)
    for cell in found:
        run, labels = cell.run, cell.labels
        assert run.model.vocab_size == make_task(labels["task"]).vocab_size
        assert f"{len(run.model.layers)}blocks" == labels["depth"]
        assert run.start_len == {"1blocks": 6, "2blocks": 3}[labels["depth"]]
        first = next(
            c.run
            for c in found
            if (c.labels["task"], c.labels["depth"]) == (labels["task"], labels["depth"])
        )
        updates = {"seed": 0, "max_steps": 2_000, "eval_every": 100}
        slow = labels["model"] == "lstm" or (labels["model"], labels["task"]) == (
            "rotating-kla",
            "s5",
        )
        assert run.training.max_steps == (6_000 if slow else 2_000)
        same, training = (dataclasses.replace(x.training, **updates) for x in (first, run))
        assert training == same
        assert dataclasses.replace(run, model=first.model, training=first.training) == first


@pytest.mark.parametrize("task", TASKS)
def test_only_the_rotating_form_rotates(task):
    rotating = {c.labels["model"] for c in cells("cpu") if c.labels["task"] == task
                and c.run.model.kla is not None and c.run.model.kla.num_reflections}  # fmt: skip
    assert rotating == {"rotating-kla"}


def test_s5_gets_blocks_that_can_hold_it():
    """Its faithful representations in four dimensions have odd elements of determinant -1."""
    (layer,) = {
        c.run.model.kla
        for c in cells("cpu")
        if c.labels["model"] == "rotating-kla" and c.labels["task"] == "s5"
    }
    assert layer.shared_slots > 4
    assert layer.num_reflections % 2 == 0  # the same determinant for every token
    assert layer.num_reflections >= 4  # a cycle of five corners is four transpositions
