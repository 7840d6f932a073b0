"""What forwards keep outside of their modules is found and put back: in closures, defaults, globals and classes."""

from collections.abc import Callable
from functools import wraps

import pytest
import torch
from torch import Tensor, nn

from bapipe.errors import InvalidModel
from bapipe.module_state.code_state import CountedCode, states_of_forwards
from bapipe.module_state.python_state import state_restored
from bapipe.tracing.layers import trace

NUMBERS, num_calls = {"calls": 0}, 0
X = torch.ones(2, 3)


def counting_closure() -> Callable[[], int]:
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    return count


def count_by_default(seen: list[int] = []) -> int:  # noqa: B006
    seen.append(1)
    return len(seen)


def count_in_dictionary() -> int:
    NUMBERS["calls"] = NUMBERS.get("calls", 0) + 1
    return NUMBERS["calls"]


def count_in_global() -> int:
    global num_calls
    num_calls += 1
    return num_calls


class Kept:
    def __init__(self) -> None:
        self.calls_1 = 0


KEPT = Kept()


def count_by_a_computed_name(number: int = 1) -> int:
    setattr(KEPT, f"calls_{number}", getattr(KEPT, f"calls_{number}") + 1)
    return int(getattr(KEPT, f"calls_{number}"))


def count_in_entries_of_an_object(number: int = 1) -> int:
    vars(KEPT)[f"calls_{number}"] += 1
    return int(getattr(KEPT, f"calls_{number}"))


class InClass:
    seen: list[int] = []  # noqa: RUF012

    def __call__(self) -> int:
        self.seen.append(1)
        return len(self.seen)


class Scaling(nn.Module):
    """Multiplies by how often it was called."""

    def __init__(self, count: Callable[[], int]) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        return x * self.count()


class Around(Scaling):
    """Does so between two layers."""

    def __init__(self, count: Callable[[], int]) -> None:
        super().__init__(count)
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x) * self.count())
        return y


class Noting(Around):
    """Counts its calls, and does nothing with the number yet."""

    def forward(self, x: Tensor) -> Tensor:
        self.count()
        y: Tensor = self.b(self.a(x))
        return y


KINDS = {
    "closure": (counting_closure, "the variable 'calls' around counting_closure.<locals>.count"),
    "default": (lambda: count_by_default, "the default of the argument 'seen' of count_by_default"),
    "dictionary": (lambda: count_in_dictionary, "entry 'calls' of the global 'NUMBERS'"),
    "global": (lambda: count_in_global, "the global 'num_calls'"),
}


COMPUTED = [lambda: count_by_a_computed_name, lambda: count_in_entries_of_an_object]


@pytest.mark.parametrize("make", [*(make for make, _ in KINDS.values()), InClass, *COMPUTED])
def test_what_forwards_keep_outside_of_modules_is_put_back(make: Callable[[], Callable[[], int]]) -> None:
    module = nn.Sequential(Scaling(make()))
    for _ in range(2):
        with state_restored(module):
            assert module(X).sum().item() == 6
            assert module(X).sum().item() == 12
    assert module(X).sum().item() == 6


def counted(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(forward)
    def call(module: "Decorated", x: Tensor) -> Tensor:
        return forward(module, x) * module.count()

    return call


class Decorated(nn.Module):
    def __init__(self, count: Callable[[], int]) -> None:
        super().__init__()
        self.count = count

    @counted
    def forward(self, x: Tensor) -> Tensor:
        return x


def test_what_a_decorator_of_a_forward_calls_is_put_back() -> None:
    module = Decorated(counting_closure())
    with state_restored(module):
        module(X)
    assert module(X).sum().item() == 6


@pytest.fixture(autouse=True)
def _from_zero() -> None:
    global num_calls
    num_calls, NUMBERS["calls"], KEPT.calls_1 = 0, 0, 0
    (count_by_default.__defaults__ or ())[0].clear()
    InClass.seen.clear()


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_that_counts_outside_is_one_layer(kind: str) -> None:
    make, what = KINDS[kind]
    model = trace(nn.Sequential(nn.Linear(3, 3), Around(make())), (X,))
    assert [layer.name for layer in model.layers] == ["0", "1"]
    assert str(model.leaf_reasons["1"]) == f"its forward keeps state from call to call, in {what}"
    assert num_calls == NUMBERS["calls"] == len((count_by_default.__defaults__ or ())[0]) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_whose_own_forward_counts_outside_is_refused(kind: str) -> None:
    make, what = KINDS[kind]
    with pytest.raises(InvalidModel, match=f"keeps state from call to call, in {what}; put this code into a module"):
        trace(Around(make()), (X,))


@pytest.mark.parametrize("make", [counting_closure, lambda: count_in_dictionary, lambda: count_in_global])
def test_numbers_that_the_graph_does_not_have_yet_count_too(make: Callable[[], Callable[[], int]]) -> None:
    model = trace(nn.Sequential(Noting(make()), nn.Linear(3, 3)), (X,))
    assert [layer.name for layer in model.layers] == ["0", "1"]


def test_a_table_that_is_made_once_is_no_state() -> None:
    tables: dict[int, Tensor] = {}

    class WithTable(Around):
        def forward(self, x: Tensor) -> Tensor:
            if 3 not in tables:
                tables[3] = torch.arange(3.0)
            y: Tensor = self.b(self.a(x) + tables[3])
            return y

    model = trace(WithTable(lambda: 1), (X,))
    assert [layer.name for layer in model.layers] == ["a", "b"]
    assert not tables


def test_code_of_installed_packages_and_of_torch_is_not_followed() -> None:
    assert states_of_forwards(nn.TransformerEncoderLayer(4, 1)) == []
    counted = CountedCode(nn.Sequential(nn.Linear(3, 3)))
    counted.count()
    counted.count()
    assert counted.changed(lengths=True) == []
