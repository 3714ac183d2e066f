"""Rotating blocks against a dense Kalman filter that carries the full covariance."""

import pytest
import torch
from torch import Tensor

from kalman_attention.filtering import moment
from kalman_attention.filtering.moment import KLAState
from kalman_attention.filtering.rotation import frames, into_frame, reflections, rotation
from tests.systems import assert_close


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unit(*shape: int, seed: int = 0) -> Tensor:
    return torch.nn.functional.normalize(normal(*shape, seed=seed), dim=-1)


def dense_filter(
    U: Tensor, q: Tensor, k: Tensor, v: Tensor, lam_v: Tensor, a: float, p: float, mean: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The textbook filter of one channel and one block: full covariance, gain, Joseph's form.

    The value is observed as one number, k v / |k|^2 along every direction of the block: precision
    |k|^2 lam_v on the identity. Returns outputs, their variances, last mean and covariance.
    """
    m = len(mean)
    one = torch.eye(m, dtype=torch.float64)
    cov, y, y_var = one.clone(), [], []
    for t in range(len(v)):
        mean, cov = a * (U[t] @ mean), a * a * (U[t] @ cov @ U[t].T) + p * one
        length = k[t] @ k[t]
        seen, noise = k[t] * v[t] / length, one / (length * lam_v[t])
        gain = cov @ torch.linalg.inv(cov + noise)
        mean = mean + gain @ (seen - mean)
        keep = one - gain
        cov = keep @ cov @ keep.T + gain @ noise @ gain.T
        y.append(q[t] @ mean)
        y_var.append(q[t] @ cov @ q[t])
    return torch.stack(y), torch.stack(y_var), mean, cov


@pytest.mark.parametrize(("m", "n_h"), [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4), (8, 3)])
def test_the_filter_with_rotation_is_the_filter_in_the_rotating_frame(m: int, n_h: int) -> None:
    T, a, p = 12, 0.9, 0.2
    U = rotation(unit(T, n_h, m, seed=1))
    q, k, v = normal(T, m, seed=2), normal(T, m, seed=3), normal(T, seed=4)
    lam_v, mean_0 = normal(T, seed=5).abs() + 0.1, normal(m, seed=6)
    y, y_var, mean, cov = dense_filter(U, q, k, v, lam_v, a, p, mean_0)

    Q = frames(U.unsqueeze(0))[0]
    turned_q, turned_k = into_frame(Q, q), into_frame(Q, k)
    one = torch.ones(1, dtype=torch.float64)
    state = KLAState(mean_0, one)  # one variance for the whole block
    for t in range(T):
        phi = lam_v[t] * turned_k[t].square().sum()
        state = moment.step(state, one * a, one * p, phi, turned_k[t] * lam_v[t] * v[t])
        assert_close(turned_q[t] @ state.mean, y[t])
        assert_close(turned_q[t].square().sum() * state.variance[0], y_var[t])
    assert_close(Q[-1] @ state.mean, mean)
    assert_close(state.variance * torch.eye(m, dtype=torch.float64), cov)


def test_a_reflection_turns_its_vector_over_and_nothing_else() -> None:
    u = unit(4)
    H = reflections(u)
    other = normal(4, seed=7)
    other = other - (other @ u) * u
    assert_close(H @ u, -u)
    assert_close(H @ other, other)
    assert_close(H @ H, torch.eye(4, dtype=torch.float64), atol=1e-15)


def test_rotations_are_orthogonal_and_do_not_commute() -> None:
    U = rotation(unit(2, 2, 3))
    assert_close(U @ U.mT, torch.eye(3, dtype=torch.float64).expand(2, 3, 3), atol=1e-14)
    assert_close(torch.linalg.det(U), torch.ones(2, dtype=torch.float64))
    assert (U[0] @ U[1] - U[1] @ U[0]).abs().max() > 0.1


def test_the_first_reflection_is_applied_first() -> None:
    u_h = unit(2, 3)
    first, second = reflections(u_h)
    assert_close(rotation(u_h), second @ first)
    assert_close(rotation(u_h[:0]), torch.eye(3, dtype=torch.float64))


def test_frames_multiply_from_the_left_and_no_token_has_none() -> None:
    U = rotation(unit(2, 5, 3, 2, 4))  # [B, T, blocks, n_h, m]
    Q = frames(U)
    assert_close(Q[:, 0], U[:, 0])
    assert_close(Q[:, 4], U[:, 4] @ Q[:, 3])
    assert frames(U[:, :0]).shape == (2, 0, 3, 4, 4)


def test_gradients() -> None:
    def turned(u: Tensor, k: Tensor) -> Tensor:
        u_h = torch.nn.functional.normalize(u, dim=-1)
        return into_frame(frames(rotation(u_h)), k)

    inputs = [normal(1, 4, 2, 3).requires_grad_(), normal(1, 4, 3, seed=1).requires_grad_()]
    assert torch.autograd.gradcheck(turned, inputs)
