"""What ``import kalman_attention`` promises. A change here is a change for users: say so."""

import ast
import inspect
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

import kalman_attention
from kalman_attention import train

PUBLIC = [
    "Attention",
    "AttentionConfig",
    "GLA",
    "GLAConfig",
    "GatedDeltaNet",
    "GatedDeltaNetConfig",
    "Innovations",
    "KLA",
    "KLAConfig",
    "KLAState",
    "LSTM",
    "LSTMConfig",
    "LanguageModel",
    "LanguageModelConfig",
    "LayerOutput",
    "LayerState",
    "LinearScanOutput",
    "MLSTM",
    "MLSTMConfig",
    "Mamba",
    "MambaConfig",
    "Mixer",
    "ModelOutput",
    "Readout",
    "ScanOutput",
    "SeriesConfig",
    "SeriesModel",
    "discretise",
    "kla_innovations",
    "kla_scan",
    "kla_scan_ref",
    "kla_smooth",
    "kla_step",
    "kla_step_ref",
    "linear_scan",
    "linear_scan_ref",
    "load_model",
    "load_series_model",
    "marginal_nll",
    "posterior_mean_cross_entropy",
    "preset",
    "register_mixer",
    "save_model",
    "use_engine",
    "value_checks",
]

TRAIN = [
    "Batches",
    "Best",
    "CheckpointError",
    "NonFiniteError",
    "Result",
    "StreamBatches",
    "TensorBatches",
    "TrainConfig",
    "fit",
    "flat_groups",
    "load_weights",
    "param_groups",
    "read_metrics",
    "token_evaluation",
    "token_loss",
]


@pytest.mark.parametrize(("module", "expected"), [(kalman_attention, PUBLIC), (train, TRAIN)])
def test_export_list(module, expected):
    names = [
        name
        for name in dir(module)
        if not name.startswith("_") and not inspect.ismodule(getattr(module, name))
    ]
    assert sorted(names) == expected


def test_names_for_type_checkers_are_those_of_the_interpreter():
    (block,) = [
        node
        for node in ast.parse(Path(kalman_attention.__file__).read_text()).body
        if isinstance(node, ast.If)
    ]
    written = {
        alias.asname: node.module.removeprefix("kalman_attention.")
        for node in block.body
        for alias in node.names
    }
    assert list(written.items()) == list(kalman_attention._HOMES.items())


def test_all_names_at_once():
    namespace: dict[str, object] = {}
    exec("from kalman_attention import *", namespace)
    assert sorted(name for name in namespace if name != "__builtins__") == PUBLIC


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="has no attribute 'kla_scann'"):
        _ = kalman_attention.kla_scann


def test_a_name_may_be_asked_for_first_inside_a_compiled_function():
    program = """
import torch
import kalman_attention

def f(v, k, decay):
    return kalman_attention.kla_scan(k, k, v, torch.ones_like(v), decay, decay).y

v, k, decay = torch.randn(1, 3, 2), torch.randn(1, 3, 1), torch.full((1, 2), 0.5)
compiled = torch.compile(f, backend="aot_eager", fullgraph=True)(v, k, decay)
torch.testing.assert_close(compiled, f(v, k, decay))
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("name", PUBLIC + TRAIN)
def test_public_names_have_docstrings(name):
    thing = getattr(kalman_attention, name, None) or getattr(train, name)
    documented = [thing]
    if inspect.isclass(thing):
        documented += [
            getattr(thing, member)
            for member, value in vars(thing).items()
            if not member.startswith("_")
            and (callable(value) or isinstance(value, (property, classmethod)))
        ]
    for each in documented:
        text = inspect.getdoc(each)
        assert text, each
        assert text.splitlines()[0].endswith((".", ":"))


def test_the_family_has_one_signature():
    scan, reference, step, step_reference = (
        list(inspect.signature(f).parameters)
        for f in (
            kalman_attention.kla_scan,
            kalman_attention.kla_scan_ref,
            kalman_attention.kla_step,
            kalman_attention.kla_step_ref,
        )
    )
    assert scan == [*reference, "engine"]
    assert step == [*step_reference, "engine"]
    # A step needs the belief, so that is an argument by position there.
    only_scan = ("cu_seqlens", "acc_dtype")
    assert [n for n in scan if n not in (*only_scan, "state")] == [n for n in step if n != "state"]
    assert step[6] == "state"
    assert scan[:6] == ["q", "k", "v", "lam_v", "a_bar", "p_bar"]
    smooth = list(inspect.signature(kalman_attention.kla_smooth).parameters)
    assert smooth == [n for n in scan if n != "return_variance"]
    innovations = list(inspect.signature(kalman_attention.kla_innovations).parameters)
    assert innovations == [n for n in smooth[1:] if n != "engine"]


def test_fields():
    assert kalman_attention.ScanOutput._fields == ("y", "y_var", "state")
    assert kalman_attention.KLAState._fields == ("mean", "variance")


def test_op_is_registered():
    assert torch.ops.kalman_attention.scan.default is not None
    assert torch.ops.kalman_attention.scan_backward.default is not None


def test_one_version_everywhere():
    root = Path(__file__).parents[1]
    version = kalman_attention.__version__
    assert version == metadata.version("kalman_attention")
    assert f"\nversion: {version}\n" in (root / "CITATION.cff").read_text()
