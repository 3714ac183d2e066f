"""``kla export``: a trained model as a folder that other libraries read."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from kalman_attention.cli.arguments import add_folder
from kalman_attention.cli.paths import out_folder

if TYPE_CHECKING:
    from kalman_attention.data.tokenizer import Tokenizer
    from kalman_attention.models.language_model import LanguageModel


FORMATS = (
    "hf: a folder for transformers; onnx: two programs, prefill.onnx and step.onnx, that run "
    "without torch (default: %(default)s)"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "run",
        type=Path,
        metavar="RUN",
        help="folder of a pretraining run, or any folder with a model",
    )
    parser.add_argument("--to", choices=["hf", "onnx"], default="hf", help=FORMATS)
    parser.add_argument("folder", type=out_folder, metavar="DIR", help="folder to write")
    add_folder(parser, "--tokenizer", "folder of the tokenizer (default: RUN)")


def run(args: argparse.Namespace) -> int:
    """Write the folder."""
    from kalman_attention.evaluation.checkpoint import load_checkpoint

    model, tokenizer = load_checkpoint(args.run, tokenizer=args.tokenizer)
    written = (_to_hf if args.to == "hf" else _to_onnx)(model, tokenizer, args.folder)
    tokenizer.save(args.folder)
    print(f"{args.folder}: {model.num_parameters():,} parameters {written}")
    return 0


def _to_hf(model: "LanguageModel", tokenizer: "Tokenizer", folder: Path) -> str:
    from kalman_attention.models.hf.modeling_kla import KLAForCausalLM

    bos = tokenizer.bos  # also follows the end of a document
    KLAForCausalLM.from_native(model, bos_token_id=bos, eos_token_id=bos).save_pretrained(folder)
    return (
        "for transformers. Where this package is installed,\n"
        f"AutoModelForCausalLM.from_pretrained({str(folder)!r}, trust_remote_code=True)"
    )


def _to_onnx(model: "LanguageModel", tokenizer: "Tokenizer", folder: Path) -> str:
    from kalman_attention.models.onnx import export_onnx

    names = [path.name for path in export_onnx(model, folder)]
    return f"as {' and '.join(names)}. Inputs and outputs: kalman_attention.models.onnx"
