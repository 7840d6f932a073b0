"""A manifest is believed only if everything that it says holds: of its files, of the model and of the run."""

import copy
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from bapipe.errors import BapipeError
from bapipe.training.checkpoint.manifest import MANIFEST, MinibatchSize, Position, position_after, read_manifest
from bapipe.training.checkpoint.tensor_files import read_tensors, stored_specs, tensor_specs, write_tensors
from bapipe.training.data.loader import MinibatchSampler
from bapipe.training.data.samples_digest import samples_digest
from bapipe.training.train_job import TrainJob
from bapipe.zoo.data.dataset import as_pipeline_dataset
from tests.multiprocess.fault_cases import points
from tests.training.checkpoint.cases import go, read_tree, write_manifest

FOR_THE_READER = {"model", "plan", "versions"}
"""Fields that a run does not use; `scaling` is one too, in a run that scales no losses, `options` in one that was given
all of its own, and `samples` may be left out."""

VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 3, 7, 12, 2**31, 2**63, 10**40, -0.5, 1.5, 1e308, "", "x", "sgd", "adamw", "float3r",
    "float64", "../../x", "rank-0.safetensors", "0" * 64, [], [1], [[]], {}, {"x": 1}, "\u202e\x1b[31m", "x" * 10_000,
)  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    go(folder, 6, keep=1)
    return folder


@pytest.fixture
def kept(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "kept")
    return tmp_path / "kept"


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path of every value in a tree."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


def changed(tree: Any, path: tuple[Any, ...], rng: random.Random) -> Any:
    """Returns a copy with one value replaced, removed, or doubled under another key."""
    new = copy.deepcopy(tree)
    parent = new
    for key in path[:-1]:
        parent = parent[key]
    how = rng.randrange(8)
    if how == 0:
        del parent[path[-1]]
    elif how == 1 and isinstance(parent, dict):
        parent[rng.choice(("x", f"{path[-1]}x", "0.weight", "0.weight:step"))] = parent[path[-1]]
    elif how == 2 and isinstance(parent, list):
        parent.append(parent[path[-1]])
    else:
        parent[path[-1]] = rng.choice(VALUES)
    return new


