"""The pendulum: motion against physics, images against angles, noise against its description."""

import numpy as np
import pytest
import torch

from kalman_attention.tasks.pendulum import SIZE, Pendulum, render


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_small_swings_have_the_period_of_a_rod():
    # The moment of inertia of the benchmark is m l^2 / 3 and its weight pulls at the tip, so small
    # swings are those of theta'' = -(3 g / l) theta.
    task = Pendulum(steps=400, kept=1, friction=0.0, velocity_noise=0.0)

    class Small(np.random.Generator):
        def uniform(self, low, high, size=None):
            return np.full(size, 0.05)

    path = task.swing(1, Small(np.random.PCG64(0)))[0]
    crossings = np.nonzero(np.diff(np.sign(path)))[0]
    period = 2.0 * np.diff(crossings).mean() * task.step_seconds
    assert period == pytest.approx(2.0 * np.pi / np.sqrt(3.0 * 9.81), rel=0.02)


def test_energy_is_kept_without_friction_and_lost_with_it():
    def energy(task: Pendulum) -> np.ndarray:
        path = task.swing(20, rng())
        velocity = np.gradient(path, task.step_seconds, axis=1)[:, 1:-1]
        return 0.5 * velocity**2 - 3.0 * 9.81 * np.cos(path[:, 1:-1])

    still = Pendulum(friction=0.0, velocity_noise=0.0)
    kept = energy(still)
    assert np.abs(kept - kept[:, :1]).max() < 0.02 * np.ptp(kept[:, 0])
    lost = energy(Pendulum(friction=1.0, velocity_noise=0.0))
    assert (lost[:, -1] < lost[:, 0]).mean() > 0.9


def test_pushes_spread_the_velocity():
    """Without gravity and friction the angle is the sum of pushes: a random walk's integral."""
    task = Pendulum(gravity=0.0, friction=0.0, steps=50, kept=1, substeps=2)
    path = task.swing(4000, rng())
    velocity = (path[:, -1] - path[:, -2]) / task.step_seconds
    assert velocity.std() == pytest.approx(0.1 * np.sqrt(48), rel=0.05)


def test_images_show_the_angle():
    angles = np.array([0.0, np.pi / 2, np.pi, -np.pi / 2, 0.3])
    images = render(angles).astype(np.float64)
    grid = np.arange(SIZE) + 0.5 - SIZE / 2
    x = (images.sum(1) * grid).sum(1) / images.sum((1, 2))
    y = (images.sum(2) * grid).sum(1) / images.sum((1, 2))
    np.testing.assert_allclose(np.arctan2(x, y), np.angle(np.exp(1j * angles)), atol=0.02)
    # Half the length of the rod, in pixels of the small image.
    np.testing.assert_allclose(np.hypot(x, y), 55 / 2 * SIZE / 128, rtol=0.05)
    assert images.max() > 200


def test_noise_comes_and_goes():
    task = Pendulum()
    clear = task.clearness(2000, rng())
    assert clear.min() == 0.0
    assert clear.max() == 1.0
    assert (clear[:, : task.clean_steps] == 1.0).all()
    later = clear[:, 20:]
    # A walk between mirrors is uniform in the long run; thresholds near 1/8 and 7/8 cut its ends.
    assert (later == 0.0).mean() == pytest.approx((later == 1.0).mean(), abs=0.05)
    assert 0.1 < (later == 0.0).mean() < 0.4
    steps = np.diff(later, axis=1)
    assert np.abs(steps).max() <= task.noise_walk / (0.75 - 0.25) + 1e-9
    near = np.corrcoef(later[:, :-1].ravel(), later[:, 1:].ravel())[0, 1]
    far = np.corrcoef(later[:, :-40].ravel(), later[:, 40:].ravel())[0, 1]
    assert near > 0.9
    assert far < 0.4


def test_sequences_are_what_they_say():
    task = Pendulum(steps=20, kept=8, substeps=5)
    found = task.generate("train", 6)
    assert found.images.shape == (6, 8, SIZE, SIZE)
    assert found.images.dtype == torch.uint8
    assert (found.times.diff(dim=1) >= 1).all()
    assert found.times.min() >= 0
    assert found.times.max() <= 19
    torch.testing.assert_close(found.targets.square().sum(-1), torch.ones(6, 8))
    assert len(set(map(tuple, found.times.tolist()))) > 1
    clean = found.times < task.clean_steps
    angle = torch.atan2(*found.targets.double().unbind(-1)).numpy()
    shown = torch.from_numpy(render(angle).astype(np.int64))
    error = (found.images.long() - shown).abs().amax((2, 3))
    assert error[clean].max() <= 1
    assert error[~clean].float().mean() > 20


def test_splits_and_seeds_differ_and_repeat():
    task = Pendulum(steps=6, kept=3, substeps=2)
    same = [task.generate("test", 2, seed=1) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*same, strict=True))
    others = [task.generate("train", 2, seed=1), task.generate("test", 2, seed=2)]
    assert all(not torch.equal(x.images, same[0].images) for x in others)


@pytest.mark.parametrize("options", [{"kept": 101}, {"kept": 0}, {"low": (0.5, 0.8)}])
def test_bad_options(options):
    with pytest.raises(ValueError, match="must"):
        Pendulum(**options)
