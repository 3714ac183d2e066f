"""``filtering/ou.py``: against moments of the SDE by quadrature, and exact limits."""

import math

import mpmath
import pytest
import torch
from scipy import integrate
from torch import Tensor

from kalman_attention.filtering import moment
from kalman_attention.filtering.moment import KLAState
from kalman_attention.filtering.ou import _SERIES_RADIUS, discretise, stationary_variance
from tests.systems import assert_close


def scalar(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


@pytest.mark.parametrize("a", [1e-6, 0.3, 0.9999, 5.0])
@pytest.mark.parametrize("dt", [1e-3, 0.1, 2.0])
def test_discretise_against_quadrature_of_the_noise(a, dt):
    # z(dt) = exp(-a dt) z(0) + p int_0^dt exp(-a (dt - u)) dW(u): by the isometry of Ito the
    # variance of the noise is p^2 int exp(-2 a (dt - u)) du.
    p = 0.7
    noise, _ = integrate.quad(lambda u: p**2 * math.exp(-2 * a * (dt - u)), 0, dt, epsabs=0)
    a_bar, p_bar = discretise(scalar(a), scalar(p), scalar(dt))
    assert_close(a_bar, scalar(math.exp(-a * dt)), rtol=1e-14)
    assert_close(p_bar, scalar(noise), rtol=1e-13, atol=0)


def test_discretise_against_the_moment_equations():
    # dm/dt = -a m and dV/dt = -2 a V + p^2, from a start with mean 2 and variance 0.4.
    a, p, dt = 0.8, 1.3, 1.7
    solution = integrate.solve_ivp(
        lambda _, y: [-a * y[0], -2 * a * y[1] + p * p], (0, dt), [2.0, 0.4], rtol=1e-11, atol=1e-13
    )
    start = KLAState(scalar(2.0), scalar(0.4))
    end = moment.predict(start, *discretise(scalar(a), scalar(p), scalar(dt)))
    assert_close(torch.stack(end), torch.tensor(solution.y[:, -1]), rtol=1e-9)


def test_no_decay_is_brownian_motion():
    a_bar, p_bar = discretise(scalar(0.0), scalar(0.3), scalar(0.7))
    assert a_bar == 1.0
    assert p_bar == 0.3 * 0.3 * 0.7


def test_no_time_changes_nothing():
    a_bar, p_bar = discretise(scalar(2.0), scalar(0.3), scalar(0.0))
    assert a_bar == 1.0
    assert p_bar == 0.0


def test_two_half_steps_are_one_step():
    a, p, dt = scalar(0.6), scalar(1.1), scalar(0.9)
    whole = discretise(a, p, dt)
    half_a, half_p = discretise(a, p, dt / 2)
    assert_close(whole, (half_a**2, half_a**2 * half_p + half_p), rtol=1e-14)


def test_predict_leaves_the_stationary_variance():
    a, p, dt = scalar(0.6), scalar(1.1), scalar(0.9)
    s = stationary_variance(a, p)
    after = moment.predict(KLAState(scalar(0.0), s), *discretise(a, p, dt))
    assert_close(after.variance, s, rtol=1e-14)


def test_gradients_across_the_border_of_the_series():
    # 2 a dt runs from 0 over the border between series and closed form to 100 times the radius.
    x = _SERIES_RADIUS * torch.tensor([0.0, 0.5, 0.999, 1.001, 2.0, 100.0], dtype=torch.float64)
    a = (x / 2).requires_grad_()
    p = torch.full_like(x, 0.4).requires_grad_()
    dt = torch.ones_like(x).requires_grad_()
    assert torch.autograd.gradcheck(discretise, (a, p, dt), eps=1e-6, atol=1e-8, rtol=1e-7)
    assert torch.autograd.gradgradcheck(discretise, (a, p, dt), eps=1e-6, atol=1e-7, rtol=1e-6)


def exact(a: float, p: float, dt: float) -> tuple[float, float]:
    with mpmath.workdps(50):
        x = 2 * mpmath.mpf(a) * mpmath.mpf(dt)
        return mpmath.exp(-x / 2), mpmath.mpf(p) ** 2 * mpmath.mpf(dt) * -mpmath.expm1(-x) / x


@pytest.mark.parametrize(("dtype", "digits"), [(torch.float32, 5e-7), (torch.float64, 1e-15)])
def test_relative_accuracy_over_many_magnitudes(dtype, digits):
    for exponent_a in range(-12, 2):
        for exponent_dt in range(-6, 1):
            # Take the value that the dtype holds, so that only the arithmetic is measured.
            a, p, dt = (
                torch.tensor(x, dtype=dtype)
                for x in (1.7 * 10.0**exponent_a, 0.013, 3.1 * 10.0**exponent_dt)
            )
            expected = exact(a.item(), p.item(), dt.item())
            for actual, true in zip(discretise(a, p, dt), expected, strict=True):
                error = abs(mpmath.mpf(actual.item()) - true) / true
                # The exponential turns the rounding of a dt into a relative error a dt eps.
                assert error <= digits * max(1.0, a.item() * dt.item()), (a, dt)


@pytest.mark.parametrize(("dtype", "digits"), [(torch.float32, 1e-5), (torch.float64, 1e-13)])
@pytest.mark.parametrize("x", [0.5, 0.99, 1.01, 2.0])
def test_noise_and_its_gradient_around_the_border_of_the_series(x, dtype, digits):
    a = torch.tensor(x * _SERIES_RADIUS / 2, dtype=dtype, requires_grad=True)
    one = torch.ones((), dtype=dtype)
    p_bar = discretise(a, one, one)[1]
    (grad,) = torch.autograd.grad(p_bar, a)
    with mpmath.workdps(50):
        slope = mpmath.diff(lambda y: -mpmath.expm1(-2 * y) / (2 * y), a.item())
    assert abs(p_bar.item() - exact(a.item(), 1.0, 1.0)[1]) <= 0.1 * digits
    assert abs(grad.item() - slope) <= digits * abs(slope)
