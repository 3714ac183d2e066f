"""Who may import whom. One table for our packages, one for those of others; no exceptions."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kalman_attention.ops.engines import ENGINES, REFERENCE

PACKAGE = Path(__file__).parents[1] / "src" / "kalman_attention"
NAME = "kalman_attention"

_COMMON = ("_extras", "_files", "_processes", "_progress", "_tables")
_MIXERS = ("_text", "_typing", "filtering", "ops")
_LAYERS = (*_MIXERS, "nn", "baselines", "losses", "_reading")
_RUNS = (*_COMMON, *_LAYERS, "published", "models", "tasks", "data")
_SHOWN = ("benchmarks", "explorer", "plots", "recipes", "report")

MAY_IMPORT = {
    "_extras": (),
    "_files": (),
    "_processes": (),
    "_progress": ("_text",),
    "_text": (),
    "_tables": (),
    "_typing": (),
    "_reading": (),
    "published": (),
    "filtering": ("_typing",),
    "ops": ("_text", "_typing", "filtering"),
    "nn": _MIXERS,
    "tools": (*_MIXERS, "_tables", "__init__"),
    "series": (*_MIXERS, "plots"),
    "baselines": (*_MIXERS, "nn"),
    "models": ("_files", "published", *_LAYERS),
    "losses": ("_typing", "filtering.readout"),  # KLA+ samples as everyone does
    "tasks": ("_text", "_typing"),
    "data": (*_COMMON, "_text", "_typing", "_reading"),
    "parallel": (*_LAYERS, "models"),
    "train": (*_RUNS, "parallel"),
    "evaluation": _RUNS,
    "explorer": (*_RUNS, "evaluation"),
    "hf": ("models",),
    "plots": ("_typing", "filtering.identities"),
    "recipes": (*_RUNS, "parallel", "train", "evaluation", "series"),
    "benchmarks": (*_RUNS, "tools", "recipes", "plots", "__init__"),
    "report": (*_RUNS, "train", "evaluation", "plots", "recipes"),
    "cli": (*_RUNS, "tools", "parallel", "train", "evaluation", *_SHOWN, "__init__"),
    "__main__": ("cli",),
    "__init__": _RUNS,
}
"""What each part of the package may import, besides itself; ``__init__`` is the public surface."""

ONLY_IN = {
    "argparse": ("cli",),  # everything else takes typed arguments
    "jinja2": ("explorer.page", "report.page"),
    "markupsafe": ("explorer.page", "report.page"),
    "matplotlib": ("plots",),
    "sklearn": ("evaluation.detection", "evaluation.series", "recipes.physionet"),
    "torchmetrics": ("evaluation.detection", "evaluation.series"),
    "transformers": ("hf", "models.hf", "benchmarks.layer", "benchmarks.mixers"),
    "mamba_ssm": ("baselines.mamba",),
    "mambapy": ("benchmarks.mixers",),
    "xlstm": ("benchmarks.mixers",),
    "pickle": (),
    "torch.distributed": ("parallel",),
    "torch.nn.parallel": ("parallel",),
    "torch.utils.tensorboard": ("train.metrics",),
    "wandb": ("train.metrics",),
    "tokenizers": ("data",),
    "lm_eval": ("evaluation.zero_shot",),
    "scoringrules": ("evaluation.series",),
    "triton": ("ops.triton", "tools.triton_resources"),
    "fla": ("baselines.common",),
    "cuda": ("ops.cuda",),
    "ctypes": ("ops.cpu", "ops.cuda", "ops.triton", "recipes.machine"),  # machine: mallopt
    "torch.utils.cpp_extension": ("ops.cpu", "ops.cuda", "ops.triton"),
    "http": ("explorer.server",),
    **dict.fromkeys(
        ("datasets", "huggingface_hub", "requests", "socket", "urllib"),
        ("data", "evaluation.zero_shot"),
    ),
}
"""Compilers, the network and heavy libraries, and the only places that touch them."""

FILES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
"""Module name below the package (``filtering.ou``; the package itself is ``__init__``) to file."""


def within(module: str, parents: tuple[str, ...]) -> bool:
    return any(module == parent or module.startswith(f"{parent}.") for parent in parents)


def imports(source: str) -> Iterator[str]:
    """Full names of all imports of a file, those inside functions included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def ours(name: str) -> str | None:
    """Module below the package that an import names; None if it is not ours."""
    if name != NAME and not name.startswith(f"{NAME}."):
        return None
    below = name.removeprefix(NAME).removeprefix(".")
    is_part = below.split(".")[0] in {module.split(".")[0] for module in FILES}
    return below if is_part and below else "__init__"


