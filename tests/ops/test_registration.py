"""The op as a citizen of torch: opcheck, compile, export, autocast, vmap."""

import pytest
import torch
from torch import Tensor

from kalman_attention import KLAState, ScanOutput, kla_scan, kla_scan_ref, kla_step
from kalman_attention.ops.kla_scan import scan, scan_backward
from kalman_attention.tools.selfcheck import Case, make_call
from tests.engines import COMPILED_ENGINES, EVERY_ENGINE


def draw(case: Case, grad: bool = True) -> list[Tensor]:
    return [x.float().requires_grad_(grad) for x in make_call(case).tensors]


def loss(*args: Tensor, engine: str = "auto") -> Tensor:
    out = kla_scan(*args[:6], state=KLAState(*args[6:]), return_variance=True, engine=engine)
    return out.y.sum() + out.y_var.square().sum() + out.state.mean.sum()


@pytest.mark.parametrize("engine", COMPILED_ENGINES)
@pytest.mark.parametrize("kind", ["plain", "mask", "packed"])
def test_opcheck(engine: str, kind: str) -> None:
    case = Case(B=1 if kind == "packed" else 2, T=70, N=3, D=5, documents=3 * (kind == "packed"))
    args = draw(case)
    mask = torch.ones(2, 70, dtype=torch.bool).tril() if kind == "mask" else None
    cu_seqlens = torch.tensor([0, 10, 10, 70]) if kind == "packed" else None
    torch.library.opcheck(scan, (*args, mask, cu_seqlens, torch.float32, None, True, True, engine))
    frozen = [x.detach() for x in args]
    torch.library.opcheck(scan, (*frozen, mask, cu_seqlens, None, None, False, False, engine))
    *outputs, saved = scan(*frozen, mask, cu_seqlens, None, None, True, True, engine)
    given = (*frozen, mask, cu_seqlens, None, None, saved, *outputs, engine)
    torch.library.opcheck(scan_backward, given)


@pytest.mark.parametrize("engine", ["associative", "mobius"])
def test_opcheck_with_gaps(engine: str) -> None:
    *args, dt = draw(Case(B=2, T=70, N=3, D=5, gaps="channel"))
    given = (*args, None, None, torch.float32, dt, True, True, engine)
    torch.library.opcheck(scan, given)
    frozen = [x.detach() for x in (*args, dt)]
    rest = (None, None, torch.float32, frozen[8])
    *outputs, saved = scan(*frozen[:8], *rest, True, True, engine)
    torch.library.opcheck(scan_backward, (*frozen[:8], *rest, saved, *outputs, engine))


@pytest.mark.xdist_group("inductor")  # whose headers are compiled once per process
@pytest.mark.parametrize("engine", COMPILED_ENGINES)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_compile_fullgraph_equals_eager(engine: str, backend: str) -> None:
    args = draw(Case(B=2, T=70, N=3, D=5))

    def step(*args: Tensor) -> Tensor:
        return loss(*args, engine=engine)

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(*args), step(*args))
    got = torch.autograd.grad(compiled(*args), args)
    torch.testing.assert_close(got, torch.autograd.grad(step(*args), args))


def test_compile_with_mask_and_packing() -> None:
    args = draw(Case(B=1, T=70, N=3, D=5), grad=False)[:6]
    compiled = torch.compile(kla_scan, fullgraph=True, backend="aot_eager")
    mask = torch.ones(1, 70, dtype=torch.bool)
    mask[:, :9] = False
    assert torch.equal(compiled(*args, mask=mask).y, kla_scan(*args, mask=mask).y)
    cu_seqlens = torch.tensor([0, 30, 70])
    packed = compiled(*args, cu_seqlens=cu_seqlens)
    assert torch.equal(packed.y, kla_scan(*args, cu_seqlens=cu_seqlens).y)


def test_an_eager_engine_refuses_to_be_compiled() -> None:
    args = draw(Case(B=1, T=5, N=2, D=3), grad=False)[:6]
    compiled = torch.compile(kla_scan, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="does not run inside compiled or exported graphs"):
        compiled(*args, engine="torch_scan")


