"""``filtering/maps.py``: Theorem 2 and its corollary."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from kalman_attention.filtering import information
from kalman_attention.filtering.evidence import token_evidence
from kalman_attention.filtering.information import to_information
from kalman_attention.filtering.maps import Affine
from kalman_attention.ops.torch.prefix_scan import prefix_scan
from tests.systems import assert_close, examples, random_state, random_system, reals

maps = st.builds(Affine, reals, reals)


@given(maps, maps, maps)
@examples(50)
def test_compose_is_associative(first, second, third):
    left = third.compose(second).compose(first)
    right = third.compose(second.compose(first))
    assert_close(left, right, atol=1e-12)


@given(maps, maps, reals)
@examples(50)
def test_apply_of_compose_is_two_steps(first, second, eta):
    assert_close(second.compose(first).apply(eta), second.apply(first.apply(eta)), atol=1e-12)


@given(reals, reals, reals)
@examples(20)
def test_apply_is_the_affine_map(f, b, eta):
    assert Affine(f, b).apply(eta) == f * eta + b


def test_prefix_scan_of_maps_gives_all_information_means():
    x, belief = random_system(B=2, T=13), to_information(random_state())
    phi, b = token_evidence(x.k, x.v, x.lam_v)
    beliefs = [belief]
    for t in range(13):
        beliefs.append(information.step(beliefs[-1], x.a_bar, x.p_bar, phi[:, t], b[:, t]))
    lam, eta = (torch.stack(field, dim=1) for field in zip(*beliefs, strict=True))
    f = information.forget_gate(lam[:, :-1], x.a_bar, x.p_bar)
    path = prefix_scan(Affine.compose, Affine(f, b))
    assert_close(path.apply(eta[:, :1]), eta[:, 1:])
