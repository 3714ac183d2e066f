"""The oracle itself, on cases that can be done by hand or by simulation."""

import numpy as np

from tests.oracles import condition, joint_prior


def test_one_token_by_hand():
    # prior N(0.5 * 2, 0.25 * 3 + 1) = N(1, 1.75); v = 2 z + noise of variance 1/4.
    mean, variance = condition(
        np.array([2.0]), np.array([5.0]), np.array([4.0]), 0.5, 1.0, mean_0=2.0, variance_0=3.0
    )
    precision = 1 / 1.75 + 4 * 4
    np.testing.assert_allclose(variance, 1 / precision, rtol=1e-14)
    np.testing.assert_allclose(mean, (1 / 1.75 + 2 * 4 * 5) / precision, rtol=1e-14)


def test_joint_prior_is_what_simulation_gives():
    a, p = np.array([0.9, 1.0, -0.5]), np.array([0.2, 0.0, 0.7])
    rng = np.random.default_rng(0)
    z = [1.5 + np.sqrt(2.0) * rng.standard_normal(200_000)]
    for a_t, p_t in zip(a, p, strict=True):
        z.append(a_t * z[-1] + np.sqrt(p_t) * rng.standard_normal(200_000))
    mean, cov = joint_prior(a, p, 1.5, 2.0)
    np.testing.assert_allclose(np.mean(z, axis=1), mean, atol=0.02)
    np.testing.assert_allclose(np.cov(z), cov, atol=0.03)


def test_no_evidence_leaves_the_prior():
    v, k = np.array([3.0, -1.0, 2.0]), np.ones(3)
    mean, variance = condition(k, v, np.zeros(3), 0.8, 0.1, mean_0=1.0, variance_0=0.5)
    np.testing.assert_allclose(mean, 0.8 ** np.arange(1, 4), rtol=1e-14)
    np.testing.assert_allclose(variance[0], 0.64 * 0.5 + 0.1, rtol=1e-14)


def test_time_does_not_pass_where_masked():
    k, v, lam_v = np.array([1.0, 4.0, -1.0]), np.array([3.0, 9.0, 2.0]), np.array([1.0, 5.0, 2.0])
    mask = np.array([True, False, True])
    mean, variance = condition(k, v, lam_v, 0.8, 0.1, mask=mask)
    short_mean, short_variance = condition(k[mask], v[mask], lam_v[mask], 0.8, 0.1)
    np.testing.assert_allclose(mean, short_mean[[0, 0, 1]], rtol=1e-13)
    np.testing.assert_allclose(variance, short_variance[[0, 0, 1]], rtol=1e-13)
