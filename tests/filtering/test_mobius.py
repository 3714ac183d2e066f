"""``filtering/maps.py``: Theorem 1 and its corollary."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from kalman_attention.filtering import information
from kalman_attention.filtering.evidence import token_evidence
from kalman_attention.filtering.information import Information
from kalman_attention.filtering.maps import Mobius
from kalman_attention.ops.torch.prefix_scan import prefix_scan
from tests.systems import (
    assert_close,
    decays,
    examples,
    noises,
    precisions,
    random_state,
    random_system,
    scalars,
    variances,
)

maps = st.builds(Mobius.from_evidence, decays, noises, precisions)


def step_precision(lam, a_bar, p_bar, phi):
    return information.step(Information(lam, lam), a_bar, p_bar, phi, phi).lam


def matrix(m: Mobius) -> torch.Tensor:
    return torch.stack([torch.stack([m.alpha, m.beta]), torch.stack([m.gamma, m.delta])])


@given(scalars(1e-3, 1e3), decays, noises, precisions)
@examples(50)
def test_map_of_one_token_is_the_precision_step(lam, a_bar, p_bar, phi):
    m = Mobius.from_evidence(a_bar, p_bar, phi)
    assert_close(m.apply(lam), step_precision(lam, a_bar, p_bar, phi))


@given(decays, noises, precisions)
@examples(50)
def test_matrix_of_the_theorem(a_bar, p_bar, phi):
    expected = [[1 + p_bar * phi, a_bar**2 * phi], [p_bar, a_bar**2]]
    expected = torch.tensor(expected, dtype=torch.float64)
    actual = matrix(Mobius.from_evidence(a_bar, p_bar, phi))
    assert_close(actual, expected)
    assert_close(actual.det(), a_bar**2, rtol=1e-8, atol=1e-12)


@given(maps, maps, maps)
@examples(50)
def test_compose_is_associative(first, second, third):
    left = third.compose(second).compose(first)
    right = third.compose(second.compose(first))
    assert_close(left, right)


@given(maps, maps, scalars(1e-3, 1e3))
@examples(50)
def test_apply_of_compose_is_two_steps(first, second, lam):
    assert_close(second.compose(first).apply(lam), second.apply(first.apply(lam)))


@given(maps, scalars(1e-3, 1e3), st.sampled_from([1e-9, 0.3, -2.0, 1e9]))
@examples(50)
def test_scale_does_not_matter(m, lam, scale):
    scaled = Mobius(*(scale * entry for entry in m))
    assert_close(scaled.apply(lam), m.apply(lam))
    assert_close(scaled.normalise(), m.normalise())
    assert_close(m.normalise().apply(lam), m.apply(lam))
    assert_close(scaled.compose(m), m.compose(scaled))


@given(maps, maps)
@examples(50)
def test_compose_is_the_matrix_product(first, second):
    product = matrix(second) @ matrix(first)
    assert_close(matrix(second.compose(first)), product / product[0, 0])


@given(maps, variances)
@examples(50)
def test_apply_variance_is_apply_of_the_inverse(m, s):
    assert_close(m.apply_variance(s), 1 / m.apply(1 / s))


def test_apply_variance_keeps_a_certainty():
    zero, half = torch.zeros((), dtype=torch.float64), torch.tensor(0.5, dtype=torch.float64)
    assert Mobius.from_evidence(half, zero, half).apply_variance(zero) == 0.0


def test_prefix_scan_of_maps_gives_all_precisions():
    x, lam_0 = random_system(B=2, T=13), random_state().lam
    phi, _ = token_evidence(x.k, x.v, x.lam_v)
    path = prefix_scan(Mobius.compose, Mobius.from_evidence(x.a_bar, x.p_bar, phi))
    scanned = path.apply(lam_0.unsqueeze(1))
    lam = lam_0
    for t in range(13):
        lam = step_precision(lam, x.a_bar, x.p_bar, phi[:, t])
        assert_close(scanned[:, t], lam)
