"""The models in `examples/` profile by name, as a user in that folder would have them."""

import pytest

import bapipe
from bapipe.formats.profile import ModelProfile
from bapipe.profiler.options import ProfileOptions
from bapipe.profiler.profile import profile_model
from tests import ROOT

EXAMPLES = ROOT / "examples"


def profiled(factory: str, monkeypatch: pytest.MonkeyPatch, **arguments: object) -> ModelProfile:
    monkeypatch.chdir(EXAMPLES)
    return profile_model(factory, arguments, ProfileOptions(microbatch_sizes=(1,)))


def test_custom_model(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = profiled("custom_model:residual_mlp", monkeypatch, width=8, depth=1)
    assert profile.model == "residual_mlp"
    assert [layer.name for layer in profile.layers] == ["0", "1", "2.norm", "2.up", "2.down", "3", "loss"]


def test_lora(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"num_layers": 2, "hidden_size": 8, "vocabulary_size": 260, "length": 4, "rank": 2, "first": 1}
    layers = {layer.name: layer for layer in profiled("lora:llama", monkeypatch, **sizes).layers}
    trained = {name: layer.gradient_bytes for name, layer in layers.items() if layer.gradient_bytes}
    adapted = [f"model.layers.1.self_attn.{name}_proj.{part}" for name in "qv" for part in ("down", "up")]
    assert trained == dict.fromkeys(adapted, 4 * 2 * 8)
    assert layers["model.embed_tokens"].no_gradient == ("model.embed_tokens",)


def test_hugging_face_s_gpt2(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    profile = profiled("hugging_face:gpt2", monkeypatch, num_layers=2, hidden_size=16, num_heads=2, length=8)
    names = [layer.name for layer in profile.layers]
    parts = ["ln_1", "attn.c_attn", "attn.c_proj", "attn.resid_dropout", "ln_2"]
    parts += ["mlp.c_fc", "mlp.act", "mlp.c_proj", "mlp.dropout"]
    assert [name for name in names if ".h.0." in name] == [f"transformer.h.0.{part}" for part in parts]
    block = 12 * 16 * 16 + 13 * 16
    assert sum(layer.param_bytes for layer in profile.layers) == 4 * (256 * 16 + 8 * 16 + 2 * block + 2 * 16)
    head = profile.layers[names.index("lm_head")]
    assert head.shares == ("transformer.wte",)
    assert head.param_bytes == 0  # counted where it is first used
    plan = bapipe.plan(profile, 2, minibatch_size=4, microbatch_size=1, num_stages=2, replicas=False)
    assert ["transformer.wte" in stage.layers for stage in plan.stages] == [True, False]
    losses = bapipe.run(plan, data="pydoc", steps=2, learning_rate=0.1).losses
    assert 0 < losses[1] < losses[0]