class Scan(torch.nn.Module):
    def forward(self, *args: Tensor) -> ScanOutput:
        return kla_scan(*args, return_variance=True)


class Step(torch.nn.Module):
    def forward(self, *args: Tensor) -> ScanOutput:
        return kla_step(*args[:6], KLAState(*args[6:]))


def test_export_with_any_length() -> None:
    args = draw(Case(B=2, T=70, N=3, D=5), grad=False)[:6]
    time = torch.export.Dim("time", min=2, max=4096)
    shapes = tuple({1: time} if i < 4 else None for i in range(6))
    exported = torch.export.export(Scan(), tuple(args), dynamic_shapes=(shapes,)).module()
    for T in (70, 33, 2):
        shorter = [*(x[:, :T] for x in args[:4]), *args[4:]]
        out = exported(*shorter)
        assert isinstance(out, ScanOutput)
        assert torch.equal(out.y, Scan()(*shorter).y)
        assert torch.equal(out.state.variance, Scan()(*shorter).state.variance)


def test_export_of_a_step() -> None:
    args = draw(Case(B=2, T=1, N=3, D=5), grad=False)
    args = [*(x[:, 0] for x in args[:4]), *args[4:]]
    exported = torch.export.export(Step(), tuple(args)).module()
    torch.testing.assert_close(exported(*args).y, Step()(*args).y)


@pytest.mark.parametrize("engine", EVERY_ENGINE)
def test_autocast_leaves_arithmetic_in_float32(engine: str) -> None:
    args = draw(Case(B=2, T=70, N=3, D=5))
    weight = torch.eye(5, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        v = args[2] @ weight
        assert v.dtype == torch.bfloat16
        out = kla_scan(*args[:2], v, *args[3:6], engine=engine)
    assert out.y.dtype == torch.bfloat16
    assert out.state.mean.dtype == torch.float32
    exact = kla_scan_ref(*args[:2], v.detach().float(), *args[3:6])
    torch.testing.assert_close(out.state.mean, exact.state.mean, rtol=1e-5, atol=1e-6)
    out.y.float().sum().backward()
    assert weight.grad is not None
    assert weight.grad.isfinite().all()


@pytest.mark.parametrize("engine", [*EVERY_ENGINE, "reference"])
def test_autocast_does_not_touch_float32_values(engine: str) -> None:
    args = draw(Case(B=2, T=70, N=4, D=5), grad=False)[:6]
    exact = kla_scan(*args, return_variance=True, engine=engine)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = kla_scan(*args, return_variance=True, engine=engine)
        step = kla_step(*(x[:, 0] for x in args[:4]), *args[4:], out.state, engine=engine)
    assert torch.equal(out.y, exact.y)
    assert out.y_var is not None
    assert exact.y_var is not None
    assert torch.equal(out.y_var, exact.y_var)
    assert step.y.dtype == torch.float32


def test_vmap_equals_a_loop() -> None:
    args = draw(Case(B=2, T=20, N=3, D=5), grad=False)[:6]
    values = torch.stack([args[2], 2 * args[2], -args[2]])

    def output(v: torch.Tensor) -> torch.Tensor:
        return kla_scan(*args[:2], v, *args[3:]).y

    assert torch.equal(torch.func.vmap(output)(values), torch.stack([output(v) for v in values]))


def test_second_derivatives_are_refused_with_a_way_out() -> None:
    args = draw(Case(B=1, T=5, N=2, D=3))
    (first,) = torch.autograd.grad(loss(*args), args[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="kla_scan_ref"):
        first.sum().backward()
    (first,) = torch.autograd.grad(loss(*args, engine="reference"), args[0], create_graph=True)
    first.sum().backward()


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_mode_and_partial_gradients() -> None:
    args = draw(Case(B=1, T=10, N=2, D=3), grad=False)
    args[4].requires_grad_()
    with torch.autograd.detect_anomaly(check_nan=True):
        (grad,) = torch.autograd.grad(loss(*args), args[4])
    assert grad.isfinite().all()
