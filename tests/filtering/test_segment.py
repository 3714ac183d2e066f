"""``filtering/segment.py``: a segment of tokens, and its adjoint, in numbers that stay bounded."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from kalman_attention.filtering import moment
from kalman_attention.filtering.evidence import token_evidence
from kalman_attention.filtering.maps import Projective
from kalman_attention.filtering.moment import KLAState
from kalman_attention.filtering.segment import AdjointMap, FilterMap
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

ZERO = torch.zeros((), dtype=torch.float64)
tokens = st.tuples(decays, noises, precisions, reals)
states = st.builds(KLAState, reals, variances)


def segment(*seen) -> FilterMap:
    total = FilterMap.identity_like(KLAState(ZERO, ZERO))
    for token in seen:
        total = total.then(*token)
    return total


def projective(m: FilterMap) -> Projective:
    """The seven entries that the five numbers stand for."""
    xx, ux = m.gain**2 + m.s * m.J, m.gain * m.eta + m.mu * m.J
    return Projective(xx, m.s, m.J, torch.ones_like(m.s), ux, m.mu, m.gain)


@given(tokens, states)
@examples(100)
def test_a_segment_of_one_token_is_the_filter_step(token, state):
    assert_close(segment(token).apply(state), moment.step(state, *token), rtol=1e-9, atol=1e-9)


@given(tokens, tokens, tokens, states)
@examples(100)
def test_apply_of_compose_is_one_segment_after_the_other(first, second, third, state):
    one, other = segment(first, second), segment(third)
    run = other.apply(one.apply(state))
    assert_close(other.compose(one).apply(state), run, rtol=1e-9, atol=1e-9)
    assert_close(segment(first, second, third).apply(state), run, rtol=1e-9, atol=1e-9)


@given(tokens, tokens, tokens)
@examples(100)
def test_compose_is_associative(first, second, third):
    a, b, c = segment(first), segment(second), segment(third)
    left, right = c.compose(b).compose(a), c.compose(b.compose(a))
    assert_close(left, right, rtol=1e-9, atol=1e-9)


@given(tokens, tokens)
@examples(100)
def test_the_five_numbers_are_the_projective_map(first, second):
    seven = Projective.from_evidence(*second).compose(Projective.from_evidence(*first))
    assert_close(projective(segment(first, second)), seven, rtol=1e-9, atol=1e-9)


def test_a_long_segment_is_the_filter_run():
    T = 500
    x, state = random_system(B=2, T=T), random_state()
    x = x._replace(p_bar=torch.where(torch.arange(2) == 0, x.p_bar, 0.0))
    phi, b = token_evidence(x.k, x.v, x.lam_v)
    total, run = FilterMap.identity_like(state), state
    for t in range(T):
        total = total.then(x.a_bar, x.p_bar, phi[:, t], b[:, t])
        run = moment.step(run, x.a_bar, x.p_bar, phi[:, t], b[:, t])
    summary = total.apply(state)
    assert_close(summary.mean, run.mean)
    assert_close(summary.variance, run.variance, atol=0)


def test_prefix_scan_of_segments_gives_all_beliefs():
    x, state = random_system(B=2, T=13), random_state()
    phi, b = token_evidence(x.k, x.v, x.lam_v)
    each = FilterMap.identity_like(KLAState(phi, phi)).then(x.a_bar, x.p_bar, phi, b)
    start = KLAState(*(part.unsqueeze(1) for part in state))
    path = prefix_scan(FilterMap.compose, each).apply(start)
    for t in range(13):
        state = moment.step(state, x.a_bar, x.p_bar, phi[:, t], b[:, t])
        assert_close(path.mean[:, t], state.mean)
        assert_close(path.variance[:, t], state.variance)


def test_the_adjoint_maps_compose():
    generator = torch.Generator().manual_seed(0)
    one, two = (
        AdjointMap(*torch.randn(4, 7, generator=generator, dtype=torch.float64)) for _ in range(2)
    )
    x = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    assert_close(two.compose(one).apply(*x), one.apply(*two.apply(*x)))


def test_no_token_changes_nothing():
    state = KLAState(torch.randn(3), torch.rand(3))
    assert_close(FilterMap.identity_like(state).apply(state), state, 0.0, 0.0)
    assert_close(AdjointMap.identity_like(state).apply(*state), tuple(state), 0.0, 0.0)
