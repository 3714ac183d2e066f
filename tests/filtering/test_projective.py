"""``filtering/maps.py``: mean and variance as one linear map."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from kalman_attention.filtering import moment
from kalman_attention.filtering.evidence import token_evidence
from kalman_attention.filtering.maps import Mobius, Projective
from kalman_attention.filtering.moment import KLAState
from kalman_attention.ops.torch.prefix_scan import prefix_scan
from tests.systems import (
    assert_close,
    decays,
    examples,
    noises,
    precisions,
    random_state,
    random_system,
    reals,
    variances,
)

maps = st.builds(Projective.from_evidence, decays, noises, precisions, reals)
states = st.builds(KLAState, reals, variances)


def matrix(m: Projective) -> torch.Tensor:
    zero = torch.zeros_like(m.xx)
    rows = [[m.xx, m.xw, zero], [m.wx, m.ww, zero], [m.ux, m.uw, m.uu]]
    return torch.stack([torch.stack(row) for row in rows])


@given(decays, noises, precisions, reals, states)
@examples(100)
def test_map_of_one_token_is_the_filter_step(a_bar, p_bar, phi, b, state):
    new = Projective.from_evidence(a_bar, p_bar, phi, b).apply(state)
    assert_close(new, moment.step(state, a_bar, p_bar, phi, b), atol=1e-12)


@given(maps, maps, maps)
@examples(50)
def test_compose_is_associative(first, second, third):
    left = third.compose(second).compose(first)
    right = third.compose(second.compose(first))
    assert_close(left, right, atol=1e-11)


@given(maps, maps, states)
@examples(50)
def test_apply_of_compose_is_two_steps(first, second, state):
    both = second.compose(first).apply(state)
    assert_close(both, second.apply(first.apply(state)), atol=1e-11)


@given(maps, maps)
@examples(50)
def test_compose_is_the_matrix_product(first, second):
    product = matrix(second) @ matrix(first)
    assert_close(matrix(second.compose(first)), product / product[1, 1], atol=1e-12)


@given(maps, states, st.sampled_from([1e-9, 0.3, -2.0, 1e9]))
@examples(50)
def test_scale_does_not_matter(m, state, scale):
    scaled = Projective(*(scale * entry for entry in m))
    assert_close(scaled.apply(state), m.apply(state), atol=1e-12)
    assert_close(scaled.normalise(), m.normalise())
    assert_close(m.normalise().ww, torch.ones_like(m.ww))


@given(maps, states)
@examples(20)
def test_identity_changes_nothing(m, state):
    one = Projective.identity_like(state.mean)
    assert_close(one.apply(state), state, rtol=0, atol=0)
    assert_close(one.compose(m), m.normalise())
    assert_close(m.compose(one), m.normalise())


@given(decays, noises, precisions, reals)
@examples(50)
def test_upper_block_is_the_mobius_map(a_bar, p_bar, phi, b):
    joint = Projective.from_evidence(a_bar, p_bar, phi, b)
    m = Mobius.from_evidence(a_bar, p_bar, phi)
    # In variances the rows change places: s = x / w is w / x read in precisions.
    assert_close((joint.ww, joint.wx, joint.xw, joint.xx), tuple(m))


@given(decays, noises, precisions, reals, states)
@examples(50)
def test_last_row_is_the_affine_map(a_bar, p_bar, phi, b, state):
    # Given the variances the mean moves affinely, with gate r a_bar and write s' b.
    joint = Projective.from_evidence(a_bar, p_bar, phi, b)
    w = joint.wx * state.variance + joint.ww
    new = moment.step(state, a_bar, p_bar, phi, b)
    prior = moment.predict(state, a_bar, p_bar)
    assert_close(joint.uu / w, moment.retention(prior.variance, phi) * a_bar)
    written = (joint.ux * state.variance + joint.uw) / w
    assert_close(written, new.variance * b)


def test_prefix_scan_of_maps_gives_all_beliefs():
    x, state = random_system(B=2, T=13), random_state()
    phi, b = token_evidence(x.k, x.v, x.lam_v)
    path = prefix_scan(
        Projective.compose, Projective.from_evidence(x.a_bar, x.p_bar, phi, b)
    ).apply(KLAState(*(part.unsqueeze(1) for part in state)))
    for t in range(13):
        state = moment.step(state, x.a_bar, x.p_bar, phi[:, t], b[:, t])
        assert_close(path.mean[:, t], state.mean)
        assert_close(path.variance[:, t], state.variance)
