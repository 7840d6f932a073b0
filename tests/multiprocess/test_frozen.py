"""Parameters that are not trained: what a profile says of them, what the simulator charges, and what a run then holds."""

import copy

import pytest
import torch
from msgspec import UNSET
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import bapipe
from bapipe.formats.plan import Plan
from bapipe.formats.profile import LOSS, ModelProfile
from bapipe.formats.settings import Settings
from bapipe.runtime.optimizer import sgd
from bapipe.runtime.pipeline import Pipeline
from bapipe.simulator.memory import peak_memory
from bapipe.simulator.stage_cost import build_stages
from tests.multiprocess.runtime_cases import make_plan

WORDS, WIDTH = 11, 6


class Adapted(nn.Module):
    """A frozen linear layer with a trained correction of rank 2, as LoRA (arXiv:2106.09685) has it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Tuned(nn.Module):
    """A frozen embedding that is tied to a frozen head, two frozen layers, and two with corrections."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH).requires_grad_(False)
        self.frozen = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).requires_grad_(False)
        self.adapted = nn.Sequential(Adapted(), nn.Tanh(), Adapted())
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.adapted(self.frozen(self.embed(words))))


def loss(output: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(output.flatten(0, 1), target.flatten())


def words(rows: int) -> Tensor:
    return torch.arange(rows * 3).reshape(rows, 3) % WORDS


@pytest.fixture(scope="module")
def profile() -> ModelProfile:
    torch.manual_seed(0)
    return bapipe.profile(Tuned(), [words(2)], words(2), loss, microbatch_sizes=[2], settings=Settings(threads=1))


def plan_of(profile: ModelProfile, cut: int, *, is_split: bool = False) -> Plan:
    names = [layer.name for layer in profile.layers if layer.name != LOSS]
    backwards = ("1I", "0I", "1W", "0W") if is_split else ("1B", "0B")
    order = [f"{action}{m}" for m in range(3) for action in ("0F", "1F", *backwards)]
    return make_plan(names, (cut,), (0, 0), [order], 2, 3)


def test_a_profile_distinguishes_trained_parameters(profile: ModelProfile) -> None:
    found = {layer.name: layer for layer in profile.layers}
    assert (found["embed"].param_bytes, found["embed"].trained_bytes) == (4 * WORDS * WIDTH, 0)
    assert (found["adapted.0.base"].trained_bytes, found["adapted.0.down"].trained_bytes) == (0, UNSET)
    head = found["head"]
    assert (head.param_bytes, head.trained_bytes) == (4 * WORDS, UNSET)  # its bias
    assert (head.shares, head.shared_bytes, head.shared_trained_bytes) == (("embed",), 4 * WORDS * WIDTH, 0)
    for name in ("embed", "frozen.0", "frozen.2"):
        layer, measured = found[name], profile.measurements[0].layers[list(found).index(name)]
        assert layer.no_gradient == layer.outputs
        assert (measured.whole_backward_ns, measured.stash_bytes) == (0, 0)
        assert (layer.optimizer_state_bytes, layer.update_ns) == (0, 0)
    base = found["adapted.2.base"]  # frozen, but gradients pass it
    assert (base.trained_bytes, base.no_gradient) == (0, ())


def test_a_stage_is_charged_for_trained_parameters_only(profile: ModelProfile) -> None:
    plan = plan_of(profile, 4)
    stages = build_stages(plan.stages, {"cpu": profile}, plan.cluster, 2)
    frozen, trained = (stage.costs[0] for stage in stages)
    assert frozen.gradient_bytes == frozen.optimizer_bytes == frozen.update_ns == frozen.backward_ns == 0
    assert stages[0].grad_bytes == 0
    assert not stages[0].tied_gradients
    matrices = 4 * (2 * 2 * 2 * WIDTH + WORDS)
    assert trained.gradient_bytes == trained.optimizer_bytes == matrices
    assert trained.param_bytes == matrices + 4 * 2 * (WIDTH * WIDTH + WIDTH) + 4 * WORDS * WIDTH


def test_a_stage_behind_frozen_layers_alone_has_its_whole_backward_in_w(profile: ModelProfile) -> None:
    plan = plan_of(profile, 4, is_split=True)
    behind = build_stages(plan.stages, {"cpu": profile}, plan.cluster, 2)[1].costs[0]
    assert (behind.input_grad_ns, behind.gradient_stash_bytes) == (0, 0)
    assert behind.weight_grad_ns == behind.backward_ns > 0
    first, sending = (
        stage.costs[0] for stage in build_stages(plan_of(profile, 6).stages, {"cpu": profile}, plan.cluster, 2)
    )
    assert (first.input_grad_ns, first.weight_grad_ns) == (0, first.backward_ns)
    assert sending.input_grad_ns > 0


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("cut", "is_split"), [(2, False), (4, False), (4, True), (6, False), (6, True), (9, False)])
def test_a_run_holds_what_is_predicted_and_trains_as_the_whole_model(
    profile: ModelProfile, cut: int, is_split: bool
) -> None:
    torch.manual_seed(0)
    whole = Tuned().double()
    plan = plan_of(profile, cut, is_split=is_split)
    part = copy.deepcopy(whole)
    pipeline = Pipeline(part, plan, loss=loss, inputs=[words(1)], optimizer=sgd(0.1))
    optimizer = torch.optim.SGD([p for p in whole.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    for _ in range(2):
        got = pipeline.step(words(6), target=words(6).flip(0))
        optimizer.zero_grad()
        want = loss(whole(words(6)), words(6).flip(0))
        want.backward()
        optimizer.step()
        assert got == pytest.approx(want.item(), abs=1e-12)
    for name, parameter in pipeline.named_parameters().items():
        torch.testing.assert_close(parameter, whole.get_parameter(name), atol=1e-12, rtol=0)
        assert (parameter.grad is None) == (not parameter.requires_grad)
    stages = build_stages(plan.stages, {"cpu": profile}, plan.cluster, 2)
    (predicted,), measured = peak_memory(plan.table, stages), pipeline.timeline().memory[0]
    copied = 4 * WORDS * WIDTH  # both stages are in this process, which holds tied weights once
    assert 2 * (predicted.params - copied) == measured.params
    assert 2 * predicted.gradients == measured.gradients
    assert 2 * predicted.optimizer == measured.optimizer
