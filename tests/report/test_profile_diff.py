"""What changed between two profiles."""

from msgspec import UNSET
from msgspec.structs import replace
from rich.console import Console

from bapipe.formats.layer_profile import LayerProfile
from bapipe.formats.measurement import LayerMeasurement, Measurement
from bapipe.formats.profile import DeviceKind, ModelProfile
from bapipe.formats.settings import Settings
from bapipe.report.profile_diff import layer_changes, render_profile_diff


def profile(layers: dict[str, tuple[int, int, int, float | None]], settings: Settings = Settings()) -> ModelProfile:  # noqa: B008
    """Layers by name: F, B, stash, spread."""
    return ModelProfile(
        model="small",
        device=DeviceKind(kind="cpu", name="here", memory_bytes=1),
        dtype=settings.dtype,
        optimizer=settings.optimizer,
        settings=settings,
        layers=tuple(
            LayerProfile(name=name, kind="Linear", inputs=("x",), outputs=(), param_bytes=0, optimizer_state_bytes=0)
            for name in layers
        ),
        measurements=(
            Measurement(
                microbatch_size=4,
                layers=tuple(
                    LayerMeasurement(
                        forward_ns=f,
                        input_grad_ns=b,
                        weight_grad_ns=0,
                        stash_bytes=stash,
                        output_bytes=(),
                        spread=UNSET if spread is None else spread,
                    )
                    for f, b, stash, spread in layers.values()
                ),
            ),
        ),
    )


BEFORE = profile(
    {
        "same": (10**6, 2 * 10**6, 0, 0.01),
        "noisy": (10**6, 2 * 10**6, 0, 0.05),
        "slower": (10**6, 2 * 10**6, 0, 0.01),
        "faster": (10**6, 3 * 10**6, 0, None),
        "fatter": (10**6, 2 * 10**6, 2**20, 0.01),
        "gone": (1, 1, 0, 0.0),
    }
)
AFTER = profile(
    {
        "same": (10**6, 2 * 10**6, 0, 0.01),
        "noisy": (10**6, 2_200_000, 0, 0.05),  # 0.2 ms more, within the spreads of 0.15 + 0.16
        "slower": (10**6, 2_200_000, 0, 0.01),  # beyond the spreads of 0.03 + 0.032
        "faster": (10**6, 2 * 10**6, 0, None),
        "fatter": (10**6, 2 * 10**6, 3 * 2**20, 0.01),
        "new": (1, 1, 0, 0.0),
    },
    settings=Settings(threads=2),
)


def test_changes_beyond_the_spreads_are_significant() -> None:
    changes = layer_changes(BEFORE, AFTER, 4)
    assert [(c.name, c.added_ns, c.is_significant) for c in changes] == [
        ("faster", -(10**6), True),
        ("noisy", 200_000, False),
        ("slower", 200_000, True),
        ("same", 0, False),
        ("fatter", 0, False),
    ]
    assert changes[-1].added_bytes == (2 * 2**20, 0, 0)


def shown(before: ModelProfile, after: ModelProfile) -> str:
    console = Console(width=120)
    with console.capture() as text:
        for part in render_profile_diff(before, after):
            console.print(part, highlight=False)
    return "\n".join(line.rstrip() for line in text.get().splitlines())


def test_changes_are_shown_in_a_table() -> None:
    assert shown(BEFORE, AFTER) == (
        "small on here, then small on here\n"
        "threads: 1, then 2\n"
        "only in the first: gone\n"
        "only in the second: new\n"
        "micro-batches of 4: F + B 16.0 ms, then 15.4 ms (-3.7%); 3 of 5 layers changed\n"
        "changes at 4, the largest first; sizes in MiB\n"
        "layer    F + B ms   then   change   ± %   stash   work   output\n"
        "───────────────────────────────────────────────────────────────\n"
        "faster       4.00   3.00   -25.0%\n"
        "slower       3.00   3.20    +6.7%   2.0\n"
        "fatter       3.00   3.00            2.0   +2.00"
    )


def test_equal_profiles_and_those_without_a_common_size() -> None:
    assert shown(BEFORE, BEFORE).endswith("then 16.0 ms (+0.0%); 0 of 6 layers changed")
    other = replace(BEFORE, measurements=(replace(BEFORE.measurements[0], microbatch_size=8),))
    assert shown(BEFORE, other).endswith("no common micro-batch size: (4,), then (8,)")
