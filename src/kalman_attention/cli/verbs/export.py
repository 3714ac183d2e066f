"""``kla export``: a trained model as a folder that other libraries read."""

import argparse
from pathlib import Path

from kalman_attention.cli.paths import out_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument(
        "run", type=Path, metavar="RUN", help="a pretraining run, or any folder with a model"
    )
    parser.add_argument("--to", choices=["hf"], default="hf", help="format (default: %(default)s)")
    parser.add_argument("folder", type=out_folder, metavar="DIR", help="where it goes")
    parser.add_argument("--tokenizer", type=Path, help="folder of the tokenizer (default: RUN)")


def run(args: argparse.Namespace) -> int:
    """Write the folder."""
    from kalman_attention.evaluation.checkpoint import load_checkpoint
    from kalman_attention.models.hf.modeling_kla import KLAForCausalLM

    model, tokenizer = load_checkpoint(args.run, tokenizer=args.tokenizer)
    bos = tokenizer.bos  # also what follows the end of a document
    found = KLAForCausalLM.from_native(model, bos_token_id=bos, eos_token_id=bos)
    found.save_pretrained(args.folder)
    tokenizer.save(args.folder)
    print(
        f"{args.folder}: {model.num_parameters():,} parameters for transformers. Where this "
        "package is installed,\n"
        f"AutoModelForCausalLM.from_pretrained({str(args.folder)!r}, trust_remote_code=True)"
    )
    return 0