def resumed_with(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns the manifest that a run of these checkpoints would continue from, or why there is none."""
    jobs: list[TrainJob] = []

    def launch(worker: object, names: object, job: TrainJob, **options: object) -> list[None]:
        jobs.append(job)
        return [None]

    with monkeypatch.context() as patched:
        patched.setattr("bapipe.training.train.launch", launch)
        try:
            go(folder, 8)
        except BapipeError as error:
            return str(error)
    assert jobs[0].resume_from is not None
    return json.loads((jobs[0].resume_from.path / MANIFEST).read_text())


@pytest.mark.parametrize("digest", ["kept", "made anew"])
def test_every_change_of_a_field_is_refused_or_harmless(
    kept: Path, monkeypatch: pytest.MonkeyPatch, digest: str
) -> None:
    checkpoint = kept / "step-000000006"
    tree, rng = read_tree(checkpoint), random.Random(0)
    assert resumed_with(kept, monkeypatch) == tree
    refused = 0
    for path in list(places(tree)) * 2:
        new = changed(tree, path, rng)
        if new == tree and json.dumps(new) == json.dumps(tree):
            continue
        if digest == "kept":
            (checkpoint / MANIFEST).write_text(json.dumps(new, separators=(",", ":")))
        else:
            write_manifest(checkpoint, new)
        used = resumed_with(kept, monkeypatch)
        if isinstance(used, str):
            assert "\n" not in used, path
            refused += 1
            continue
        assert digest == "made anew", path
        differing = {key for key in {*used, *tree} if used.get(key) != tree.get(key)}
        assert differing <= {*FOR_THE_READER, "digest", "scaling", "options", "samples"}, (path, differing)
    assert refused > 200


def test_other_data_with_as_many_samples_are_refused(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = kept / "step-000000006"
    tree = read_tree(checkpoint)
    other = TensorDataset(torch.zeros(50, 4), torch.arange(50) % 3)
    monkeypatch.setattr("tests.training.checkpoint.cases.points", lambda: other)
    assert resumed_with(kept, monkeypatch) == (
        f"{checkpoint} was trained on other data with as many samples: the digest of the first and the last one is "
        f"{samples_digest(as_pipeline_dataset(points()))} there and {samples_digest(as_pipeline_dataset(other))} here; "
        "a function for data must give the same items at each call"
    )
    del tree["samples"]  # as in a checkpoint of an earlier version
    write_manifest(checkpoint, tree)
    assert "samples" not in resumed_with(kept, monkeypatch)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"\xff\xfe", b"[" * 10**6, b"null", b'{"bapipe":"checkpoint/3"}', b" " * 100]
)
def test_what_is_no_manifest_is_damaged(kept: Path, text: bytes) -> None:
    (kept / "step-000000006" / MANIFEST).write_bytes(text)
    with pytest.raises(BapipeError, match=r"^\S+/kept/step-000000006/bapipe.json is damaged: [^\n]*$"):
        read_manifest(kept / "step-000000006")


def test_a_key_that_occurs_twice_or_a_space_is_damage(kept: Path) -> None:
    file = kept / "step-000000006" / MANIFEST
    text = file.read_text()
    for other in (text.replace('"seed":0', '"seed":1,"seed":0'), text.replace('"seed":0', '"seed": 0'), f"{text}\n"):
        file.write_text(other)
        with pytest.raises(BapipeError, match=r"is damaged: its digest is of another text$"):
            read_manifest(file.parent)


def test_a_checkpoint_under_another_step_s_name_is_refused(kept: Path) -> None:
    (kept / "step-000000006").rename(kept / "step-000000004")
    with pytest.raises(BapipeError, match=r"step-000000004 is damaged: it holds the checkpoint of 6 steps$"):
        read_manifest(kept / "step-000000004")


def test_a_file_of_other_tensors_with_its_digest_in_the_manifest_is_refused(kept: Path) -> None:
    checkpoint = kept / "step-000000006"
    tree = read_tree(checkpoint)
    (name,) = tree["files"]
    tensors = dict(read_tensors([checkpoint / name], stored_specs(checkpoint / name)))
    tensors = {key: value.clone() for key, value in tensors.items()}
    for others, said in (
        (tensors | {"model/more": torch.zeros(1)}, "'model/more' differs between bapipe.json and the files"),
        (tensors | {"model/0.bias": torch.zeros(3)}, "'model/0.bias' differs between bapipe.json and the files"),
        (tensors | {"model/0.bias": torch.zeros(16, dtype=torch.float64)}, "'model/0.bias' differs between"),
    ):
        digest = write_tensors(checkpoint / name, others)
        tree["files"][name] = {"num_bytes": digest.num_bytes, "sha256": digest.sha256}
        write_manifest(checkpoint, tree)
        with pytest.raises(BapipeError, match=said):
            read_manifest(checkpoint)


def test_the_position_is_that_of_the_data_s_order() -> None:
    data, rng = as_pipeline_dataset(points()), random.Random(1)
    for _ in range(30):
        position, sizes = Position(), list[MinibatchSize]()
        for _ in range(rng.randrange(1, 4)):
            sizes.append(MinibatchSize(from_step=position.step, num_samples=rng.randrange(1, 51)))
            requests = iter(MinibatchSampler(data, sizes[-1].num_samples, 0, position))
            for _ in range(rng.randrange(1, 20)):
                position = next(requests).after
        assert position_after(position.step, sizes, 50) == position


def test_a_file_keeps_every_dtype_and_shape(tmp_path: Path) -> None:
    dtypes = (
        torch.float64, torch.bfloat16, torch.bool, torch.int8, torch.uint16, torch.complex64, torch.complex128,
        torch.float8_e4m3fn,
    )  # fmt: skip
    tensors = {
        f"{dtype}{list(shape)}": torch.randint(0, 2, shape).to(dtype)
        for dtype in dtypes
        for shape in ((), (3,), (0, 2), (2, 3, 1))
    }
    tensors["transposed"] = torch.randn(3, 5).t()
    digest = write_tensors(tmp_path / "x", tensors)
    assert digest.num_bytes == (tmp_path / "x").stat().st_size
    (tmp_path / "other").touch()
    assert (tmp_path / "x").stat().st_mode == (tmp_path / "other").stat().st_mode
    again = dict(read_tensors([tmp_path / "x"], tensor_specs(tensors)))
    assert again.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (again[name].dtype, again[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(again[name].to(torch.complex128), tensor.to(torch.complex128))
    assert stored_specs(tmp_path / "x") == {name: spec.stored for name, spec in tensor_specs(tensors).items()}
