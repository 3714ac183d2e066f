"""Which parameter trains at which rate: the table is frozen."""

import copy

import pytest
import torch

from kalman_attention import LanguageModel, preset
from kalman_attention.train.optim import Rates, group_names, matrix_decay_groups, param_groups
from tests.models.small import small

TABLE = {
    "embedding.weight": "embedding",
    "blocks.0.norm.weight": "vector",
    "blocks.0.mixer.qkv_proj.weight": "hidden",
    "blocks.0.mixer.out_proj.weight": "hidden",
    "blocks.0.mlp_norm.weight": "vector",
    "blocks.0.mlp.in_proj.weight": "hidden",
    "blocks.0.mlp.out_proj.weight": "hidden",
    "blocks.1.norm.weight": "vector",
    "blocks.1.mixer.skip.weight": "vector",
    "blocks.1.mixer.in_proj.weight": "hidden",
    "blocks.1.mixer.conv.weight": "vector",
    "blocks.1.mixer.conv.bias": "vector",
    "blocks.1.mixer.evidence_proj.weight": "hidden",
    "blocks.1.mixer.precision_up.weight": "hidden",
    "blocks.1.mixer.prior.log_a": "state_space",
    "blocks.1.mixer.prior.raw_p": "state_space",
    "blocks.1.mixer.prior.raw_dt": "state_space",
    "blocks.1.mixer.prior.mean_0": "state_space",
    "blocks.1.mixer.prior.log_variance_0": "state_space",
    "blocks.1.mixer.out_proj.weight": "hidden",
    "blocks.1.mlp_norm.weight": "vector",
    "blocks.1.mlp.in_proj.weight": "hidden",
    "blocks.1.mlp.out_proj.weight": "hidden",
    "norm.weight": "vector",
    "head.weight": "head",
}


def make():
    return small("attention + kla", mlp="swiglu", kla={"prior": "learned", "precision_rank": 3})


def test_table():
    assert group_names(make()) == TABLE
    assert group_names(copy.deepcopy(make())) == TABLE
    assert group_names(make().bfloat16()) == TABLE


def test_every_parameter_is_in_one_group():
    model = make()
    groups = param_groups(model)
    assert [group["name"] for group in groups] == [
        "embedding", "head", "hidden", "vector", "state_space"
    ]  # fmt: skip
    found = [id(p) for group in groups for p in group["params"]]
    assert sorted(found) == sorted(id(p) for p in model.parameters())
    torch.optim.AdamW(groups).step()


@pytest.mark.parametrize(
    ("name", "tokens", "hidden", "state_space"),
    [("kla-45m", 131_072, 2.5e-3, 2.5e-4), ("kla-180m", 524_288, 3.0e-3, 3.0e-4)],
)
def test_effective_rates_of_the_paper(name, tokens, hidden, state_space):
    with torch.device("meta"):
        model = LanguageModel(name)
    groups = param_groups(model, d_model=preset(name).d_model, batch_tokens=tokens)
    by_name = {group["name"]: group for group in groups}
    assert by_name["hidden"]["lr"] == pytest.approx(hidden, rel=0.005)
    assert by_name["state_space"]["lr"] == pytest.approx(state_space, rel=0.005)
    assert by_name["embedding"]["lr"] == pytest.approx(0.3 * by_name["hidden"]["lr"] / 4e-3)
    assert {n: g["weight_decay"] for n, g in by_name.items()} == {
        "embedding": 0.0, "head": 0.1, "hidden": 0.1, "vector": 0.0, "state_space": 0.0
    }  # fmt: skip
    assert all(g["betas"] == (0.8, 0.95) and g["eps"] == 1e-10 for g in groups)


def test_tied_frozen_and_foreign_parameters():
    model = small(tie_embeddings=True, kla={"process_noise": "fixed"})
    groups = param_groups(model, rates=Rates(hidden=1e-3))
    assert "head" not in [group["name"] for group in groups]
    frozen = {id(p) for p in model.parameters() if not p.requires_grad}
    assert len(frozen) == 2
    assert not frozen & {id(p) for group in groups for p in group["params"]}
    plain = torch.nn.Sequential(torch.nn.Embedding(3, 4), torch.nn.Linear(4, 3))
    assert group_names(plain) == {"0.weight": "embedding", "1.weight": "hidden", "1.bias": "vector"}


def test_only_matrices_decay_where_one_rate_serves_all():
    model = small("kla + attention", kla={"prior": "learned"})
    groups = matrix_decay_groups(model, lr=0.1, weight_decay=0.3)
    assert [(g["name"], g["lr"], g["weight_decay"]) for g in groups] == [
        ("matrices", 0.1, 0.3),
        ("others", 0.1, 0.0),
    ]
    names = {id(p): name for name, p in model.named_parameters()}
    matrices, others = ({names[id(p)] for p in g["params"]} for g in groups)
    assert matrices | others == set(names.values())
    assert "blocks.0.mixer.in_proj.weight" in matrices
    assert "head.weight" in matrices
    assert {n for n in others if "prior" in n} == {n for n in names.values() if "prior" in n}
    assert "embedding.weight" in others
