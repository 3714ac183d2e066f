"""``filtering/identities.py``: each form equals the filter on its domain."""

import torch
from hypothesis import given

from kalman_attention import KLAState, kla_scan_ref
from kalman_attention.filtering import information, moment
from kalman_attention.filtering.evidence import token_evidence
from kalman_attention.filtering.identities import (
    attention_form,
    gated_recurrence,
    lti_convolution,
    ridge_objective,
)
from kalman_attention.filtering.information import Information, to_information
from tests.oracles import oracle_beliefs
from tests.systems import (
    System,
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


@given(reals, variances, decays, noises, precisions, reals)
@examples(50)
def test_gated_recurrence_is_the_mean_of_the_filter(mean, variance, a_bar, p_bar, phi, b):
    new = moment.step(KLAState(mean, variance), a_bar, p_bar, phi, b)
    # 1 - phi / lam cancels when the token outweighs the prior: absolute error of the gate.
    atol = 1e-13 * (1 + mean.abs().item() + b.abs().item() * new.variance.item())
    assert_close(gated_recurrence(mean, new.lam, a_bar, phi, b), new.mean, atol=atol)


def test_gated_recurrence_along_a_sequence_against_the_oracle():
    x, state = random_system(B=2, T=8), random_state()
    beliefs = oracle_beliefs(x.k, x.v, x.lam_v, x.a_bar, x.p_bar, state)
    phi, b = token_evidence(x.k, x.v, x.lam_v)
    mu = state.mean
    for t in range(8):
        mu = gated_recurrence(mu, beliefs.lam[:, t], x.a_bar, phi[:, t], b[:, t])
        assert_close(mu, beliefs.mean[:, t], rtol=1e-11)


def ridge_case() -> tuple[System, KLAState, KLAState, torch.Tensor]:
    """A token, the belief before and after it, and the predicted precision."""
    x, state = random_system(B=2, T=1), random_state()
    phi, b = token_evidence(x.k[:, 0], x.v[:, 0], x.lam_v[:, 0])
    lam_prior = moment.predict(state, x.a_bar, x.p_bar).lam
    return x, state, moment.step(state, x.a_bar, x.p_bar, phi, b), lam_prior


def test_ridge_objective_is_stationary_at_the_posterior_mean():
    x, state, posterior, lam_prior = ridge_case()

    def objective(mu):
        token = x.k[:, 0], x.v[:, 0], x.lam_v[:, 0]
        return ridge_objective(mu, state.mean, lam_prior, x.a_bar, *token)

    mu = posterior.mean.clone().requires_grad_()
    (slope,) = torch.autograd.grad(objective(mu).sum(), mu, create_graph=True)
    assert_close(slope, torch.zeros_like(slope), atol=1e-12)
    # A parabola of curvature 2 lam: the minimum, and the precision is how sharp it is.
    (curvature,) = torch.autograd.grad(slope.sum(), mu)
    assert_close(curvature, 2 * posterior.lam)
    shift = torch.linspace(0.1, 1.0, mu.numel(), dtype=mu.dtype).view_as(mu)
    rise = objective(posterior.mean + shift) - objective(posterior.mean)
    assert_close(rise, posterior.lam * shift**2, rtol=1e-11)


def test_ridge_objective_by_hand():
    one = torch.ones(1, 1, dtype=torch.float64)
    value = ridge_objective(
        2 * one, 3 * one, 5 * one, 0.5 * one, k=7 * one[0], v=11 * one[0], lam_v=13 * one[0]
    )
    assert value.item() == 13 * (11 - 7 * 2) ** 2 + 5 * (2 - 0.5 * 3) ** 2


def test_lti_convolution_is_the_information_recursion_from_nothing():
    x = random_system(B=2, T=12, seed=2)
    k = x.k[0, 0]
    lam, eta = lti_convolution(k, x.v, x.lam_v, x.a_bar)
    assert lam.shape == eta.shape == (2, 12, 3, 2)
    zero = torch.zeros(2, 3, 2, dtype=torch.float64)
    belief = Information(zero, zero)
    for t in range(12):
        phi, b = token_evidence(k.expand(2, 3), x.v[:, t], x.lam_v[:, t])
        belief = information.step(belief, x.a_bar, torch.zeros_like(x.p_bar), phi, b)
        # The FFT rounds relative to the largest entry of the whole path.
        assert_close(lam[:, t], belief.lam, atol=1e-14 * lam.abs().max().item())
        assert_close(eta[:, t], belief.eta, atol=1e-14 * eta.abs().max().item())


def test_lti_convolution_takes_an_empty_sequence():
    x = random_system(T=0)
    lam, eta = lti_convolution(torch.ones(3, dtype=torch.float64), x.v, x.lam_v, x.a_bar)
    assert lam.shape == eta.shape == (2, 0, 3, 2)


def attention_case(T: int = 9) -> tuple[System, KLAState]:
    return random_system(B=2, T=T, seed=4), random_state()


def test_attention_form_gives_the_outputs_of_the_filter():
    x, state = attention_case()
    form = attention_form(x.q, x.k, x.lam_v, x.a_bar, x.p_bar, state)
    y = torch.einsum("bdts,bsd->btd", form.attn_seq, x.v) + form.y_init
    assert_close(y, kla_scan_ref(*x, state=state).y, rtol=1e-12)
    assert not form.attn_seq.triu(1).any()
    # The initial belief is all that is left when every value is 0.
    silent = x._replace(v=torch.zeros_like(x.v))
    assert_close(form.y_init, kla_scan_ref(*silent, state=state).y)


def test_attention_matrix_is_the_product_of_forget_gates():
    x, state = attention_case(T=6)
    form = attention_form(x.q, x.k, x.lam_v, x.a_bar, x.p_bar, state)
    lam, f = [], []
    belief = to_information(state)
    phi, b = token_evidence(x.k, x.v, x.lam_v)
    for t in range(6):
        f.append(information.forget_gate(belief.lam, x.a_bar, x.p_bar))
        belief = information.step(belief, x.a_bar, x.p_bar, phi[:, t], b[:, t])
        lam.append(belief.lam)
    for t in range(6):
        for s in range(t + 1):
            w = x.k[:, s, :, None] * x.lam_v[:, s, None, :]
            for j in range(s + 1, t + 1):
                w = f[j] * w
            assert_close(form.attn_info[..., t, s], w)
    by_query = x.q.mT.unsqueeze(2) / torch.stack(lam, dim=-1)
    assert_close(form.attn_seq, torch.einsum("bndt,bndts->bdts", by_query, form.attn_info))


def test_attention_form_is_right_where_the_precision_overflows():
    x = random_system(B=1, T=40, N=1, D=1, negative=False)
    x = x._replace(a_bar=torch.full_like(x.a_bar, 1e-5), p_bar=torch.zeros_like(x.p_bar))
    state = KLAState.unit_prior(1, 1, 1, dtype=torch.float64)
    form = attention_form(x.q, x.k, x.lam_v, x.a_bar, x.p_bar, state)
    assert not form.attn_info.isfinite().all()
    y = torch.einsum("bdts,bsd->btd", form.attn_seq, x.v) + form.y_init
    assert_close(y, kla_scan_ref(*x).y, atol=0)


def test_attention_form_takes_an_empty_sequence():
    x, state = attention_case(T=0)
    form = attention_form(x.q, x.k, x.lam_v, x.a_bar, x.p_bar, state)
    assert form.attn_info.shape == (2, 3, 2, 0, 0)
    assert form.attn_seq.shape == (2, 2, 0, 0)
    assert form.y_init.shape == (2, 0, 2)
