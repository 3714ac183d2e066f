"""The GPU engines on a GPU; all of this waits for a machine that has one."""

import pytest
import torch

from kalman_attention import KLAState, kla_scan, kla_step
from kalman_attention.ops.engines import ENGINES
from kalman_attention.tools.selfcheck import Case, errors, make_call, misses, run_call
from tests.ops.test_engines import AWKWARD

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")

CUDA = torch.device("cuda")


def _usable(name: str) -> pytest.param:
    reason = "no such engine"
    if name in ENGINES:
        reason = ENGINES[name].why_not(CUDA, torch.float32) or ""
    return pytest.param(name, marks=pytest.mark.skipif(bool(reason), reason=reason))


ENGINE = pytest.mark.parametrize("engine", [_usable("triton"), _usable("cuda")])


@ENGINE
@pytest.mark.parametrize("case", AWKWARD.values(), ids=AWKWARD.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_awkward_cases(engine: str, case: Case, dtype: torch.dtype) -> None:
    call = make_call(case)
    truth = run_call(call, "reference", torch.float64)
    found = errors(run_call(call, engine, dtype, device="cuda"), truth)
    assert not misses(found)


@ENGINE
@pytest.mark.parametrize("case", [Case(B=1, T=65_536, N=16, D=96), Case(B=40, T=300, N=16, D=960)])
def test_both_schedules_at_size(engine: str, case: Case) -> None:
    call = make_call(case)
    truth = run_call(call, "associative", torch.float64, device="cuda")
    assert not misses(errors(run_call(call, engine, torch.float32, device="cuda"), truth))


@ENGINE
def test_the_same_bits_on_every_run(engine: str) -> None:
    call = make_call(Case(B=2, T=2000, N=16, D=960))
    one, other = (run_call(call, engine, torch.float32, device="cuda") for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)


@ENGINE
def test_steps_equal_the_scan(engine: str) -> None:
    tensors = [x.float().cuda() for x in make_call(Case(B=3, T=9, N=16, D=96)).tensors]
    state = KLAState(*tensors[6:])
    whole = kla_scan(*tensors[:6], state=state, engine=engine)
    for t in range(9):
        out = kla_step(*(x[:, t] for x in tensors[:4]), *tensors[4:6], state, engine=engine)
        torch.testing.assert_close(out.y, whole.y[:, t], rtol=1e-5, atol=1e-6)
        state = out.state
    torch.testing.assert_close(state, whole.state, rtol=1e-5, atol=1e-6)
