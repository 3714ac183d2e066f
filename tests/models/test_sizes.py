"""Sizes are those of the real modules, and the paper's tables come out as documented."""

import pytest

from kalman_attention import (
    AttentionConfig,
    KLAConfig,
    LanguageModel,
    LanguageModelConfig,
    MambaConfig,
    MLSTMConfig,
    preset,
)
from kalman_attention.cli.main import main
from kalman_attention.models.matching import PAPER_MODELS
from kalman_attention.models.mixers import MIXERS
from kalman_attention.models.sizes import mixer_size, model_size
from kalman_attention.nn.mixer import state_tensors
from tests.models.small import text

PRINTED = {
    "mad": {name: [2048] for name in ("KLA", "Mamba", "GatedDeltaNet", "GLA", "mLSTM")},
    "mqar": {
        **{name: [2048, 4096, 8192] for name in ("KLA", "Mamba", "GLA")},
        "GatedDeltaNet": [2304, 4608, 9216],
    },
}


def test_by_hand():
    kla = mixer_size("kla", KLAConfig(d_model=8, d_state=3))
    assert kla == ("kla", 2 * 64 + 5 * 8 + 8 * (8 + 6) + 3 * 3 * 8 + 8 + 64, 2 * 3 * 8, 3 * 8, 0)
    mamba = mixer_size("mamba", MambaConfig(d_model=8, d_state=3))
    parameters = 8 * 32 + 5 * 16 + 16 * 7 + 16 * 1 + 16 * 3 + 16 + 16 + 16 * 8
    assert mamba == ("mamba", parameters, 3 * 16, 3 * 16, 0)
    attention = mixer_size("attention", AttentionConfig(d_model=8))
    assert attention == ("attention", 4 * 64, 0, 0, 16)
    mlstm = mixer_size("mlstm", MLSTMConfig(d_model=8, num_heads=2))
    assert mlstm.state == 2 * 8 * 8 + 2 * 8 + 2


@pytest.mark.parametrize("name", MIXERS)
def test_the_state_after_tokens_has_the_size_that_is_listed(name):
    # Not of init_state, which is what is measured, but of what forward returns.
    config = LanguageModelConfig(vocab_size=37, d_model=32, plan=f"{name}*2")
    size, model = model_size(config), LanguageModel(config)
    assert size.parameters == model.num_parameters()
    for T in (1, 9):
        states = model(text(1, T)).states
        held = sum(x.numel() for s in states for _, x in state_tensors(s) if x.is_floating_point())
        assert held == size.state + size.window + T * size.per_token


def test_models():
    size = model_size(preset("gpt+kla-45m"))
    assert size.parameters == 45_293_184
    assert size.vocabulary == 2 * 32_768 * 384
    assert [x.state for x in size.mixers] == [0] * 11 + [2 * 32 * 384]
    assert (size.state, size.window, size.per_token) == (24_576, 3 * 384, 11 * 2 * 384)
    tied = LanguageModelConfig(vocab_size=9, d_model=8, plan="kla", tie_embeddings=True)
    assert model_size(tied).vocabulary == 72


@pytest.mark.parametrize("table", PAPER_MODELS)
def test_matched_models_have_equal_states(table):
    printed: dict[str, list[int]] = {}
    wanted = {}
    for row in PAPER_MODELS[table]:
        printed.setdefault(row.name, []).append(row.printed_state)
        if row.name == "KLA":
            wanted[row.published.d_model] = row.printed_state
        size = mixer_size(row.mixer, row.matched)
        # mLSTM's normaliser and stabiliser are not counted in the paper.
        found = row.matched.state_size if row.mixer == "mlstm" else size.state
        assert found == wanted[row.published.d_model], row
        model = row.model("matched", vocab_size=11)
        assert (len(model.layers), set(model.layers)) == (row.blocks, {row.mixer})
        assert model.mixer_options(row.mixer) == row.matched
    assert printed == PRINTED[table]


def test_where_the_printed_arithmetic_does_not_close():
    off = {}
    for table, rows in PAPER_MODELS.items():
        for row in rows:
            options = row.published
            own = getattr(options, "state_size", None) or mixer_size(row.mixer, options).state
            if own != row.printed_state:
                off[table, row.name, options.d_model] = own / row.printed_state
    assert off == {
        ("mad", "mLSTM", 128): 2.0,
        ("mqar", "GLA", 64): 0.5,
        ("mqar", "GLA", 128): 0.5,
        ("mqar", "GLA", 256): 0.5,
    }


def test_the_verb(capsys):
    assert main(["sizes", "kla-45m", "gpt+kla-45m"]) == 0
    said = capsys.readouterr().out
    assert "attention*11 + kla" in said
    assert "45,309,104" in said
    assert main(["sizes"]) == 0
    assert "gpt-180m" in capsys.readouterr().out
    assert main(["sizes", "--paper", "mad"]) == 0
    said = capsys.readouterr().out
    assert "qk_factor=0.5" in said
    assert "4,368" in said
    assert main(["sizes", "kla-1b"]) == 1
    assert "unknown preset" in capsys.readouterr().err
