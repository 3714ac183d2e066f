"""Finite groups: the axioms, the numbering, and which of them are solvable."""

import pytest
import torch

from kalman_attention.tasks.groups import GROUPS, compose, group

ORDERS = {"z2": 2, "a5": 60, "a4xz5": 60, "z60": 60, "s5": 120}


@pytest.mark.parametrize("name", GROUPS)
def test_axioms(name):
    table, n = group(name).table, ORDERS[name]
    everything = torch.arange(n)
    assert table.shape == (n, n)
    assert torch.equal(table[0], everything)  # element 0 is the identity
    assert torch.equal(table[:, 0], everything)
    for axis in (0, 1):  # every row and column holds each element once: inverses exist
        assert torch.equal(table.sort(axis).values, everything.unsqueeze(1 - axis).expand(n, n))
    a, b, c = torch.meshgrid(everything, everything, everything, indexing="ij")
    assert torch.equal(table[table[a, b], c], table[a, table[b, c]])


@pytest.mark.parametrize("name", GROUPS)
def test_table_is_the_product_of_permutation_matrices(name):
    g = group(name)
    points = torch.tensor(g.elements)
    # Matrix of p sends basis vector i to p(i); a product applies the right one first.
    matrices = torch.nn.functional.one_hot(points).transpose(1, 2).float()
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randint(len(points), (2, 200), generator=generator)
    assert torch.equal(matrices[a] @ matrices[b], matrices[g.table[a, b]])
    assert list(g.elements) == sorted(g.elements)


def test_published_numbering():
    names = ["".join(str(i + 1) for i in p) for p in group("a5").elements]
    assert names[:4] == ["12345", "12453", "12534", "13254"]
    assert names[59] == "54321"
    assert compose((1, 2, 0), (1, 0, 2)) == (2, 1, 0)


def derived(table, members):
    """The subgroup that the commutators of some elements generate."""
    inverse = (table == 0).int().argmax(1)
    a, b = torch.tensor(sorted(members)), torch.tensor(sorted(members)).unsqueeze(1)
    found = set(table[table[a, b], table[inverse[a], inverse[b]]].flatten().tolist())
    while True:
        each = torch.tensor(sorted(found))
        larger = set(table[each, each.unsqueeze(1)].flatten().tolist())
        if larger == found:
            return found
        found = larger


@pytest.mark.parametrize(
    ("name", "series"),
    [
        ("a5", [60, 60]),
        ("s5", [120, 60, 60]),
        ("a4xz5", [60, 4, 1]),
        ("z60", [60, 1]),
        ("z2", [2, 1]),
    ],
)
def test_derived_series(name, series):
    table = group(name).table
    members, sizes = set(range(len(table))), [len(table)]
    while len(sizes) < len(series):
        members = derived(table, members)
        sizes.append(len(members))
    assert sizes == series  # A5 is its own commutator subgroup: not solvable


def test_only_cyclic_groups_commute():
    commute = [name for name in GROUPS if torch.equal(group(name).table, group(name).table.t())]
    assert commute == ["z2", "z60"]
    everything = torch.arange(60)
    assert torch.equal(group("z60").table, (everything + everything.unsqueeze(1)) % 60)


def test_prefix_products():
    word = torch.tensor([[1, 3, 7, 59]])
    assert group("a5").prefix_products(word).tolist() == [[1, 6, 3, 46]]
    assert group("a5").prefix_products(word[:, :0]).shape == (1, 0)


def test_unknown_group():
    with pytest.raises(ValueError, match="Known: z2, a5, a4xz5, z60, s5"):
        group("m11")
