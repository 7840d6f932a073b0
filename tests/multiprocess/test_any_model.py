"""Models that know nothing of bapipe: built by any function, with inputs by keyword and without data, from weights."""

import sys
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import bapipe
from bapipe.errors import BapipeError
from bapipe.formats.plan import Plan
from bapipe.tracing.bound_inputs import only_tensor_inputs
from bapipe.tracing.layers import trace
from bapipe.training.checkpoint.weights import check_weights
from bapipe.training.run import run
from bapipe.zoo.example import Example
from bapipe.zoo.factory import build
from tests.multiprocess.runtime_cases import make_plan, named_order

LLAMA = "bapipe.zoo.hugging_face:LlamaForCausalLM"
SMALL = {
    "vocab_size": 17, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
    "tie_word_embeddings": True, "length": 5,
}  # fmt: skip


class Read(nn.Module):
    """Reads words under a mask, with positions and angles that it computes when it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 4)
        self.scale = nn.Parameter(torch.full((4,), 0.5))
        self.register_buffer("angles", torch.arange(4) / 3)
        self.head = nn.Linear(4, 9)

    def forward(
        self, words: Tensor, mask: Tensor | None = None, places: Tensor | None = None, flip: bool = False
    ) -> Tensor:
        read = self.words(words.flip(1) if flip else words) * self.scale * self.angles.cos()
        return self.head(read if mask is None else read * mask.unsqueeze(2))


def read() -> Example:
    words, mask = torch.zeros(2, 3, dtype=torch.int64), torch.tensor([[1, 1, 1], [1, 0, 0]])
    inputs = {"mask": mask, "words": words, "places": None, "flip": True}
    return Example(module=Read(), inputs=inputs, target=words, loss=of_words)


def of_words(output: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(output.flatten(0, 1), target.flatten())


def same_text() -> list[tuple[Tensor, Tensor]]:
    return [(torch.arange(5), torch.arange(5) + 1)] * 8


def two_stages(example: Example, cut: str) -> Plan:
    with only_tensor_inputs(example.module, example.inputs) as tensors:
        layers = [layer.name for layer in trace(example.module, tensors).layers]
    return make_plan(layers, (layers.index(cut),), (0, 1), named_order("1f1b", 2, 2), 2, 2)


def test_a_function_without_data_trains_on_data_like_its_example_inputs() -> None:
    plan = two_stages(read(), "head")
    found = run(plan, factory=read, steps=3, timeout_s=60)
    assert found.losses[-1] < found.losses[0] < 3
    with pytest.raises(BapipeError, match=r"^the plan of test names no factory"):
        run(plan)


def test_training_starts_from_weights_of_a_file(tmp_path: Path) -> None:
    torch.manual_seed(5)
    example = build(LLAMA, SMALL)
    module = example.module
    weights = {name: tensor for name, tensor in module.state_dict().items() if name != "lm_head.weight"}  # tied
    save_file(weights, tmp_path / "weights.safetensors")
    (words, target), *_ = same_text()
    with torch.no_grad():
        want = example.loss(module(words.unsqueeze(0)), target)
    plan = msgspec.structs.replace(
        two_stages(example, "model.layers.1.input_layernorm"), factory=LLAMA, arguments=SMALL
    )
    found = bapipe.run(
        plan, weights=tmp_path / "weights.safetensors", data=f"{__name__}:same_text", steps=1, timeout_s=60
    )
    assert found.losses[0] == pytest.approx(want.item(), rel=1e-5)


def test_a_function_that_no_process_can_import_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)  # as if it were not installed

    def local() -> Example:
        return read()

    with pytest.raises(
        BapipeError, match=r"^what processes run cannot be sent to them \(.*local.*\): define .* or install"
    ):
        run(two_stages(read(), "head"), factory=local, steps=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head.bias": None}, "it lacks 'head.bias'"),
        ({"head.b": torch.zeros(9)}, "it has besides 'head.b'"),
        ({"scale": None, "a": torch.zeros(1), "b": torch.zeros(1), "c": torch.zeros(1), "d": torch.zeros(1)},
         "it lacks 'scale' and has besides 'a', 'b', 'c' and 1 more"),
        ({"scale": torch.zeros(4, dtype=torch.complex64)}, "'scale' is complex there"),
        ({"scale": torch.zeros(5)}, r"'scale' has shape \[5\] there and \[4\] here"),
    ],
)  # fmt: skip
def test_weights_of_another_model(tmp_path: Path, changes: dict[str, Tensor | None], message: str) -> None:
    state = {k: v for k, v in (Read().state_dict() | changes).items() if v is not None}
    save_file(state, tmp_path / "w.safetensors")
    with pytest.raises(BapipeError, match=rf"w\.safetensors has other weights than the model: {message}$"):
        check_weights(tmp_path / "w.safetensors", Read())


def test_files_that_are_no_weights(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(b"not weights")
    with pytest.raises(BapipeError, match=r"w\.safetensors is no safetensors file: "):
        check_weights(tmp_path / "w.safetensors", Read())
    with pytest.raises(BapipeError, match=r"none\.safetensors: cannot be read: "):
        check_weights(tmp_path / "none.safetensors", Read())
    with pytest.raises(BapipeError, match=r" is a folder; want a safetensors file, such as `bapipe export` makes"):
        check_weights(tmp_path, Read())
