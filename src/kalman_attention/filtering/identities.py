r"""Equivalent forms of the same filter.

Nothing here is used to compute outputs. Each function states a result of the paper, which a test
compares with the filter; the attention matrix is also plotted.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kalman_attention._typing import Belief, Dynamics, Keys, Precisions, Values
from kalman_attention.filtering import moment
from kalman_attention.filtering.evidence import token_evidence
from kalman_attention.filtering.moment import KLAState


def gated_recurrence(
    mu_prev: Belief, lam: Belief, a_bar: Dynamics, phi: Belief, b: Belief
) -> Belief:
    r"""The mean as a gated RNN update (``cor:moment-form``, ``eq:mu-delta``).

    .. math:: \mu_t = \bar a\,(1 - \phi_t/\lambda_t)\,\mu_{t-1} + b_t/\lambda_t
    """
    return a_bar * (1.0 - phi / lam) * mu_prev + b / lam


def ridge_objective(
    mu: Belief,
    mu_prev: Belief,
    lam_prior: Belief,
    a_bar: Dynamics,
    k: Keys,
    v: Values,
    lam_v: Precisions,
) -> Belief:
    r"""Precision-weighted least squares, minimal at the posterior mean (``eq:kla-ridge``).

    .. math:: L(\mu) = \Lambda^v (v - k\mu)^2 + \lambda^{prior} (\mu - \bar a\mu_{t-1})^2

    Args:
        mu: candidate means, ``[..., N, D]``.
        mu_prev: posterior mean of the previous step, ``[..., N, D]``.
        lam_prior: predicted precision rho lam_prev, ``[..., N, D]``.
        a_bar: decay, ``[N, D]``.
        k: key, ``[..., N]``.
        v: value, ``[..., D]``.
        lam_v: precision of the value, ``[..., D]``.

    Returns:
        The objective of every slot and channel, ``[..., N, D]``.
    """
    fit = v.unsqueeze(-2) - k.unsqueeze(-1) * mu  # residual of the observation
    drift = mu - a_bar * mu_prev  # distance from the prediction
    return lam_v.unsqueeze(-2) * fit * fit + lam_prior * drift * drift


def lti_convolution(
    k: Tensor, v: Values, lam_v: Precisions, a_bar: Dynamics
) -> tuple[Belief, Belief]:
    r"""Theorem 3 (``thm:conv-form``): without process noise, a constant key gives two convolutions.

    .. math:: \lambda_t = \sum_{s \le t} \bar a^{-2(t-s)} k^2 \Lambda^v_s, \qquad
              \eta_t = \sum_{s \le t} \bar a^{-(t-s)} k \Lambda^v_s v_s

    Starts from lam = eta = 0, with p_bar = 0; computed by FFT in O(T log T). The kernels grow with
    T: use float64 and keep a_bar^(-2T) well below 1e12.

    Args:
        k: the constant key, ``[N]``.
        v: values, ``[B, T, D]``.
        lam_v: value precisions, ``[B, T, D]``.
        a_bar: decay, ``[N, D]``.

    Returns:
        ``lam`` and ``eta`` at every step, ``[B, T, N, D]``.
    """
    # The FFT has an absolute error of about 1e-16 times the largest entry, hence the bound above:
    # it leaves at least four digits for the smallest.
    T = v.shape[1]
    age = torch.arange(T, dtype=v.dtype, device=v.device).view(T, 1, 1)
    k_column = k.unsqueeze(-1)
    lam = _causal_convolution(a_bar ** (-2.0 * age) * k_column**2, lam_v.unsqueeze(2))
    eta = _causal_convolution(a_bar ** (-age) * k_column, (lam_v * v).unsqueeze(2))
    return lam, eta


def _causal_convolution(kernel: Tensor, signal: Tensor) -> Tensor:
    """Convolve ``[T, N, D]`` with ``[B, T, 1, D]`` along time, by FFT, keeping the first T."""
    T = kernel.shape[0]
    # Padding to 2 T keeps the circular convolution from wrapping around.
    n = max(2 * T, 1)  # the FFT rejects length 0
    kernel_f = torch.fft.rfft(kernel, n=n, dim=0)
    signal_f = torch.fft.rfft(signal, n=n, dim=1)
    out: Tensor = torch.fft.irfft(kernel_f * signal_f, n=n, dim=1)
    return out[:, :T]


class AttentionForm(NamedTuple):
    """The filter written out as causal attention (App. ``sec:attn-matrix``).

    Attributes:
        attn_info: the paper's W, from values to information means, ``[B, N, D, T, T]``.
        attn_seq: the Kalman attention matrix M_seq, from values to outputs, ``[B, D, T, T]``.
        y_init: what the initial belief adds to the outputs, ``[B, T, D]``.
    """

    attn_info: Tensor
    attn_seq: Tensor
    y_init: Values


def attention_form(
    q: Keys,
    k: Keys,
    lam_v: Precisions,
    a_bar: Dynamics,
    p_bar: Dynamics,
    state: KLAState,
) -> AttentionForm:
    r"""Unroll the filter into lower-triangular matrices, so that y = M_seq v + y_init.

    .. math:: W_{ts} = \Bigl(\prod_{j=s+1}^{t} f_j\Bigr) k_s \Lambda^v_s, \qquad
              M_{seq} = \sum_n \mathrm{diag}(q / \lambda)\, W

    Computed from products of r a_bar = f lam_prev / lam, which are bounded, so that M_seq is
    accurate even where entries of W overflow.

    Args:
        q: queries, ``[B, T, N]``.
        k: keys, ``[B, T, N]``.
        lam_v: value precisions, ``[B, T, D]``.
        a_bar: decay, ``[N, D]``.
        p_bar: process-noise variance, ``[N, D]``.
        state: the initial belief, ``[B, N, D]``.

    Returns:
        The two matrices and the contribution of the initial belief.
    """
    (B, T, N), D = k.shape, lam_v.shape[-1]
    gain = lam_v.new_zeros(B, N, D, T)  # d mu_t / d v_s of the current row t
    mean, s = state.mean, state.variance
    gains, means, variances = [], [], []
    for t in range(T):
        phi, b_per_value = token_evidence(k[:, t], torch.ones_like(lam_v[:, t]), lam_v[:, t])
        prior = moment.predict(KLAState(mean, s), a_bar, p_bar)
        r = moment.retention(prior.variance, phi)
        mean, s = r * prior.mean, r * prior.variance
        written = (s * b_per_value).unsqueeze(-1)  # [B, N, D, 1]
        # Older values fade by r a_bar, the new one is written; concatenated, not assigned in place,
        # so that autograd can differentiate the matrix.
        gain = torch.cat(
            [(r * a_bar).unsqueeze(-1) * gain[..., :t], written, gain[..., t + 1 :]], -1
        )
        gains.append(gain)
        means.append(mean)
        variances.append(s)
    if T == 0:
        return AttentionForm(gain.unsqueeze(-2)[..., :0, :], lam_v.new_zeros(B, D, 0, 0), lam_v)
    gain_all = torch.stack(gains, dim=-2)  # [B, N, D, T, T]
    return AttentionForm(
        attn_info=gain_all / torch.stack(variances, dim=-1).unsqueeze(-1),
        attn_seq=torch.einsum("btn,bndts->bdts", q, gain_all),
        y_init=torch.einsum("btn,btnd->btd", q, torch.stack(means, dim=1)),
    )
