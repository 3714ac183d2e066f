"""Compare the native library in another process with the float64 reference.

``python -m tests.native.selfcheck [emulator] calls LIBRARY`` prints the largest error of every
result over a dozen calls, and ends with 1 if one breaks the contract. It takes seconds, also in an
emulator; the tests that `make emulate` runs after it take minutes.
"""

import sys

import torch

from kalman_attention.ops.cpu import library
from kalman_attention.tools.selfcheck import Case, errors, make_call, misses, run_call
from tests.native.remote import install

# Vectors of 16 bytes hold four floats: whole tiles, incomplete ones, and less than a vector.
CASES = (
    Case(B=2, T=100, N=4, D=32),
    Case(B=1, T=65, N=1, D=16),
    Case(B=1, T=130, N=3, D=7),
    Case(B=1, T=70, N=8, D=19, padding="random"),
    Case(B=1, T=90, N=2, D=5, documents=4),
    Case(B=2, T=64, N=16, D=8, share=16),
    Case(B=1, T=80, N=6, D=9, share=3, padding="left"),
    Case(B=1, T=80, N=4, D=12, gaps="token"),
    Case(B=2, T=50, N=5, D=6, gaps="channel"),
    Case(B=1, T=60, N=8, D=10, share=4, gaps="channel"),
    Case(B=1, T=4200, N=1, D=2),  # long enough to be cut in time
    Case(B=1, T=1, N=4, D=8),
)


def main(command: list[str]) -> int:
    """Run all calls there; the exit status."""
    remote = install(command)
    largest: dict[str, float] = {}
    broken = 0
    for case in CASES:
        call = make_call(case)
        wanted = run_call(call, "reference", torch.float64)
        for dtype in (torch.float32, torch.float64):
            found = errors(run_call(call, "cpu", dtype), wanted)
            broken += len(misses(found))
            for name, error in found.items():
                key = f"{name} in {str(dtype).removeprefix('torch.')}"
                largest[key] = max(error, largest.get(key, 0.0))
    for name, error in largest.items():
        print(f"{name:28} {error:.1e}")
    info = library.info()
    print(f"{len(CASES)} calls in two dtypes, {remote.calls} native calls, {', '.join(info.isas)}")
    print(
        "every result keeps the contract" if not broken else f"{broken} results MISS the contract"
    )
    remote.close()
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
