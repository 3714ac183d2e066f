"""Saving, loading, converting, resizing; and that the special initialisation survives all of it."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from kalman_attention import LanguageModel, load_model, save_model
from kalman_attention.hf import KLAForCausalLM, KLAHFConfig, KLAModel
from kalman_attention.models.mixers import MIXERS
from kalman_attention.train.optim import group_names
from tests.models import small as native_models
from tests.models.hf.small import PLANS, VOCABULARY, config, small, text

plans = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
DYNAMICS = ("log_a", "raw_p", "raw_dt", "mean_0", "log_variance_0")


@plans
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_auto_classes_read_what_was_saved(tmp_path, plan, tied):
    model, ids = small(plan, tie_word_embeddings=tied, mlp="relu2"), text(2, 6)
    model.save_pretrained(tmp_path)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), KLAHFConfig)
    found = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(found, KLAForCausalLM)
    assert torch.equal(found(ids).logits, model(ids).logits)
    assert (found.lm_head.weight is found.model.embedding.weight) == tied
    names = set(load_file(tmp_path / "model.safetensors"))
    assert ("lm_head.weight" in names) == (not tied)
    base = AutoModel.from_pretrained(tmp_path)
    assert isinstance(base, KLAModel)
    assert torch.equal(base(ids).last_hidden_state, model.model(ids).last_hidden_state)
    assert isinstance(AutoModelForCausalLM.from_config(model.config), KLAForCausalLM)


@plans
def test_native_folder_to_transformers_folder_and_back(tmp_path, plan):
    native, ids = native_models.small(plan), text(2, 6)
    save_model(native, tmp_path / "native")
    KLAForCausalLM.from_native(load_model(tmp_path / "native")).save_pretrained(tmp_path / "hf")
    model = KLAForCausalLM.from_pretrained(tmp_path / "hf")
    assert torch.equal(model(ids).logits, native(ids).logits)
    save_model(model.native(), tmp_path / "again")
    again = load_model(tmp_path / "again")
    assert torch.equal(again(ids).logits, native(ids).logits)
    for name, value in native.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_an_embedding_in_bfloat16_becomes_that_of_the_rest(tmp_path):
    native, ids = native_models.small(), text(2, 6)
    native.embedding.bfloat16()
    KLAForCausalLM.from_native(native).save_pretrained(tmp_path)
    model = KLAForCausalLM.from_pretrained(tmp_path)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert torch.equal(model(ids).logits, native(ids).logits)
    assert native.embedding.weight.dtype == torch.bfloat16


def test_native_views_share_the_weights():
    model, ids = small(tie_word_embeddings=True), text(1, 4)
    view = model.native()
    assert {id(p) for p in view.parameters()} == {id(p) for p in model.parameters()}
    again = KLAForCausalLM.from_native(view)
    with torch.no_grad():
        again.model.embedding.weight.mul_(2.0)
    assert torch.equal(model(ids).logits, view(ids).logits)
    assert vars(view).keys() == vars(LanguageModel(view.config)).keys()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_weights_with_float32_dynamics(tmp_path, dtype):
    model, ids = small("attention + kla*2", prior="learned"), text(2, 6)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    built = AutoModelForCausalLM.from_config(model.config, dtype=dtype)
    for short in (loaded, built, small("kla*2", prior="learned").to(dtype)):
        for name, parameter in short.named_parameters():
            expected = torch.float32 if name.endswith(DYNAMICS) else dtype
            assert parameter.dtype == expected, name
    assert loaded.dtype == dtype
    with torch.no_grad():
        found = loaded(ids)
        assert found.logits.dtype == dtype
        torch.testing.assert_close(found.logits.float(), model(ids).logits, rtol=0.02, atol=0.03)
    cache = found.past_key_values
    assert cache.layers[1].state.belief.mean.dtype == torch.float32
    assert loaded.generate(ids, max_new_tokens=3, do_sample=False).shape == (2, 9)
    loaded.save_pretrained(tmp_path / "short")
    saved = load_file(tmp_path / "short" / "model.safetensors")
    assert all(v.dtype == torch.float32 for k, v in saved.items() if k.endswith(DYNAMICS))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "short")
    assert torch.equal(again(ids).logits, loaded(ids).logits)


def spread(model):
    """Mean and spread of every parameter, whatever the random numbers were, and how close."""
    return {
        name.removeprefix("model.").replace("lm_head", "head"): (
            float(p.detach().mean()),
            float(p.detach().std()),
            max(0.25, 4.0 / p.numel() ** 0.5),
        )
        for name, p in model.named_parameters()
    }


@plans
@pytest.mark.parametrize("mlp", ["none", "swiglu"])
def test_the_start_is_the_native_one(plan, mlp):
    options = {"hidden_size": 96, "mlp": mlp, "head_initializer_range": 0.02, "skip": 0.5}
    if "gated_deltanet" in plan:  # which has two numbers per head to compare
        many = {"num_heads": 48, "expand_k": 1.0, "expand_v": 1.0}
        options["mixer_options"] = {"gated_deltanet": many}
    model = small(plan, **options, decay_rate=[0.5, 2.0], process_noise="fixed")
    expected = spread(LanguageModel(model.config.to_native()))
    for name, (mean, std, close) in spread(model).items():
        assert abs(mean - expected[name][0]) < close * max(expected[name][1], 0.01), name
        assert abs(std - expected[name][1]) < close * max(expected[name][1], 0.01), name
    model.init_weights()  # a second time changes nothing: the modules are marked
    assert spread(model).keys() == expected.keys()


def test_whatever_is_pinned_natively_is_pinned_here(tmp_path):
    model = small(" + ".join(MIXERS), hidden_size=64)
    expected = {name: p.dtype for name, p in model.native().bfloat16().named_parameters()}
    assert set(expected.values()) == {torch.float32, torch.bfloat16}
    model = small(" + ".join(MIXERS), hidden_size=64)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    built = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)
    for short in (loaded, built):
        found = {n.removeprefix("model."): p.dtype for n, p in short.named_parameters()}
        assert found.pop("lm_head.weight") == expected["head.weight"]
        assert {**found, "head.weight": torch.bfloat16} == expected


def test_missing_keys_start_as_natively_and_the_others_are_kept(tmp_path):
    model = small("kla + attention", hidden_size=64, skip=0.5, mlp="relu2")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(3.0)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    missing = [
        "model.blocks.0.mixer.prior.raw_dt",
        "model.blocks.0.mixer.skip.weight",
        "model.blocks.0.mixer.out_proj.weight",
        "model.blocks.0.mixer.conv.weight",
        "model.blocks.1.norm.weight",
        "lm_head.weight",
    ]
    for name in missing:
        del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = KLAForCausalLM.from_pretrained(tmp_path)
    for name, value in model.named_parameters():
        if name not in missing:
            assert torch.equal(found.get_parameter(name), value), name
    fresh = spread(small("kla + attention", hidden_size=64, skip=0.5, mlp="relu2"))
    for name in missing:
        mean, std, _ = spread(found)[name.removeprefix("model.").replace("lm_head", "head")]
        expected = fresh[name.removeprefix("model.").replace("lm_head", "head")]
        assert abs(mean - expected[0]) < 0.25 * max(expected[1], 0.01), name
        assert abs(std - expected[1]) < 0.25 * max(expected[1], 0.01), name
    dt = torch.nn.functional.softplus(found.model.blocks[0].mixer.prior.raw_dt.detach())
    assert 9e-4 < float(dt.min()) < float(dt.max()) < 0.11


def test_weights_that_another_program_wrote_anew(tmp_path):
    model = small("kla*2")
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors, path, metadata={"format": "pt", "written by": "another program"})
    found = KLAForCausalLM.from_pretrained(tmp_path)
    for name, value in model.named_parameters():
        assert torch.equal(found.get_parameter(name), value), name
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(ValueError, match="is damaged"):
        KLAForCausalLM.from_pretrained(tmp_path)


def test_a_missing_key_does_not_start_its_neighbours_again(tmp_path):
    model = small("mlstm", hidden_size=64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(3.0)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    missing = ["model.blocks.0.mixer.skip.weight", "model.blocks.0.mixer.gates.bias"]
    for name in missing:
        del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "checksums.json").unlink()
    found = KLAForCausalLM.from_pretrained(tmp_path)
    for name, value in model.named_parameters():
        assert torch.equal(found.get_parameter(name), value) == (name not in missing), name
    mixer = found.model.blocks[0].mixer
    assert bool((mixer.skip.weight == 1).all())
    assert mixer.gates.bias[4:].tolist() == [3.0, 4.0, 5.0, 6.0]


def test_fixed_noise_stays_fixed(tmp_path):
    small(process_noise="fixed").save_pretrained(tmp_path)
    found = KLAForCausalLM.from_pretrained(tmp_path)
    fixed = [name for name, p in found.named_parameters() if not p.requires_grad]
    assert fixed == [f"model.blocks.{i}.mixer.prior.raw_p" for i in range(2)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_resizing_the_vocabulary(tmp_path, tied, bias):
    model, ids = small(tie_word_embeddings=tied, head_bias=bias), text(2, 5)
    if bias:
        assert not bool(model.lm_head.bias.any())  # as natively
        torch.nn.init.normal_(model.lm_head.bias)
    before, groups = model(ids).logits, group_names(model)
    model.resize_token_embeddings(VOCABULARY + 5)
    assert model.config.vocab_size == VOCABULARY + 5
    after = model(ids, labels=ids)
    torch.testing.assert_close(after.logits[..., :VOCABULARY], before)
    assert (model.lm_head.weight is model.model.embedding.weight) == tied
    assert model.native().config.vocab_size == VOCABULARY + 5
    assert (model.native().head.bias is not None) == bias
    assert group_names(model) == groups
    model.save_pretrained(tmp_path)
    found = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(found(ids).logits, after.logits)


def test_paper_groups_know_the_modules():
    groups = set(group_names(KLAForCausalLM(config("kla + attention"))).values())
    assert groups == {"embedding", "head", "hidden", "vector", "state_space"}
