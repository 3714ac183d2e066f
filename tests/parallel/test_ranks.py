"""One process alone, and what is said when there should be more."""

import pytest
import torch

from kalman_attention.parallel.ranks import Parallel, from_environment
from tests.models.small import small


def test_one_process_changes_nothing():
    ranks, model = Parallel(), small()
    groups = [{"params": list(model.parameters())}]
    with ranks as same, ranks.prepared(model, groups) as own, ranks.evaluating(model):
        assert same is ranks
        assert own is groups
        assert all(block.mixer.context is None for block in model.stack())
    assert (ranks.main, ranks.size, ranks.seed_parts) == (True, 1, ())
    assert ranks.agree(7) == 7
    assert ranks.follow({"loss": 0.25}) == {"loss": 0.25}
    tensors = {"x": torch.rand(2)}
    assert ranks.collect(tensors) == tensors
    assert ranks.command(["python", "a b.py"]) == "python 'a b.py'"


def test_the_command_that_starts_all_again(monkeypatch):
    ranks = Parallel()
    ranks.kind, ranks.everyone = "ddp", type(ranks.everyone)(0, 2)
    program = ["/bin/python", "-u", "-m", "kalman_attention", "pretrain"]
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert ranks.command(program) is None
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert ranks.command(program) == "torchrun --nproc-per-node=2 -m kalman_attention pretrain"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # one of two machines
    assert ranks.command(program) is None


def test_without_torchrun(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="start the program with torchrun"):
        from_environment("ddp")


def test_an_unknown_kind():
    with pytest.raises(ValueError, match="'ddp' or 'fsdp', got 'zero'"):
        Parallel("zero")
    with pytest.raises(ValueError, match="'ddp' or 'fsdp', got None"):
        Parallel(None, context=2)
