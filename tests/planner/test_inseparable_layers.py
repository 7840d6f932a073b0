"""Layers that share parameters of unknown size stay in one stage: certificates and errors say so."""

import pytest
from msgspec.structs import replace

from bapipe.errors import ConstraintsUnmet
from bapipe.formats.profile import ModelProfile
from bapipe.planner.plan import plan
from tests.builders import chain, devices

WORDS = "layers that share parameters of unknown size, or a buffer that training may change, and all between them"


def tied(shared_bytes: int) -> ModelProfile:
    """Five layers, of which the first and the last one share so many bytes, 0 if the profile does not say how many."""
    profile = chain([1] * 5, param_bytes=8)
    first, *others, last = profile.layers
    first, last = replace(first, shares=("l4",)), replace(last, shares=("l0",), shared_bytes=shared_bytes)
    return replace(profile, layers=(first, *others, last))


def test_layers_that_share_a_known_size_are_parted() -> None:
    found = plan(tied(8), devices(2), minibatch_size=8, replicas=False)
    assert len(found.stages) == 2
    assert "every cut of 5 layers, in the profile's order, into 1 to 2 stages" in found.certificate.space


def test_certificates_say_that_layers_that_share_an_unknown_size_are_not() -> None:
    found = plan(tied(0), devices(2), minibatch_size=8, replicas=False)
    assert len(found.stages) == 1
    assert (
        f"every cut of 5 layers, in the profile's order, with {WORDS}, in one stage, into 1" in found.certificate.space
    )


def test_the_error_of_an_impossible_number_of_stages_says_why() -> None:
    message = f"^2 stages asked for; 2 devices, 5 layers and 1f1b allow 1; {WORDS}, stay in one stage$"
    with pytest.raises(ConstraintsUnmet, match=message):
        plan(tied(0), devices(2), minibatch_size=8, num_stages=2, schedules=["1f1b"])
