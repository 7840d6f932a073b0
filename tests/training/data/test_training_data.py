"""Data are checked against the model's example inputs before anything is measured or trained."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from bapipe.errors import BapipeError
from bapipe.module_path import current_folder_importable
from bapipe.training.build import model_build
from bapipe.training.data.training_data import check_items, training_data
from bapipe.training.run import check_training
from bapipe.training.train_config import TrainConfig
from bapipe.zoo.data.dataset import as_pipeline_dataset
from tests import ROOT

INPUTS = (torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64))


class Broken:
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        raise KeyError("label")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([((torch.zeros(4), 3), 0)], None),
        ([((torch.zeros(4).numpy(), torch.tensor(3)), torch.zeros(2, 2))], None),
        ([], None),
        ([(torch.zeros(4), 0)], "data 'x' has items of 1 inputs and a target; the model takes 2 inputs"),
        (
            [((torch.zeros(4, 1), 3), 0)],
            "data 'x' gives input 0 of shape (4, 1) and type float32; the model's example has shape (4,) and type float32",
        ),
        (
            [((torch.zeros(4), 3.0), 0)],
            "data 'x' gives input 1 of shape () and type float64; the model's example has shape () and type int64",
        ),
        ([((torch.zeros(4), "cat"), 0)], "data 'x' gives a list as input 1; want a tensor or numbers"),
        (
            [{"input_ids": torch.zeros(4), "labels": 0}],
            "data 'x' has dictionaries as items: want (input, target), or ((input, ...), target) with the inputs in",
        ),
        (
            [7],
            "data 'x' fails at its first item: TypeError: cannot unpack non-iterable int object; want (input, target)",
        ),
        (
            Broken(),
            "data 'x' fails at its first item: KeyError: 'label'; want (input, target) or ((input, ...), target)",
        ),
    ],
)
def test_the_first_item(data: Any, message: str | None) -> None:
    if message is None:
        check_items(as_pipeline_dataset(data), INPUTS, "x")
        return
    with pytest.raises(BapipeError, match=rf"^{re.escape(message)}"):
        check_items(as_pipeline_dataset(data), INPUTS, "x")


def test_a_model_and_its_data_are_checked_without_measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_pair.py").write_text(
        "import torch\nfrom torch import nn\nfrom bapipe import Example\n"
        "def net(width=4):\n"
        "    return Example(module=nn.Linear(width, 2), inputs=(torch.zeros(1, width),),\n"
        "                   target=torch.zeros(1, dtype=torch.int64), loss=nn.functional.cross_entropy)\n"
        "def short(): return [(torch.zeros(3), 0)] * 9\n"
    )
    monkeypatch.chdir(tmp_path)
    check_training("own_pair:net", {}, TrainConfig())
    check_training("own_pair:net", {"width": 3}, TrainConfig(data="own_pair:short"))
    with pytest.raises(BapipeError, match=r"^data 'own_pair:short' gives input 0 of shape \(3,\)"):
        check_training("own_pair:net", {}, TrainConfig(data="own_pair:short"))
    with pytest.raises(BapipeError, match=r"^'own_pair:net' has no data: give its Example"):
        check_training("own_pair:net", {}, TrainConfig(data="mnist"))


def test_a_function_for_data_draws_the_same_at_each_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model and data of the tutorial, which draws its samples."""
    (tmp_path / "mine.py").write_text((ROOT / "docs/tutorial.md").read_text().split("```python\n")[1].split("```")[0])
    monkeypatch.chdir(tmp_path)

    def samples(seed: int) -> torch.Tensor:
        with current_folder_importable():
            build, example = model_build("mine:net", {"width": 8, "depth": 1}, seed)
            data = training_data(TrainConfig(data="mine:data", seed=seed), build, example)
        first: torch.Tensor = data[0][0]
        return first

    before = torch.get_rng_state()
    first = samples(0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)
    assert torch.equal(samples(0), first)
    assert not torch.equal(samples(1), first)
