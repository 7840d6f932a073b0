"""What the options of `bapipe run` on the command line come to: one `TrainConfig`, and the names of those given."""

from collections.abc import Collection

import pytest

from bapipe.cli.lazy_group import COMMANDS, LazyCommands
from bapipe.training.train_config import TrainConfig


def parsed(monkeypatch: pytest.MonkeyPatch, *options: str) -> tuple[TrainConfig, Collection[str]]:
    found: list[tuple[TrainConfig, Collection[str]]] = []

    def train(plan: None, config: TrainConfig, given: Collection[str], profiles: None) -> tuple[None, None]:
        found.append((config, given))
        return None, None

    monkeypatch.setattr("bapipe.cli.run.read_or_make_plan", lambda *_: None)
    monkeypatch.setattr("bapipe.cli.run.train_with_bar", train)
    monkeypatch.setattr("bapipe.cli.run.is_first_rank", lambda: False)
    LazyCommands(COMMANDS)["run"](["plan.json", *options], standalone_mode=False)
    return found[0]


def test_options_that_are_left_out_are_the_defaults_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    config, given = parsed(monkeypatch)
    assert config == TrainConfig()
    assert set(given) == {"trust_factory"}  # a run that resumes never takes this one over from a checkpoint


def test_an_option_that_is_set_to_its_default_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    config, given = parsed(monkeypatch, "--lr-schedule", "constant", "--eval-every", "5", "--without", "cpu1",
                           "--replan", "--checkpoint", "kept")  # fmt: skip
    assert (config.learning_rate_schedule, config.evaluate_every, config.without) == ("constant", 5, ("cpu1",))
    names = {"learning_rate_schedule", "evaluate_every", "without", "replan", "checkpoint"}
    assert set(given) == {"trust_factory", *names}