def violations(module: str, source: str) -> list[str]:
    part = module.split(".")[0]
    broken = []
    for name in imports(source):
        target = ours(name)
        if target is None:
            homes = [homes for library, homes in ONLY_IN.items() if within(name, (library,))]
            broken += [f"{module} imports {name}" for h in homes if not within(module, h)]
        elif not within(target, (part, *MAY_IMPORT[part])):
            broken.append(f"{module} imports {NAME}.{target}")
    return broken


@pytest.mark.parametrize("module", FILES)
def test_direction_of_import(module):
    assert module.split(".")[0] in MAY_IMPORT, "a new part of the package needs a row in MAY_IMPORT"
    assert not violations(module, FILES[module].read_text())


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("filtering.ou", "from kalman_attention.ops.contract import CHUNK"),
        ("ops.torch.rows", "from kalman_attention.losses import marginal_nll"),
        ("ops.torch.rows", "from kalman_attention import kla_scan"),
        ("ops.checks", "def f():\n    import kalman_attention"),
        ("losses", "from kalman_attention import filtering"),
        ("losses", "from kalman_attention.filtering.moment import KLAState"),
        ("cli.demo", "import matplotlib.pyplot as plt"),
        ("cli.verbs.report", "import jinja2"),
        ("benchmarks.scan", "import argparse"),
        ("benchmarks.scan", "from kalman_attention.cli.paths import BENCH"),
        ("report.page", "import matplotlib.pyplot as plt"),
        ("report.page", "from kalman_attention.cli.paths import writable_file"),
        ("recipes.mad", "from kalman_attention.report.page import Section"),
        ("models.block", "from transformers import PreTrainedModel"),
        ("ops.torch.associative", "from torch.utils.cpp_extension import load"),
        ("ops.kla_scan", "from cuda.bindings import nvrtc"),
        ("ops.kla_scan", "from kalman_attention.tools.selfcheck import Case"),
        ("plots.beliefs", "from kalman_attention.filtering.ou import discretise"),
        ("evaluation.synthetic", "import urllib.request"),
        ("train.checkpoint", "import pickle"),
        ("models.block", "import torch.distributed as dist"),
        ("parallel.ranks", "from kalman_attention.train.loop import fit"),
    ],
)
def test_the_rules_can_be_broken(module, source):
    assert violations(module, source)


def test_verbs_do_not_call_the_command_line():
    # A verb that needs another one calls the function behind it, not the program.
    for module, path in FILES.items():
        if within(module, ("cli.verbs",)):
            found = [ours(name) for name in imports(path.read_text())]
            assert not [target for target in found if target and within(target, ("cli.main",))]


def test_engines_do_not_import_each_other():
    locations = [e.location.partition(":")[0] for e in ENGINES.values()]
    engines = {location.removeprefix(f"{NAME}.") for location in locations} | {f"ops.{REFERENCE}"}
    assert {"ops.torch.associative", "ops.triton"} <= engines
    for module, path in FILES.items():
        home = [engine for engine in engines if within(module, (engine,))]
        others = tuple(engines.difference(home))
        if home:
            found = [ours(name) for name in imports(path.read_text())]
            assert not [target for target in found if target and within(target, others)], module


def test_the_package_brings_nothing_but_torch():
    program = (
        "import sys, torch; before = set(sys.modules); import kalman_attention as package; "
        "all(getattr(package, name) for name in dir(package)); "
        "print(*{m.partition('.')[0] for m in set(sys.modules) - before})"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    brought = set(run.stdout.split()) - set(sys.stdlib_module_names)
    assert brought - {"torch"} == {NAME}


def test_inits_do_no_work():
    # A docstring, imports and plain constants; nothing is called, but when a name is asked for.
    for module, path in FILES.items():
        if path.name == "__init__.py":
            body = ast.parse(path.read_text()).body
            work = [node for node in body if not isinstance(node, ast.FunctionDef)]
            calls = [n for w in work for n in ast.walk(w) if isinstance(n, ast.Call)]
            assert not calls, module
