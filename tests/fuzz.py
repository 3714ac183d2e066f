"""Random calls at the edges of the contract, held against the float64 reference: ``make fuzz``.

A case is drawn from its seed alone, so that ``--seed S --cases 1`` repeats it: sizes from nothing
to a few chunks, mixed dtypes, padding, packing, incoming means up to 30,000, decays of both signs
with exact 0 and 1, no process noise, precisions from 0 to 1e6, slots that share a precision, time
between tokens from 0 to 100 units, and what is not a number where there is no evidence. Now and
then a larger call is run with 1 to 4 threads, which must not change a bit.

A result that moves as far when every input, and the belief after every token, is rounded once is
not held against the engine: float32 cannot tell it. Such results are counted.
"""

import argparse
import itertools
import sys
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kalman_attention import KLAState, kla_scan, kla_scan_ref, kla_step
from kalman_attention.ops.checks import check_scan
from kalman_attention.ops.contract import ScanOutput
from kalman_attention.ops.engines import ENGINES
from kalman_attention.ops.reference import join
from kalman_attention.tools.selfcheck import VANISHING, tolerance

ROUNDINGS = 6
"""How often a doubtful case is rounded anew."""

MARGIN = 8.0
"""By how much its error may exceed what one of these roundings does: a step makes several."""

FLOAT64_TOLERANCE = 1e-9
THREADS_EVERY = 100

Results = dict[str, Tensor]


class Case(NamedTuple):
    """One call.

    Attributes:
        inputs: floating arguments by name, in the dtypes of the call.
        state: mean and variance, in float32 (float64).
        options: mask or cu_seqlens.
        cotangents: gradients by y, y_var, mean and variance; None for what is not in the loss.
        clean: v as the reference gets it, where that of the call has holes.
    """

    inputs: dict[str, Tensor]
    state: KLAState
    options: dict[str, Tensor]
    cotangents: list[Tensor | None]
    clean: Tensor


