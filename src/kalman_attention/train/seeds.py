"""Randomness as a pure function of (seed, step), with no generator state to store.

Every update seeds its generators first, so its random numbers depend on the seed and on the number
of the update, not on what was drawn before: an additional evaluation, a resumed run or another
order of batches changes nothing.
"""

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive_seed(seed: int, *parts: int | str) -> int:
    """A 63-bit seed for one purpose, independent of those with other parts.

    >>> derive_seed(0, "step", 1) == derive_seed(0, "step", 2)
    False
    """
    text = "/".join(map(str, (seed, *parts)))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_global(seed: int, device: torch.device) -> None:
    """Seed the global generators of torch (CPU and ``device``), Python and, if loaded, numpy."""
    # Not by torch.manual_seed, which takes a hundred times as long.
    torch.default_generator.manual_seed(seed)
    if device.type not in ("cpu", "meta"):
        torch.get_device_module(device).manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


@contextmanager
def own_randomness(device: torch.device) -> Iterator[None]:
    """Restore the caller's global generators afterwards."""
    python = random.getstate()
    numpy = sys.modules.get("numpy")
    array = numpy.random.get_state() if numpy else None
    devices = [] if device.type in ("cpu", "meta") else [device]
    with torch.random.fork_rng(devices, device_type=devices[0].type if devices else "cuda"):
        try:
            yield
        finally:
            random.setstate(python)
            if numpy:
                numpy.random.set_state(array)
