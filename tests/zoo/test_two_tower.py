"""The model of two towers: its size, that the towers are independent, and its questions."""

import pytest
import torch

from bapipe.errors import InvalidModel
from bapipe.tracing.layers import trace
from bapipe.zoo import ZOO
from bapipe.zoo.data.images import images
from bapipe.zoo.data.vqa import visual_questions
from bapipe.zoo.factory import build
from tests.models.small_zoo import build_on_meta

TWO_TOWER = ZOO["two_tower"]
TINY: dict[str, object] = {
    "num_layers": 2, "hidden_size": 8, "num_heads": 2, "image_size": 8, "patch_size": 4, "length": 5, "num_answers": 3,
}  # fmt: skip


def test_size() -> None:
    h = 384
    block = 4 * (h * h + h) + 2 * 4 * h * h + 5 * h + 4 * h
    image = 3 * 8 * 8 * h + h + 64 * h + 6 * block + 2 * h
    text = (3 + 50 + 10) * h + 16 * h + 6 * block + 2 * h
    joint = 2 * h * h + h + 10 * h + 10
    module = build_on_meta(TWO_TOWER, {}).module
    assert sum(p.numel() for p in module.parameters()) == image + text + joint == 21_723_274


def test_towers_meet_late() -> None:
    model = trace(build_on_meta(TWO_TOWER, TINY).module)
    layers = {layer.name: layer for layer in model.layers}
    for tower, other in (("image", "text"), ("text", "image")):
        own = {name for name in layers if name.startswith(f"{tower}.") and name != f"{tower}.norm"}  # where they meet
        assert len(own) > 15
        for name in own:
            assert not [tensor for tensor in layers[name].inputs if tensor.startswith(f"{other}.")], name
    assert [name for name in layers if "." not in name] == ["joint", "gelu", "answers"]


def test_answers_depend_on_both_and_not_on_padding() -> None:
    torch.manual_seed(0)
    module = build(TWO_TOWER, TINY).module
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    module.double().eval()
    image = torch.randn(1, 3, 8, 8, dtype=torch.float64)
    question = torch.tensor([[1, 7, 9, 0, 0]])
    answer = module(image, question)
    assert not torch.allclose(module(image.flip(3), question), answer)
    assert not torch.allclose(module(image, torch.tensor([[2, 7, 9, 0, 0]])), answer)
    with torch.no_grad():
        module.get_parameter("text.words.weight")[0] = 100.0
    torch.testing.assert_close(module(image, question), answer)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_heads": 5}, "hidden_size 384 does not divide into 5 heads; want a multiple of it"),
        ({"patch_size": 7}, "image_size 64 does not divide into patches of 7; want a multiple of it"),
        ({"length": 1}, "length is 1; a question has two words or more, so want at least 2"),
    ],
)
def test_errors(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidModel) as error:
        build_on_meta(TWO_TOWER, arguments)
    assert str(error.value) == f"factory '{TWO_TOWER}' failed: ValueError: {message}"


def test_synthetic_questions_and_answers() -> None:
    data = visual_questions("synthetic", image_size=8, length=6, num_answers=4)
    assert len(data) == 10_000
    shown = [0, 0]
    for index in range(200):
        (image, question), answer = data[index]
        assert image.shape == (3, 8, 8)
        words = question[question != 0]
        assert 2 <= len(words) <= 6
        assert not question[len(words) :].any()
        names = [word - 53 for word in words.tolist() if word >= 53]
        assert len(names) == 1
        assert all(word >= 3 for word in words[1:].tolist())
        asked = int(words[0])
        shown[asked - 1] += 1
        if asked == 2:
            assert answer == names[0]
        else:
            assert answer == images("synthetic", image_size=8, num_classes=4)[index][1]
    assert 80 <= shown[0] <= 120
