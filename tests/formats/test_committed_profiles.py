"""The profiles in `profiles/` are complete, and their figures are plausible."""

from pathlib import Path

import pytest

from bapipe.formats import codec
from bapipe.formats.profile import ModelProfile
from tests import ROOT

FOLDER = ROOT / "profiles"
FILES = sorted(FOLDER.rglob("*.json"))


def test_the_converted_profiles_are_committed() -> None:
    assert {"v100/vgg16.json", "v100/gnmt8.json", "sailor/opt350-GH-96-4.json"} <= {
        str(path.relative_to(FOLDER)) for path in FILES
    }


@pytest.mark.parametrize(("folder", "holder"), [("v100", "Microsoft Corporation"), ("sailor", "ETH Zurich")])
def test_profiles_of_others_have_their_licence(folder: str, holder: str) -> None:
    """The MIT licence wants its text, with the holder of the copyright, in all copies."""
    text = (FOLDER / folder / "LICENSE").read_text()
    assert text.startswith("MIT License\n")
    assert holder in text.splitlines()[2]
    assert f"]({folder}/LICENSE)" in (FOLDER / "README.md").read_text()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_every_profile_is_complete(path: Path) -> None:
    profile = codec.read(path, ModelProfile)
    for size in profile.microbatch_sizes:
        layers = profile.at(size)
        assert sum(m.forward_ns for m in layers) > 0
        assert sum(m.whole_backward_ns for m in layers) > 0
        if path.parent.name == "cpu":
            assert profile.environment["passes"][str(size)] >= 3
            assert 0.9 < profile.environment["sum_over_whole"][str(size)] < 1.1
