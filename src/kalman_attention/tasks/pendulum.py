"""Pendulum images under correlated noise: the benchmark of Kalman-type recurrent networks.

::

    steps     0  1  2  3  4  5  6  7 ...   100 images, 24 x 24, of a pendulum that swings freely
    kept      0     2  3        6          half of them, at random: uneven times
    images    |     /  /        #          a rod from the centre; noise comes and goes (#)
    targets   sin and cos of the angle at every kept step

Physics, images and noise follow the descriptions of the Recurrent Kalman Network (Becker et al.,
2019) and of Continuous Recurrent Units (Schirmer et al., 2022), whose settings are used. Program
and random numbers are our own, so test sets differ from theirs by chance.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Split = Literal["train", "validation", "test"]
Floats = npt.NDArray[np.float64]

SIZE = 24
"""Pixels of an image, in height and in width."""

_SEEDS = {"train": 0, "validation": 1, "test": 2}
_CANVAS, _LENGTH, _WIDTH = 128, 55.0, 8.0  # rods are drawn large, then resampled
# Images are looked up by angle: the resolution of 0.0015 rad moves the end of a rod by a tenth of a
# pixel of the canvas.
_ANGLES = 4096


class PendulumSequences(NamedTuple):
    """Sequences of one split.

    Attributes:
        images: ``[n, T, 24, 24]`` uint8.
        times: times of the images, in steps of the simulation, ``[n, T]`` float32, increasing.
        targets: sine and cosine of the angle, 0 hanging down, ``[n, T, 2]`` float32.
    """

    images: Tensor
    times: Tensor
    targets: Tensor


@dataclass(frozen=True, kw_only=True)
class Pendulum:
    """The task, with the published settings as defaults.

    Attributes:
        steps: length of a simulation.
        kept: number of observed steps, chosen at random for each sequence.
        step_seconds: time between two steps.
        substeps: semi-implicit Euler steps per step.
        gravity: in m/s^2; the rod is 1 m long, weighs 1 kg and rotates about its end.
        friction: fraction of the velocity lost per second.
        velocity_noise: standard deviation of the noise added to the velocity at every step, in
            rad/s.
        clean_steps: number of initial steps whose images have no noise.
        noise_walk: largest change of the clearness of images from one step to the next.
        low: range of the threshold at or below which an image is only noise, drawn per sequence.
        high: range of the threshold at or above which an image has no noise, drawn per sequence.
    """

    steps: int = 100
    kept: int = 50
    step_seconds: float = 0.01
    substeps: int = 100
    gravity: float = 9.81
    friction: float = 0.1
    velocity_noise: float = 0.1
    clean_steps: int = 5
    noise_walk: float = 0.2
    low: tuple[float, float] = (0.0, 0.25)
    high: tuple[float, float] = (0.75, 1.0)

    def __post_init__(self) -> None:
        if not 1 <= self.kept <= self.steps:
            raise ValueError(f"1 <= kept <= steps must hold, got {self.kept} and {self.steps}.")
        if not self.low[0] <= self.low[1] < self.high[0] <= self.high[1]:
            raise ValueError(
                f"low must be a range below high, got {self.low} and {self.high}: images are only "
                "noise below one threshold and clear above the other."
            )

    def generate(self, split: Split, count: int, seed: int = 0) -> PendulumSequences:
        """Generate sequences of a split; splits and seeds have independent random numbers.

        Args:
            split: ``"train"``, ``"validation"`` or ``"test"``.
            count: number of sequences.
            seed: random seed of the data.
        """
        rng = np.random.default_rng([_SEEDS[split], seed])
        angles = self.swing(count, rng)
        clear = self.clearness(count, rng)
        order = rng.permuted(np.tile(np.arange(self.steps), (count, 1)), axis=1)
        kept = np.sort(order[:, : self.kept], axis=1)
        angles, clear = (np.take_along_axis(x, kept, 1) for x in (angles, clear))
        targets = np.stack([np.sin(angles), np.cos(angles)], -1)
        return PendulumSequences(
            torch.from_numpy(_noisy(render(angles), clear, rng)),
            torch.from_numpy(kept.astype(np.float32)),
            torch.from_numpy(targets.astype(np.float32)),
        )

    def swing(self, count: int, rng: np.random.Generator) -> Floats:
        """Angles in rad at every step, ``[count, steps]``, from rest at a random angle."""
        angle, velocity = rng.uniform(0.0, 2.0 * np.pi, count), np.zeros(count)
        dt = self.step_seconds / self.substeps
        pull = 3.0 * self.gravity  # m g l over the moment of inertia of a rod, m l^2 / 3
        path = [angle]
        for _ in range(self.steps - 1):
            for _ in range(self.substeps):
                velocity = velocity - dt * (pull * np.sin(angle) + self.friction * velocity)
                angle = angle + dt * velocity
            velocity = velocity + rng.normal(0.0, self.velocity_noise, count)
            path.append(angle)
        return np.stack(path, 1)

    def clearness(self, count: int, rng: np.random.Generator) -> Floats:
        """Weight of the image against the noise, ``[count, steps]``.

        A random walk within [0, 1], clipped at two thresholds per sequence, so that runs of clear
        images alternate with runs of noise.
        """
        walk = [rng.uniform(0.0, 1.0, count)]
        for _ in range(self.steps - 1):
            moved = walk[-1] + rng.uniform(-self.noise_walk, self.noise_walk, count)
            walk.append(np.clip(moved, 0.0, 1.0))
        low, high = (rng.uniform(*bounds, (count, 1)) for bounds in (self.low, self.high))
        found = np.clip((np.stack(walk, 1) - low) / (high - low), 0.0, 1.0)
        found[:, : self.clean_steps] = 1.0
        return found


def render(angles: Floats) -> npt.NDArray[np.uint8]:
    """Images of a rod that hangs from the centre at given angles, ``[..., 24, 24]``."""
    index = np.round(angles * (_ANGLES / (2.0 * np.pi))).astype(np.int64) % _ANGLES
    used, place = np.unique(index, return_inverse=True)
    table = np.stack([_rod(i * (2.0 * np.pi / _ANGLES)) for i in used.tolist()])
    found: npt.NDArray[np.uint8] = table[place.reshape(angles.shape)]
    return found


def _rod(angle: float) -> npt.NDArray[np.uint8]:
    """One image: a rectangle on a large canvas, resampled by a filter that keeps it sharp."""
    centre = np.arange(_CANVAS) + 0.5 - _CANVAS / 2
    x, y = centre[None, :], centre[:, None]  # y points down, where the rod hangs at angle 0
    along, across = x * np.sin(angle) + y * np.cos(angle), x * np.cos(angle) - y * np.sin(angle)
    drawn = (along >= 0.0) & (along <= _LENGTH) & (np.abs(across) <= _WIDTH / 2)
    small: Floats = _SHRINK @ drawn.astype(np.float64) @ _SHRINK.T
    found: npt.NDArray[np.uint8] = np.round(255.0 * np.clip(small, 0.0, 1.0)).astype(np.uint8)
    return found


def _shrinking() -> Floats:
    """Lanczos resampling from the canvas to the image along one axis, ``[24, 128]``."""
    scale = _CANVAS / SIZE
    offset = (np.arange(_CANVAS) + 0.5) / scale - (np.arange(SIZE)[:, None] + 0.5)
    weights = np.where(np.abs(offset) < 3.0, np.sinc(offset) * np.sinc(offset / 3.0), 0.0)
    normed: Floats = weights / weights.sum(1, keepdims=True)
    return normed


_SHRINK = _shrinking()


def _noisy(
    images: npt.NDArray[np.uint8], clear: Floats, rng: np.random.Generator
) -> npt.NDArray[np.uint8]:
    """Images mixed with uniform noise, sequence by sequence to save memory."""
    found = np.empty_like(images)
    for i, (image, share) in enumerate(zip(images, clear[..., None, None], strict=True)):
        noise = rng.uniform(0.0, 255.0, image.shape)
        found[i] = share * image + (1.0 - share) * noise
    return found