class Draw:
    """Random numbers of one seed, in float64."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, dtype=torch.float64)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def log_uniform(self, low: float, high: float, *shape: int) -> Tensor:
        """Between 10^low and 10^high."""
        return 10.0 ** (low + (high - low) * self.uniform(*shape))

    def number(self, low: float, high: float) -> float:
        """Log-uniform between 10^low and 10^high."""
        return float(self.log_uniform(low, high, 1))

    def pick(self, *choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (1,), generator=self.generator))]

    def chance(self, probability: float) -> bool:
        return float(self.uniform(1)) < probability

    def sometimes(self, probability: float, value: float, otherwise: Tensor) -> Tensor:
        """``otherwise``, with ``value`` in a share of its entries."""
        return torch.where(self.uniform(*otherwise.shape) < probability, value, otherwise)


def draw_case(seed: int, *, large: bool = False, engine: str = "cpu") -> Case:
    """The case of a seed, of what an engine can do."""
    able = ENGINES[engine]
    x = Draw(seed)
    B, T, N, D = _large_sizes(x) if large else _sizes(x)
    G = N // x.pick(*(m for m in (1, 1, 1, 2, 3, 4, 8, N) if N % m == 0)) if able.shared else N
    documents = x.pick(0, 0, 0, 1, 3, 7)
    B, R = (1, documents) if documents else (B, B)
    dtypes = _dtypes(x)
    inputs = {
        "v": x.number(-2, 2) * x.normal(B, T, D),
        "lam_v": _precisions(x, B, T, D),
        "k": x.sometimes(x.pick(0.0, 0.1), 0.0, x.number(-1.5, 0.5) * x.normal(B, T, N)),
        "q": x.number(-1.5, 0.5) * x.normal(B, T, N),
        "a_bar": _decays(x, G, D),
        "p_bar": x.sometimes(x.pick(0.0, 0.5, 1.0), 0.0, x.log_uniform(-6, 0, G, D)),
    }
    state = KLAState(
        x.number(-2, 4.5) * x.normal(R, N, D),
        x.sometimes(x.pick(0.0, 0.0, 0.2), 0.0, x.log_uniform(-4, 1, R, G, D)),
    )
    gaps = x.pick(None, None, (B, T), (B, T, D))
    if gaps is not None and able.gaps:
        # Half a step of a negative decay does not exist, nor one of none at all.
        inputs["a_bar"] = inputs["a_bar"].abs().clamp(min=1e-3)
        inputs["dt"] = _gaps(x, *gaps)
    wide = torch.float64 if dtypes["v"] == torch.float64 else torch.float32
    if dtypes["lam_v"] == torch.float16:
        inputs["lam_v"] = inputs["lam_v"].clamp(max=6e4)
    inputs = {name: value.to(dtypes.get(name, wide)) for name, value in inputs.items()}
    used = x.pick((0,), (0,), (1,), (2,), (3,), (0, 1), (0, 1, 2, 3))
    shapes = [(B, T, D), (B, T, D), (R, N, D), (R, G, D)]
    kinds = [dtypes["v"], dtypes["v"], wide, wide]
    cotangents = [
        x.normal(*shape).to(kind) if i in used else None
        for i, (shape, kind) in enumerate(zip(shapes, kinds, strict=True))
    ]
    clean = inputs["v"]
    if x.chance(0.2):
        hole = (inputs["lam_v"] == 0) & (x.uniform(B, T, D) < 0.5)
        clean = clean.masked_fill(hole, 0.0)
        inputs["v"] = clean.masked_fill(hole, x.pick(float("nan"), float("inf"), float("-inf")))
    options = _options(x, B, T, documents)
    return Case(inputs, KLAState(*(s.to(wide) for s in state)), options, cotangents, clean)


def _sizes(x: Draw) -> tuple[int, int, int, int]:
    T = x.pick(0, 1, 1, 1, 2, 2, 3, 3, 5, 8, 13, x.pick(30, 63, 64, 65, 70, 100, 130))
    N, D = x.pick(1, 1, 2, 3, 4, 5, 8, 16, 17, 33), x.pick(1, 1, 2, 3, 7, 8, 16, 17, 32, 33, 65)
    return x.pick(1, 1, 2, 3), T, N, D


def _large_sizes(x: Draw) -> tuple[int, int, int, int]:
    return x.pick(1, 2, 5), x.pick(300, 700), x.pick(1, 4, 16), x.pick(40, 64, 200)


def _dtypes(x: Draw) -> dict[str, torch.dtype]:
    names = ("v", "lam_v", "k", "q", "dt")
    if x.chance(0.1):
        return dict.fromkeys(names, torch.float64)
    if x.chance(0.7):
        return dict.fromkeys(names, torch.float32)
    return {name: x.pick(torch.float16, torch.bfloat16, torch.float32) for name in names}


def _precisions(x: Draw, B: int, T: int, D: int) -> Tensor:
    highest = x.pick(0, 1, 3, 4.7)
    drawn = x.pick(
        x.log_uniform(-3, highest, B, T, D),
        x.log_uniform(highest - 0.1, highest, B, T, D),
        torch.full((B, T, D), x.pick(1.0, 1e4, 1e6), dtype=torch.float64),
        x.log_uniform(-6, 6, B, T, D),
        x.log_uniform(5, 6, B, T, D),
    )
    return x.sometimes(x.pick(0.0, 0.1, 0.7, 1.0), 0.0, drawn)


def _decays(x: Draw, N: int, D: int) -> Tensor:
    near_one = 1.0 - x.log_uniform(-5, 0, N, D).clamp(max=0.999)
    spread = torch.where(x.uniform(N, D) < 0.5, near_one, x.log_uniform(-3, 0, N, D))
    decays = x.sometimes(x.pick(0.0, 0.2, 1.0), x.pick(0.0, 1.0), spread)
    return torch.where(x.uniform(N, D) < x.pick(0.0, 0.3), -decays, decays)


def _gaps(x: Draw, *shape: int) -> Tensor:
    drawn = x.pick(
        torch.ones(*shape, dtype=torch.float64),
        x.log_uniform(-3, 2, *shape),
        torch.full(shape, x.number(-4, 1), dtype=torch.float64),
        2.0 * x.uniform(*shape),
    )
    return x.sometimes(x.pick(0.0, 0.1, 1.0), 0.0, drawn)


def _options(x: Draw, B: int, T: int, documents: int) -> dict[str, Tensor]:
    if documents:
        inner = torch.randint(0, T + 1, (documents - 1,), generator=x.generator).sort().values
        return {"cu_seqlens": torch.cat([torch.tensor([0]), inner, torch.tensor([T])])}
    place, length = torch.arange(T), torch.randint(0, T + 1, (B, 1), generator=x.generator)
    mask = x.pick(None, None, place >= T - length, place < length, x.uniform(B, T) < 0.7)
    return {} if mask is None else {"mask": mask}


def run(
    case: Case,
    engine: str,
    *,
    rounded: "Rounding | None" = None,
    acc_dtype: torch.dtype | None = None,
) -> Results:
    """Values and gradients of the call by name, or of the reference in float64."""
    exact = engine == "reference"
    values = {**case.inputs, "v": case.clean} if exact else case.inputs
    leaves = {**values, "mean": case.state.mean, "variance": case.state.variance}
    leaves = {n: (x.double() if exact else x.clone()).requires_grad_() for n, x in leaves.items()}
    arguments: dict[str, Any] = {name: leaves[name] for name in case.inputs}
    arguments |= {"state": KLAState(leaves["mean"], leaves["variance"]), **case.options}
    if rounded is not None:
        out = scan_rounded(arguments, rounded)
    elif exact:
        out = kla_scan_ref(**arguments, return_variance=True)
    else:
        out = kla_scan(**arguments, return_variance=True, acc_dtype=acc_dtype, engine=engine)
    outputs = {
        "y": out.y,
        "y_var": out.y_var,
        "mean": out.state.mean,
        "variance": out.state.variance,
    }
    terms = [
        (x * g.to(x)).sum()
        for x, g in zip(outputs.values(), case.cotangents, strict=True)
        if g is not None
    ]
    loss = torch.stack([t.double() for t in terms]).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    found = dict(outputs)
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        found[f"d {name}"] = torch.zeros_like(leaf) if grad is None else grad
    return {name: x.detach() for name, x in found.items()}


def run_step(case: Case, engine: str) -> Results:
    """The single token of a case through ``kla_step``."""
    arguments: dict[str, Any] = {
        name: x if name.endswith("_bar") else x[:, 0] for name, x in case.inputs.items()
    }
    if "mask" in case.options:
        arguments["mask"] = case.options["mask"][:, 0]
    with torch.no_grad():
        out = kla_step(**arguments, state=case.state, return_variance=True, engine=engine)
    assert out.y_var is not None
    return {
        "y": out.y[:, None], "y_var": out.y_var[:, None],
        "mean": out.state.mean, "variance": out.state.variance,
    }  # fmt: skip


def allowed(name: str, got: Tensor, truth: Tensor) -> Tensor:
    """Largest error of every entry: the contract, and the rounding of a result to its dtype."""
    wide = got.dtype in (torch.float32, torch.float64)
    relative = FLOAT64_TOLERANCE if got.dtype == torch.float64 else tolerance(name)
    limit = torch.full_like(truth, relative * max(float(truth.abs().max()), VANISHING))
    if not wide:
        info = torch.finfo(got.dtype)
        limit = limit + truth.abs() * info.eps + info.smallest_normal * info.eps
        limit = torch.where(truth.abs() > 0.99 * info.max, torch.inf, limit)
    return limit


def excess(got: Results, truth: Results) -> dict[str, float]:
    """By how much results break the contract, as a factor; infinity for what is not a number."""
    found = {}
    for name, result in got.items():
        wanted = truth[name]
        if wanted.numel() == 0:
            continue
        limit = allowed(name, result, wanted)
        factor = ((result.double() - wanted).abs() / limit).nan_to_num(torch.inf)
        factor = torch.where(limit.isinf(), 0.0, factor)
        if float(factor.max()) > 1.0:
            found[name] = float(factor.max())
    return found


def held_against(case: Case, seed: int, broken: dict[str, float]) -> dict[str, float]:
    """Of what breaks the contract, what does not move as far when it is rounded anew.

    What float32 has to round is every input, and the belief after every token: a caller may cut a
    sequence anywhere and hand the state over, so that no arithmetic inside can be worth more than
    the digits of a state.
    """
    exact = case.inputs["v"].dtype == torch.float64
    like = torch.float64 if exact else torch.float32
    truth, left = run(case, "reference"), dict(broken)
    for i in range(ROUNDINGS):
        other = run(case, "reference", rounded=Rounding(Draw(seed + 1 + i), i, exact=exact))
        for name, factor in broken.items():
            plain = name.removeprefix("step ").removeprefix("float32 ")
            limit = allowed(plain, truth[plain].to(like), truth[plain])
            moved = float(((other[plain] - truth[plain]).abs() / limit).max())
            if factor <= MARGIN * moved:
                left.pop(name, None)
        if not left:
            break
    return left


class Rounding:
    """Numbers moved by at most half a unit in the last place: all down, all up, then at random.

    A call in float64 is moved by four units: the reference makes as many roundings itself.
    """

    def __init__(self, x: Draw, i: int, *, exact: bool) -> None:
        self.x, self.sign = x, {0: -1.0, 1: 1.0}.get(i)
        self.scale, self.least = (2.0**-50, 0.0) if exact else (2.0**-24, 2.0**-126)

    def __call__(self, value: Tensor) -> Tensor:
        by = 2.0 * self.x.uniform(*value.shape) - 1.0 if self.sign is None else self.sign
        moved = value * (1.0 + self.scale * by)
        # What is left of a number below the normal ones is for the engine to choose.
        return torch.where(moved.abs() < self.least, moved - moved.detach(), moved)


def scan_rounded(arguments: dict[str, Any], rounded: Rounding) -> ScanOutput:
    """The reference token by token, inputs and every belief on the way rounded."""
    state = KLAState(*(rounded(x) for x in arguments.pop("state")))
    bounds = arguments.pop("cu_seqlens", None)
    fixed = {name: rounded(arguments.pop(name)) for name in ("a_bar", "p_bar")}
    fixed["a_bar"] = fixed["a_bar"].clamp(-1.0, 1.0)
    T = arguments["v"].shape[1]
    tokens = {n: x if x.dtype == torch.bool else rounded(x) for n, x in arguments.items()}
    parts = []
    for i, (start, end) in enumerate(itertools.pairwise([0, T] if bounds is None else bounds)):
        belief = state if bounds is None else KLAState(*(x[i : i + 1] for x in state))
        row = {n: x[:, start:start] for n, x in tokens.items()}
        outs = [kla_scan_ref(**row, **fixed, state=belief, return_variance=True)]
        for t in range(int(start), int(end)):
            token = {n: x[:, t : t + 1] for n, x in tokens.items()}
            outs.append(kla_scan_ref(**token, **fixed, state=belief, return_variance=True))
            belief = KLAState(*(rounded(x) for x in outs[-1].state))
        y, y_var = (torch.cat([out[j] for out in outs], 1) for j in range(2))
        parts.append(ScanOutput(y, y_var, outs[-1].state))
    return join(parts)


def widened(case: Case) -> bool:
    """Whether float64 is chosen for the arithmetic of a call in float32 or below."""
    x = {**case.inputs, "lam_v": case.inputs["lam_v"].clone().requires_grad_()}
    packing = case.options.get("cu_seqlens")
    given = {"mask": case.options.get("mask"), "cu_seqlens": packing, "state": case.state}
    found = check_scan(**x, **given)
    return found.acc_dtype != found.compute_dtype


def check(seed: int, engine: str) -> tuple[dict[str, float], int]:
    """What breaks the contract in the case of a seed, and how many results nobody could tell."""
    case = draw_case(seed, engine=engine)
    truth = run(case, "reference")
    broken = excess(run(case, engine), truth)
    if case.inputs["v"].shape[1] == 1 and "cu_seqlens" not in case.options:
        stepped = excess(run_step(case, engine), truth)
        broken |= {f"step {name}": factor for name, factor in stepped.items()}
    if widened(case):
        short = excess(run(case, engine, acc_dtype=torch.float32), truth)
        short.pop("d lam_v", None)  # what it was widened for
        broken |= {f"float32 {name}": factor for name, factor in short.items()}
    real = held_against(case, seed, broken) if broken else {}
    return real, len(broken) - len(real)


def check_threads(seed: int, engine: str) -> list[str]:
    """Results that change with the number of threads."""
    case = draw_case(seed, large=True, engine=engine)
    before = torch.get_num_threads()
    found: list[Results] = []
    for threads in (1, 2, 3, 4):
        torch.set_num_threads(threads)
        found.append(run(case, engine))
    torch.set_num_threads(before)
    same = {n: all(_same_bits(x, r[n]) for r in found) for n, x in found[0].items()}
    return [name for name, equal in same.items() if not equal]


def _same_bits(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


def fuzz(first: int, cases: int, engine: str, *, report_every: float = 60.0) -> int:
    """Run cases, print what breaks, and return how many did."""
    violations = doubtful = 0
    began = last = time.monotonic()
    for i, seed in enumerate(range(first, first + cases)):
        broken, hopeless = check(seed, engine)
        doubtful += hopeless
        if i % THREADS_EVERY == THREADS_EVERY - 1:
            broken |= {f"threads change {n}": 0.0 for n in check_threads(seed, engine)}
        if broken:
            violations += 1
            text = ", ".join(f"{name} {factor:.2g} x" for name, factor in broken.items())
            print(f"seed {seed}: {text}", flush=True)
        if time.monotonic() - last > report_every:
            last = time.monotonic()
            print(f"... {i + 1} cases, {violations} violations", file=sys.stderr, flush=True)
    print(
        f"{engine}: {cases} cases from seed {first}, {violations} violations, "
        f"{doubtful} results beyond float32, {time.monotonic() - began:.0f} s"
    )
    return violations


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.fuzz")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--engine", default="cpu")
    args = parser.parse_args()
    return 1 if fuzz(args.seed, args.cases, args.engine) else 0


if __name__ == "__main__":
    sys.exit(main())
