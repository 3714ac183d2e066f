"""The base class of all KLA models for transformers: initialisation, loading and saving."""

import math
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.configuration_utils import CONFIG_NAME

from kalman_attention._reading import read_json
from kalman_attention.models.block import Block
from kalman_attention.models.checksums import (
    check_folder,
    forget_checksums,
    listed_size,
    measure,
    write_checksums,
)
from kalman_attention.models.hf.configuration_kla import KLAHFConfig
from kalman_attention.models.vocabulary import Embedding, Head
from kalman_attention.models.weights import read_header, weight_files
from kalman_attention.nn.prior import LatentPrior

CODE = '''"""Leads transformers to the KLA classes: pip install 'kalman_attention[hf]'."""

from kalman_attention.hf import (
    KLAForCausalLM,
    KLAForSequenceClassification,
    KLAForTokenClassification,
    KLAHFConfig,
    KLAModel,
)
'''
"""The content of ``modeling_kla.py`` in a saved folder. The code itself stays in the package, so
that there is only one class of each kind, however it is imported."""

AUTO_MAP = {
    "AutoConfig": "modeling_kla.KLAHFConfig",
    "AutoModel": "modeling_kla.KLAModel",
    "AutoModelForCausalLM": "modeling_kla.KLAForCausalLM",
    "AutoModelForSequenceClassification": "modeling_kla.KLAForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_kla.KLAForTokenClassification",
}
"""The class that each Auto class loads from a saved folder."""


class KLAPreTrainedModel(PreTrainedModel):
    """Initialisation, loading and saving of both models."""

    config_class = KLAHFConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["KLABlock"]
    # A state cannot be rolled back to an earlier token, which rules out assisted generation.
    _is_stateful = True
    _supports_sdpa = True

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, but from safetensors only; fixed process noise stays fixed."""
        if kwargs.setdefault("use_safetensors", True) is not True:
            raise ValueError(
                "weights are read from safetensors only: loading a pickle can run arbitrary code. "
                "Convert it where you trust it, with save_pretrained."
            )
        folder = Path(str(args[0])) if args else None
        if folder is not None and folder.is_dir():
            _refuse_native(folder)
            weights = [x.name for x in weight_files(folder) if not _replaced(x)]
            check_folder(folder, [CONFIG_NAME, *weights])
        found = super().from_pretrained(*args, **kwargs)
        model = found[0] if isinstance(found, tuple) else found
        # Loading replaces the parameters by trainable ones.
        for prior in (x for x in model.modules() if isinstance(x, LatentPrior)):
            if prior.raw_p is not None and prior.config.process_noise == "fixed":
                prior.raw_p.requires_grad_(False)
        return found

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As in transformers, and write the checksums of the files."""
        folder = Path(save_directory)
        if folder.is_dir():
            forget_checksums(folder)
        self.config.auto_map = AUTO_MAP
        super().save_pretrained(save_directory, *args, **kwargs)
        written = [folder / CONFIG_NAME, *weight_files(folder)]
        if written[0].is_file():
            (folder / "modeling_kla.py").write_text(CODE, encoding="utf-8")
        if all(path.is_file() for path in written):  # not on the ranks that do not write
            write_checksums(folder, {path.name: measure(path) for path in written})

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Does nothing: every saved folder names its classes (``AUTO_MAP``)."""

    def _check_and_adjust_attn_implementation(
        self, attn_implementation: str | None, *args: Any, **kwargs: Any
    ) -> str:
        """Reject what attention blocks do not support; models without them accept anything."""
        adjust = super()._check_and_adjust_attn_implementation
        found: str = adjust(attn_implementation, *args, **kwargs)
        if found not in ("sdpa", "eager") and "attention" in self.config.mixers:
            raise ValueError(
                "attention blocks support torch's scaled_dot_product_attention ('sdpa') and "
                f"step-by-step computation ('eager'), not {found!r}. Leave attn_implementation "
                "out, or pass one of the two."
            )
        return found

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise a module as in the native model; loaded parameters keep their values."""
        own = list(module.parameters())  # a module may initialise those of its submodules
        loaded = [(p, p.clone()) for p in own if getattr(p, "_is_hf_initialized", False)]
        self._start(module)
        for parameter, value in loaded:
            parameter.copy_(value)

    def _start(self, module: nn.Module) -> None:
        config = self.config
        if isinstance(module, Embedding):
            nn.init.normal_(module.weight, std=config.initializer_range)
        elif isinstance(module, Head):
            module.reset_parameters()
            if config.head_initializer_range is not None:
                nn.init.normal_(module.weight, std=config.head_initializer_range)
        elif any(True for _ in module.parameters(recurse=False)):
            module.reset_parameters()  # type: ignore[operator]
            scaled = config.depth_scaled_start
            if scaled and any(module is last for last in self._residual_outputs()):
                branches = config.num_hidden_layers * (1 if config.mlp == "none" else 2)
                module.weight.mul_(1.0 / math.sqrt(branches))  # type: ignore[operator]

    def _residual_outputs(self) -> list[nn.Linear]:
        """The matrices that write into the residual stream, initialised smaller in deep stacks."""
        blocks = [b for b in self.modules() if isinstance(b, Block)]
        return [b.mixer.out_proj for b in blocks] + [b.mlp.out_proj for b in blocks if b.mlp]


def _replaced(path: Path) -> bool:
    """Whether another program has rewritten these weights: a valid file of a different size.

    Tools for transformers edit folders without knowing about our checksums. Damage looks different:
    flipped bits keep the size, and a truncated file is not valid.
    """
    size = listed_size(path)
    if size is None or not path.is_file() or path.stat().st_size == size:
        return False
    try:
        read_header(path)
    except ValueError:
        return False
    return True


def _refuse_native(folder: Path) -> None:
    config = folder / CONFIG_NAME
    if config.is_file() and "plan" in (found := read_json(config)) and "model_type" not in found:
        raise ValueError(
            f"{folder} holds a native model: load it with kalman_attention.load_model and wrap it "
            "with KLAForCausalLM.from_native. (kla export converts the folder.)"
        )
