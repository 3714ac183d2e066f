"""A KLA model as transformers sees it: save, load by name, generate, ask how sure it was."""

import argparse
import tempfile

import torch
from transformers import AutoModelForCausalLM

from kalman_attention.hf import KLAForCausalLM, KLAHFConfig  # the import registers the Auto classes


def main() -> None:
    """Random weights: this shows the interface, not the text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default=None, help="where to save; temporary by default")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # small tensors: more threads only wait for each other
    config = KLAHFConfig(
        vocab_size=256,
        hidden_size=64,
        state_size=8,
        layer_types="attention + kla*2",  # or a list of full_attention and linear_attention
        head_initializer_range=0.2,
        pad_token_id=0,
        eos_token_id=1,
    )
    folder = args.folder or tempfile.mkdtemp()
    KLAForCausalLM(config).save_pretrained(folder)

    model = AutoModelForCausalLM.from_pretrained(folder)  # dtype=torch.bfloat16 works as well
    print(f"{type(model).__name__}: {model.num_parameters():,} parameters")

    # Two prompts of different lengths, padded on the left as generate wants it.
    prompts = torch.tensor([[0, 0, 72, 105], [75, 76, 65, 33]])
    batch = {"input_ids": prompts, "attention_mask": (prompts != 0).long()}
    greedy = model.generate(**batch, max_new_tokens=8, do_sample=False)
    alone = model.generate(prompts[:1, 2:], max_new_tokens=8, do_sample=False)
    print("padded batch equals the single prompt:", torch.equal(greedy[:1, 2:], alone))

    beams = model.generate(**batch, max_new_tokens=8, num_beams=4, do_sample=False)
    print("beam search:", beams[1, 4:].tolist())

    out = model.generate(**batch, max_new_tokens=8, do_sample=True, output_uncertainty=True)
    print("token  entropy  variance")
    sure = out.uncertainty
    for token, entropy, variance in zip(
        out.sequences[1, 4:].tolist(), sure.entropy[1], sure.variance[1], strict=True
    ):
        print(f"{token:5d}  {entropy.item():7.3f}  {variance.item():8.4f}")


if __name__ == "__main__":
    main()
