"""Bad input gets an error that says what, why and what instead."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kalman_attention import KLAState, kla_scan, kla_scan_ref, kla_step, value_checks
from kalman_attention.tools.selfcheck import Case, make_call

B, T, N, D = 2, 6, 3, 5
Arguments = dict[str, object]


def arguments() -> Arguments:
    tensors = [x.float() for x in make_call(Case(B=B, T=T, N=N, D=D)).tensors]
    named = dict(zip(("q", "k", "v", "lam_v", "a_bar", "p_bar"), tensors, strict=False))
    return {**named, "state": KLAState(*tensors[6:])}


def first_document(x: Arguments) -> Arguments:
    return {**x, **{name: x[name][:1] for name in ("q", "k", "v", "lam_v")}, "state": None}


MISTAKES: dict[str, tuple[Callable[[Arguments], Arguments], str]] = {
    "v without batch": (lambda x: {**x, "v": x["v"][0]}, r"v has shape \[6, 5\].*unsqueeze"),
    "k of another length": (
        lambda x: {**x, "k": x["k"][:, 1:]},
        r"k has shape \[2, 5, 3\] but must be \[B, T, N\] = \[2, 6, N\]",
    ),
    "q of other slots": (lambda x: {**x, "q": x["q"][..., 1:]}, r"q has shape .* \[2, 6, 3\]"),
    "heads": (lambda x: {**x, "v": x["v"].unsqueeze(2)}, r"v has shape .*merge heads"),
    "lam_v per token": (lambda x: {**x, "lam_v": x["lam_v"][..., :1]}, r"lam_v has shape"),
    "a_bar transposed": (
        lambda x: {**x, "a_bar": x["a_bar"].T},
        r"a_bar has shape \[5, 3\] but must be \[N, D\] = \[3, 5\]",
    ),
    "not a tensor": (lambda x: {**x, "v": [1.0]}, "v must be a torch.Tensor"),
    "integers": (lambda x: {**x, "v": x["v"].long()}, "v is int64"),
    "float64 among float32": (
        lambda x: {**x, "k": x["k"].double()},
        "k is float64.*cannot be mixed",
    ),
    "half dynamics": (
        lambda x: {**x, "a_bar": x["a_bar"].bfloat16()},
        r"a_bar is bfloat16 but must be float32.*a_bar\.to\(torch\.float32\)",
    ),
    "another device": (lambda x: {**x, "q": x["q"].to("meta")}, "q is on meta but v is on cpu"),
    "state of another batch": (
        lambda x: {**x, "state": KLAState(*(s[:1] for s in x["state"]))},
        r"state.mean is \[1, 3, 5\] but must be \[2, 3, 5\].*one state per batch row.*expand",
    ),
    "state of another dtype": (
        lambda x: {**x, "state": KLAState(*(s.double() for s in x["state"]))},
        "state.mean is float64 but must be float32",
    ),
    "state that is a tensor": (lambda x: {**x, "state": x["v"]}, "state must be a KLAState"),
    "float mask": (lambda x: {**x, "mask": torch.ones(B, T)}, r"mask is float32.*mask\.bool\(\)"),
    "mask of another length": (
        lambda x: {**x, "mask": torch.ones(B, T - 1, dtype=torch.bool)},
        r"mask is bool \[2, 5\] but must be bool \[B, T\] = \[2, 6\]",
    ),
    "mask with cu_seqlens": (
        lambda x: {
            **first_document(x),
            "mask": torch.ones(1, T, dtype=torch.bool),
            "cu_seqlens": torch.tensor([0, T]),
        },
        "mask and cu_seqlens are mutually exclusive",
    ),
    "packed batch": (
        lambda x: {**x, "state": None, "cu_seqlens": torch.tensor([0, T])},
        "the batch has 2 rows",
    ),
    "unsorted cu_seqlens": (
        lambda x: {**first_document(x), "cu_seqlens": torch.tensor([0, 4, 2, T])},
        r"never decrease and end at T = 6, got \[0, 4, 2, 6\]",
    ),
    "short cu_seqlens": (
        lambda x: {**first_document(x), "cu_seqlens": torch.tensor([0, 4])},
        r"end at T = 6, got \[0, 4\]",
    ),
    "late cu_seqlens": (
        lambda x: {**first_document(x), "cu_seqlens": torch.tensor([1, T])},
        "must start at 0",
    ),
    "float cu_seqlens": (
        lambda x: {**first_document(x), "cu_seqlens": torch.tensor([0.0, T])},
        "cu_seqlens is float32",
    ),
    "no document": (
        lambda x: {**first_document(x), "cu_seqlens": torch.tensor([0])},
        "at least one document",
    ),
    "NaN in the dynamics": (
        lambda x: {**x, "a_bar": torch.full((N, D), torch.nan)},
        r"a_bar must lie in \[-1, 1\], got values from nan",
    ),
    "growing dynamics": (lambda x: {**x, "a_bar": x["a_bar"] * 0 + 1.5}, "lets the state diverge"),
    "negative noise": (
        lambda x: {**x, "p_bar": x["p_bar"] - 1},
        "p_bar must be finite and at least",
    ),
    "infinite noise": (lambda x: {**x, "p_bar": x["p_bar"] / 0}, "p_bar must be finite"),
}


def call(function: Callable[..., object], given: Arguments) -> object:
    positional = [given.pop(name) for name in ("q", "k", "v", "lam_v", "a_bar", "p_bar")]
    return function(*positional, **given)


@pytest.mark.parametrize(("spoil", "message"), MISTAKES.values(), ids=MISTAKES.keys())
@pytest.mark.parametrize("function", [kla_scan, kla_scan_ref])
def test_mistakes_are_explained(function, spoil, message) -> None:
    with pytest.raises(ValueError, match=message):
        call(function, spoil(arguments()))


def test_unknown_engine_lists_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match=r"unknown engine 'cud'.*reference.*associative.*kla check"
    ):
        call(kla_scan, {**arguments(), "engine": "cud"})


def test_an_engine_that_cannot_serve_names_one_that_can() -> None:
    given = {name: _to_meta(x) for name, x in arguments().items()}
    with pytest.raises(ValueError, match=r"'mobius' cannot serve .*on meta.*'associative' can"):
        call(kla_scan, {**given, "engine": "mobius"})


def _to_meta(x: object) -> object:
    return x.to("meta") if isinstance(x, Tensor) else KLAState(*(s.to("meta") for s in x))


def test_step_explains_a_time_axis_and_a_missing_state() -> None:
    given = arguments()
    with pytest.raises(ValueError, match=r"v has shape \[2, 6, 5\] but must be \[B, D\]"):
        call(kla_step, {**given})
    tokens = {name: given[name][:, 0] for name in ("q", "k", "v", "lam_v")}
    with pytest.raises(ValueError, match="unit_prior"):
        call(kla_step, {**given, **tokens, "state": None})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("lam_v", -1.0, r"lam_v must be finite and at least 0.*first is -1\.0 at \(1, 2, 3\)"),
        ("v", torch.nan, r"v must be finite.*nan at \(1, 2, 3\)"),
    ],
)
def test_value_checks_are_opt_in(name: str, value: float, message: str) -> None:
    given = arguments()
    spoiled = given[name].clone()
    spoiled[1, 2, 3] = value
    call(kla_scan, {**given, name: spoiled})
    with value_checks(), pytest.raises(ValueError, match=message):
        call(kla_scan, {**given, name: spoiled})


def test_value_checks_skip_padding_and_look_at_the_state() -> None:
    given = arguments()
    given["v"][:, 2:] = torch.nan
    mask = torch.zeros(B, T, dtype=torch.bool)
    mask[:, :2] = True
    with value_checks():
        call(kla_scan, {**given, "mask": mask})
        state = KLAState(given["state"].mean, -given["state"].variance)
        with pytest.raises(ValueError, match="variance_0 must be finite and at least 0"):
            call(kla_scan, {**given, "mask": mask, "state": state})


def test_value_checks_leave_missing_values_alone() -> None:
    given = arguments()
    given["v"][0, 1, 2], given["lam_v"][0, 1, 2] = torch.nan, 0.0
    with value_checks():
        call(kla_scan, {**given})
        given["lam_v"][0, 1, 2] = 1.0
        with pytest.raises(ValueError, match=r"v must be finite.*nan at \(0, 1, 2\)"):
            call(kla_scan, {**given})
