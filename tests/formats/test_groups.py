"""Groups in files: what cluster/1 and profile/1 accept of members, and the message for each fault."""

import json
from typing import Any

import pytest

from bapipe.errors import InvalidFile
from bapipe.formats.cluster import Bandwidth, Cluster
from bapipe.formats.codec import decode, decode_as, encode
from bapipe.formats.profile import ModelProfile
from tests.builders import chain, devices

LINK = {"bytes_per_s": 10**9, "latency_ns": 0}


def cluster_of(*groups: dict[str, Any], links: tuple[dict[str, Any], ...] = ()) -> bytes:
    named = [{"host": "h", "kind": "a", "memory_bytes": 1} | group for group in groups]
    tree = {"bapipe": "cluster/1", "devices": named, "intra_host": LINK, "inter_host": LINK, "links": links}
    return json.dumps(tree).encode()


def profile_of(device: dict[str, Any], layer: dict[str, Any], measured: dict[str, Any]) -> bytes:
    tree = json.loads(encode(chain([1, 2], param_bytes=8)))
    tree["device"] |= device
    tree["layers"][1] |= layer
    tree["measurements"][0]["layers"][1] |= measured
    return json.dumps(tree).encode()


GROUP = {"members": 2, "split": "spatial"}


def test_groups_are_read_and_written() -> None:
    text = cluster_of({"name": "g", "members": ["p", "q"]}, {"name": "b"}, links=({"from": "p", "to": "q", **LINK},))
    cluster = decode_as(text, Cluster)
    assert [device.num_members for device in cluster.devices] == [2, 1]
    assert decode(encode(cluster)) == cluster
    assert cluster.member_links(1) == []
    exchange = {"forward_exchange_ns": 5, "backward_exchange_ns": 7}
    profile = decode_as(profile_of(GROUP, {"group_sum_bytes": 8}, exchange), ModelProfile)
    assert (profile.device.num_members, profile.layers[1].group_gradient_bytes) == (2, 8)
    assert profile.measurements[0].layers[1].exchange_ns == 12
    assert decode(encode(profile)) == profile


def test_files_without_groups_have_no_new_field() -> None:
    for text in (encode(devices(2)), encode(chain([1]))):
        assert not any(word in text for word in (b"members", b"split", b"group", b"exchange"))


def test_members_have_the_links_of_their_host_or_their_own() -> None:
    members = ["p", "q", "r"]
    slow = Bandwidth(bytes_per_s=5, latency_ns=1)
    own = {"from": "q", "to": "p", "bytes_per_s": 5, "latency_ns": 1}
    plain = decode_as(cluster_of({"name": "g", "members": members}), Cluster)
    assert plain.member_links(0) == [plain.intra_host]
    listed = decode_as(cluster_of({"name": "g", "members": members}, links=(own,)), Cluster)
    assert set(listed.member_links(0)) == {plain.intra_host, slow}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            cluster_of({"name": "g", "members": ["p"]}),
            "the group 'g' has 1 members; want two or more, or no `members` at $.devices[0].members",
        ),
        (
            cluster_of({"name": "g", "members": ["p", "q"]}, {"name": "h", "members": ["q", "r"]}),
            "'q' is a member of 'g' already at $.devices[1].members",
        ),
        (
            cluster_of({"name": "g", "members": ["p", "b"]}, {"name": "b"}),
            "'b' is a member of 'g' and a device by itself at $.devices[0].members",
        ),
        (
            cluster_of({"name": "g", "members": ["p", "q"]}, {"name": "b"}, links=({"from": "p", "to": "b", **LINK},)),
            "a link from 'p' to 'b': want two devices, or two members of one group; a link between groups is written "
            "with the groups' names at $.links[0]",
        ),
        (profile_of({"members": 2}, {}, {}), "want both `members` and `split`, or neither at $.device"),
        (
            profile_of({"members": 1, "split": "filter"}, {}, {}),
            "a group has two or more members; leave `members` and `split` out at $.device.members",
        ),
        (
            profile_of({}, {"group_sum_bytes": 1}, {}),
            "the profile is not of a group: its device has no `members` at $.layers[1].group_sum_bytes",
        ),
        (profile_of(GROUP, {"group_sum_bytes": 9}, {}), "9 is more than the bytes of the gradients"),
        (profile_of(GROUP, {}, {"forward_exchange_ns": 2_000_001}), "2000001 is more than the 2000000 ns that it is"),
        (profile_of({}, {}, {"backward_exchange_ns": 0}), "the profile is not of a group: its device has no `members`"),
    ],
)
def test_faults_are_named(text: bytes, message: str) -> None:
    with pytest.raises(InvalidFile) as error:
        decode(text)
    assert message.partition(" at $")[0] in str(error.value)
    if " at $" in message:
        assert message.partition(" at ")[2] in str(error.value)
