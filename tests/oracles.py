"""What is true, by definition of the model: dense conditioning of one joint Gaussian.

Nothing in this file knows about filtering. The generative model of one slot n and one channel d
(``eq:gen_dyn_qkv``, ``eq:gen_obs_qkv``) is a system of linear equations in Gaussian noise,

    z_0 = mean_0 + e_0,           e_0 ~ N(0, variance_0)
    z_t - a_t z_{t-1} = e_t,      e_t ~ N(0, p_t)
    v_t = k_t z_t + n_t,          n_t ~ N(0, 1 / lam_v_t)

so (z_0 .. z_T, v_1 .. v_T) is jointly Gaussian, with a mean and a covariance that follow from
solving those equations for z. The belief after token t is the conditional of z_t given v_1 .. v_t,
by the textbook formula and a dense solve, anew for each t.

The N slots of one channel are N independent models of the SAME value v (the paper's diagonal
state expansion): each is conditioned by itself, as if the other slots did not exist, and the
read-out y = sum_n q_n z_n adds up their means and, with weights q_n^2, their variances.
"""

import itertools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kalman_attention import KLAState

Array = NDArray[np.float64]


def joint_prior(a: Array, p: Array, mean_0: float, variance_0: float) -> tuple[Array, Array]:
    """Mean and covariance of (z_0 .. z_T), from steps ``a``, ``p`` of shape ``[T]``."""
    T = len(a)
    equations = np.eye(T + 1)
    equations[np.arange(1, T + 1), np.arange(T)] = -a
    solution = np.linalg.inv(equations)  # z = solution @ (z_0, e_1 .. e_T)
    mean = solution[:, 0] * mean_0
    cov = solution @ np.diag([variance_0, *p]) @ solution.T
    return mean, cov


def condition(
    k: Array,
    v: Array,
    lam_v: Array,
    a_bar: float,
    p_bar: float,
    mean_0: float = 0.0,
    variance_0: float = 1.0,
    mask: NDArray[np.bool_] | None = None,
    dt: Array | None = None,
) -> tuple[Array, Array]:
    """Mean and variance of z_t given v_1 .. v_t, for t = 1 .. T, of one scalar chain.

    Where ``lam_v`` is 0 the noise has no bounds: nothing is observed. Where ``mask`` is False
    time does not pass: z_t is z_{t-1}, and nothing is observed either. Over a gap ``dt`` the
    process decays like a_bar^dt towards its stationary variance.
    """
    T = len(v)
    real = np.ones(T, dtype=bool) if mask is None else mask
    a, p = np.full(T, a_bar), np.full(T, p_bar)
    if dt is not None:
        a = a_bar**dt
        p = p_bar * dt if a_bar == 1.0 else p_bar / (1.0 - a_bar**2) * (1.0 - a**2)
    z_mean, z_cov = joint_prior(np.where(real, a, 1.0), np.where(real, p, 0.0), mean_0, variance_0)
    observed = real & (lam_v > 0)
    means, variances = np.empty(T), np.empty(T)
    for t in range(1, T + 1):
        seen = np.flatnonzero(observed[:t])
        k_seen = k[seen]
        v_mean = k_seen * z_mean[seen + 1]
        v_cov = np.outer(k_seen, k_seen) * z_cov[np.ix_(seen + 1, seen + 1)]
        v_cov += np.diag(1.0 / lam_v[seen])
        zv_cov = k_seen * z_cov[t, seen + 1]
        weights = np.linalg.solve(v_cov, zv_cov)
        means[t - 1] = z_mean[t] + weights @ (v[seen] - v_mean)
        variances[t - 1] = z_cov[t, t] - weights @ zv_cov
    return means, variances


def oracle_beliefs(
    k: Tensor,
    v: Tensor,
    lam_v: Tensor,
    a_bar: Tensor,
    p_bar: Tensor,
    state: KLAState,
    mask: Tensor | None = None,
    dt: Tensor | None = None,
) -> KLAState:
    """The belief after every token, ``[B, T, N, D]`` twice; arguments as for ``kla_scan``."""
    (B, T, D), N = v.shape, k.shape[-1]
    mean, variance = np.empty((2, B, T, N, D))
    for i, n, d in itertools.product(range(B), range(N), range(D)):
        mean[i, :, n, d], variance[i, :, n, d] = condition(
            k[i, :, n].numpy(),
            v[i, :, d].numpy(),
            lam_v[i, :, d].numpy(),
            a_bar[n, d].item(),
            p_bar[n, d].item(),
            state.mean[i, n, d].item(),
            state.variance[i, n, d].item(),
            None if mask is None else mask[i].numpy(),
            None if dt is None else dt[i, :, d].numpy(),
        )
    return KLAState(torch.from_numpy(mean), torch.from_numpy(variance))


def oracle_readout(q: Tensor, beliefs: KLAState) -> tuple[Tensor, Tensor]:
    """Mean and variance of y_t = sum_n q_n z_n with independent z_n, ``[B, T, D]`` each."""
    weights = q.unsqueeze(-1)
    return (weights * beliefs.mean).sum(-2), (weights**2 * beliefs.variance).sum(-2)
