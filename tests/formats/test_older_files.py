"""Files as an earlier version wrote them: read with all that they say, written again as they were."""

from pathlib import Path

import pytest

from bapipe.formats import codec
from bapipe.formats.cluster import Cluster
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile

FOLDER = Path(__file__).parent / "written"
"""A model of four layers, two groups of two devices, and the plan for them of fewest devices in which a stage
recomputes one of its layers. To be added to, never written anew: what these files say is what users' files say."""

DIGEST = "77b33803de0312ac1520ba1c420bac7bfe339dce34ddbe9e38e947d448a48d91"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.name)
def test_a_file_is_written_as_it_was_read(path: Path) -> None:
    """Older versions refuse fields that they do not know: a new one is written only where it is set."""
    assert codec.encode(codec.decode(path.read_bytes())) == path.read_bytes()


def test_an_older_plan_keeps_its_prediction_certificate_and_alternatives() -> None:
    plan = codec.read(FOLDER / "plan.json", Plan)
    assert plan.is_judged
    assert plan.prediction.step_ns == 58_003_110
    assert plan.certificate.proven_optimal
    assert plan.digest == plan.certificate.digest == DIGEST
    assert [other.name for other in plan.alternatives] == ["data-parallel", "equal-layers", "one-device"]
    assert [stage.recomputed for stage in plan.stages] == [("l0",), ()]


def test_an_older_plan_is_of_the_cluster_and_the_profile_that_it_was_made_from() -> None:
    plan = codec.read(FOLDER / "plan.json", Plan)
    assert plan.cluster == codec.read(FOLDER / "cluster.json", Cluster)
    assert plan.profiles == {"h200x2": codec.fingerprint(codec.read(FOLDER / "profile.json", ModelProfile))}
