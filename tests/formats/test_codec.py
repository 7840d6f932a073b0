"""Decoding of files: accepted ones, and the complete message for each refused one."""

import errno
import json
import os
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from bapipe.errors import BapipeError, InvalidFile
from bapipe.formats.cluster import Cluster
from bapipe.formats.codec import KINDS, decode, decode_as, encode, read, read_any, write
from bapipe.formats.files import check_writable, write_bytes
from bapipe.formats.json_schema import schema
from bapipe.formats.plan import Plan, with_certificate
from bapipe.formats.profile import ModelProfile
from bapipe.planner.inputs.options import PlanOptions
from bapipe.schedules.table import Action, parse_actions
from tests import ROOT
from tests.builders import devices
from tests.random_profiles import random_profile
from tests.step_time import plan_step_time
from tests.strategies import clusters, examples, profiles


@pytest.fixture(scope="module")
def profile() -> ModelProfile:
    return random_profile(Random(1), 4)


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return devices(2, memory_bytes=10**6, latency_ns=10)


@pytest.fixture(scope="module")
def plan(profile: ModelProfile, cluster: Cluster) -> Plan:
    return plan_step_time({"a": profile}, cluster, PlanOptions(minibatch_size=4, num_stages=2))


def test_a_plan_whose_order_is_not_that_of_its_schedule_is_told(
    plan: Plan, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The orders are written by hand: two stages, three micro-batches of which each device runs 1F1B, or GPipe."""
    one_f_one_b = "0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"
    gpipe = "0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"
    told = []
    for schedule, orders in (("1f1b", one_f_one_b), ("1f1b", gpipe), ("gpipe", gpipe), ("search", gpipe)):
        sizes = {"minibatch_size": 3, "microbatch_size": 1, "num_microbatches": 3}
        made = json.loads(encode(plan)) | sizes | {"schedule": schedule, "order": [order.split() for order in orders]}
        for name in ("prediction", "certificate", "alternatives"):
            made.pop(name, None)
        (tmp_path / "plan.json").write_text(json.dumps(made))
        for read_it in (read_any, partial(read, want=Plan)):
            caplog.clear()
            found = read_it(tmp_path / "plan.json")
            assert isinstance(found, Plan)
            assert [list(actions) for actions in found.order] == made["order"]
            told.append("its `order` is not that of the schedule '1f1b'" in caplog.text)
    assert told == [False, False, True, True, False, False, False, False]


@pytest.mark.parametrize("schedule", ["zb-v", "dualpipe-v", "interleaved-1f1b"])
def test_a_plan_whose_schedule_cannot_have_its_stages_is_told(
    plan: Plan, schedule: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two stages on two devices, which these schedules have on one device."""
    made = json.loads(encode(plan)) | {"schedule": schedule}
    (tmp_path / "plan.json").write_text(json.dumps(made))
    assert list(read(tmp_path / "plan.json", Plan).order) == list(plan.order)
    assert f"its `order` is not that of the schedule '{schedule}'" in caplog.text


def test_decode_reverses_encode(profile: ModelProfile, cluster: Cluster, plan: Plan) -> None:
    for value in (profile, cluster, plan):
        assert decode(encode(value)) == value
        assert encode(decode(encode(value))) == encode(value)


@examples(50)
@given(st.one_of(clusters(3), profiles(6, splits_badly=True, shares=True)))
def test_decode_reverses_encode_of_drawn_values(value: Cluster | ModelProfile) -> None:
    assert decode(encode(value)) == value


def test_the_header_comes_first(profile: ModelProfile) -> None:
    assert encode(profile).startswith(b'{\n "bapipe": "profile/1",')


def damaged(value: Any, path: tuple[Any, ...], new: Any) -> bytes:
    """The file with the value at `path` replaced, or removed if `new` is `...`"""
    tree = json.loads(encode(value))
    at = tree
    for key in path[:-1]:
        at = at[key]
    if new is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = new
    return json.dumps(tree).encode()


@pytest.mark.parametrize(
    ("path", "new", "message"),
    [
        (("bapipe",), "profile/2", "'profile/2' is of a newer version of bapipe: this one reads profile/1; update bapipe - at `$.bapipe`"),
        (("bapipe",), "profile/0", "unknown file kind 'profile/0'; want one of profile/1, cluster/1, plan/1 - at `$.bapipe`"),
        (("bapipe",), "table/2", "unknown file kind 'table/2'; want one of profile/1, cluster/1, plan/1 - at `$.bapipe`"),
        (("bapipe",), ..., "Object missing required field 'bapipe' - at `$`"),
        (("layers", 3, "param_bytes"), -1, "Expected `int` >= 0 - at `$.layers[3].param_bytes`"),
        (("layers", 3, "param_bytes"), "x", "Expected `int`, got `str` - at `$.layers[3].param_bytes`"),
        (("layers", 3, "param_bytes"), 1.5, "want a whole number, written without a point and an exponent - at `$.layers[3].param_bytes`"),
        (("layers", 3, "param_bytes"), True, "Expected `int`, got `bool` - at `$.layers[3].param_bytes`"),
        (("layers", 3, "param_bytes"), 2**63, "Expected `int` <= 9223372036854775807 - at `$.layers[3].param_bytes`"),
        (("layers", 3, "color"), "red", "Object contains unknown field 'color' - at `$.layers[3]`"),
        (("layers", 3, "name"), ..., "Object missing required field 'name' - at `$.layers[3]`"),
        (("layers", 3, "name"), "l1", "a second layer is named 'l1'; names must be unique - at `$.layers[3].name`"),
        (("layers", 3, "outputs"), ["t1"], "tensor 't1' is made twice - at `$.layers[3].outputs`"),
        (
            ("layers", 1, "inputs"),
            ["t3"],
            "tensor 't3' is used before the layer that makes it; layers must be in topological order, without cycles"
            " - at `$.layers[1].inputs`",
        ),
        (("layers", 1, "no_gradient"), ["t3"], "'t3' is not an output of the layer - at `$.layers[1].no_gradient`"),
        (("layers", 1, "shares"), ["zz"], "'zz' is not a layer of the profile - at `$.layers[1].shares`"),
        (("layers",), [], "a profile needs at least one layer - at `$.layers`"),
        (("measurements",), [], "a profile needs at least one measured micro-batch size - at `$.measurements`"),
        (("measurements", 1, "microbatch_size"), 1, "micro-batch size 1 is measured twice - at `$.measurements[1].microbatch_size`"),
        (("measurements", 1, "microbatch_size"), 0, "Expected `int` >= 1 - at `$.measurements[1].microbatch_size`"),
        (
            ("measurements", 0, "layers", 2, "output_bytes"),
            [],
            "0 sizes for the 1 outputs of 'l2' - at `$.measurements[0].layers[2].output_bytes`",
        ),
        (("measurements", 0, "layers"), [], "0 layers measured, want 4 - at `$.measurements[0].layers`"),
    ],
)  # fmt: skip
def test_the_error_of_a_damaged_profile_has_its_path(profile: ModelProfile, path: Any, new: Any, message: str) -> None:
    with pytest.raises(InvalidFile) as caught:
        decode(damaged(profile, path, new))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("path", "new", "message"),
    [
        (("devices",), [], "a cluster needs at least one device - at `$.devices`"),
        (("devices", 1, "name"), "d0", "a second device is named 'd0' - at `$.devices[1].name`"),
        (("devices", 1, "speed"), 0, "Expected `float` > 0.0 - at `$.devices[1].speed`"),
        (("intra_host", "bytes_per_s"), 0, "Expected `int` >= 1 - at `$.intra_host.bytes_per_s`"),
        (
            ("links",),
            [{"from": "d0", "to": "d7", "bytes_per_s": 1, "latency_ns": 0}],
            "'d7' is not a device of the cluster (d0, d1) - at `$.links[0]`",
        ),
    ],
)
def test_the_error_of_a_damaged_cluster_has_its_path(cluster: Cluster, path: Any, new: Any, message: str) -> None:
    with pytest.raises(InvalidFile) as caught:
        decode(damaged(cluster, path, new))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("path", "new", "message"),
    [
        (("num_microbatches",), 3, "are not a mini-batch of 4 - at `$.minibatch_size`"),
        (("stages", 1, "layers"), ["l0"], "layer 'l0' is in two places - at `$.stages[1].layers`"),
        (("stages", 1, "devices"), ["d7"], "'d7' is not a device of the plan's cluster - at `$.stages[1].devices`"),
        (("stages", 1, "devices"), [], "a stage needs at least one device - at `$.stages[1].devices`"),
        (("order", 1, 0), "1X0", "'1X0' is no action; want stage, one of F B I W, micro-batch, such as '2F0' - at `$.order[1][0]`"),
        (("order",), [[]], "1 orders for 2 devices - at `$.order`"),
        (("cluster", "devices", 1, "name"), "d0", "a second device is named 'd0' - at `$.cluster.devices[1].name`"),
        (("factory",), ..., "Object missing required field 'factory' - at `$`"),
        (("prediction", "ranks", 0, "device"), "d7", "these are not the devices of the plan's cluster, each once and in their order - at `$.prediction.ranks`"),
        (("prediction", "ranks", 1), ..., "these are not the devices of the plan's cluster, each once and in their order - at `$.prediction.ranks`"),
    ],
)  # fmt: skip
def test_the_error_of_a_damaged_plan_has_its_path(plan: Plan, path: Any, new: Any, message: str) -> None:
    with pytest.raises(InvalidFile) as caught:
        decode(damaged(plan, path, new))
    assert str(caught.value).endswith(message)


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"null", b"\xff\xfe", b'{"bapipe": "plan/1"', b"[" * 100_000])
def test_files_of_other_formats_are_refused(text: bytes) -> None:
    with pytest.raises(InvalidFile):
        decode(text)


def refusal(text: bytes) -> InvalidFile | None:
    try:
        decode(text)
    except InvalidFile as error:
        return error
    return None


def test_every_damage_gives_a_path(profile: ModelProfile, cluster: Cluster, plan: Plan) -> None:
    """Removing or replacing any one value either still decodes or is an InvalidFile with a path."""
    random = Random(0)

    def paths(tree: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
        return [p for key, value in pairs for p in ((*at, key), *paths(value, (*at, key)))]

    refused = 0
    for value in (profile, cluster, plan):
        for path in paths(json.loads(encode(value))):
            values: list[Any] = [..., None, -1, "x", 1e9, [], {}, True, [None], 10**30]
            for new in random.sample(values, 4):
                error = refusal(damaged(value, path, new))
                if error is not None:
                    refused += 1
                    assert error.where.startswith("$")
                    assert str(error).endswith(f" - at `{error.where}`")
    assert refused > 1000


@pytest.mark.parametrize("wanted", [ModelProfile, Cluster, Plan])
@pytest.mark.parametrize("given", ["profile/1", "cluster/1", "plan/1", "trace"])
def test_a_file_of_another_kind_is_named_with_how_to_make_the_one_that_is_wanted(
    tmp_path: Path, given: str, wanted: type[Any]
) -> None:
    if KINDS.get(given) is wanted:
        return
    file = tmp_path / "f.json"
    file.write_text('{"traceEvents": []}' if given == "trace" else json.dumps({"bapipe": given}))
    with pytest.raises(InvalidFile) as caught:
        read(file, wanted)
    kind = next(name for name, one in KINDS.items() if one is wanted)
    described = "a trace" if given == "trace" else f"a {given[:-2]} ({given})"
    assert f"{file}: this is {described}, and a {kind[:-2]} ({kind}) is wanted: make one with `bapipe " in str(
        caught.value
    )


def test_a_trace_is_shown_with_its_plan(tmp_path: Path) -> None:
    file = tmp_path / "f.json"
    file.write_text('{"traceEvents": []}')
    with pytest.raises(InvalidFile, match="this is a trace: name its plan, and this file with `trace`"):
        read_any(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BapipeError, match=r"none\.json: no such file$"):
        read(tmp_path / "none.json", Plan)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, cluster: Cluster) -> None:
    path = tmp_path / "folder.json"
    path.mkdir()
    with pytest.raises(BapipeError, match="cannot be written"):
        write(path, cluster)
    assert os.listdir(tmp_path) == ["folder.json"]
    with pytest.raises(BapipeError, match="cannot be written: No such file or directory"):
        write(tmp_path / "missing" / "c.json", cluster)


def test_a_file_is_on_the_disk_before_it_takes_the_place_of_the_old_one(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    real = os.replace

    def replaced(source: Any, target: Any) -> None:
        calls.append("replace")
        real(source, target)

    monkeypatch.setattr(os, "fsync", lambda handle: calls.append("sync"))
    monkeypatch.setattr(os, "replace", replaced)
    write(tmp_path / "cluster.json", cluster)
    assert calls == ["sync", "replace"]


def test_what_could_not_be_read_again_is_not_written(tmp_path: Path, profile: ModelProfile) -> None:
    path = tmp_path / "p.json"
    write(path, profile)
    written = path.read_bytes()
    device = replace(profile.device, memory_bytes=1.5)
    unreadable = f"{path}: not written, as it could not be read again: "
    for value, message in (
        (
            replace(profile, device=device),
            f"{unreadable}want a whole number, written without a point and an exponent - at `$.device.memory_bytes`",
        ),
        (replace(profile, environment={"note": "," * 2**25}), f"{unreadable}33,5"),
        ({"a": 1}, f"{path}: not written: dict is no ModelProfile, Cluster or Plan"),
    ):
        with pytest.raises(BapipeError) as caught:
            write(path, value)  # type: ignore[arg-type]
        assert str(caught.value).startswith(message)
        assert path.read_bytes() == written


def test_side_by_side_needs_transfers_that_overlap(cluster: Cluster) -> None:
    tree = json.loads(encode(cluster))
    tree["devices"][0] |= {"overlaps_transfers": False, "side_by_side": True}
    with pytest.raises(InvalidFile) as caught:
        decode_as(json.dumps(tree).encode(), Cluster)
    assert str(caught.value) == (
        f"'{tree['devices'][0]['name']}' runs forward and backward side by side and does not overlap transfers; set "
        "overlaps_transfers to true, or leave side_by_side out - at `$.devices[0].side_by_side`"
    )


def test_optional_keys_may_be_left_out(cluster: Cluster) -> None:
    tree = json.loads(encode(cluster))
    for device in tree["devices"]:
        del device["speed"], device["overlaps_transfers"], device["side_by_side"]
    del tree["links"]
    assert decode_as(json.dumps(tree).encode(), Cluster) == cluster


@pytest.mark.parametrize("kind", KINDS)
def test_the_packaged_schema_matches_the_types(kind: str) -> None:
    path = ROOT / "bapipe" / "formats" / "schemas" / f"{kind.replace('/', '-')}.json"
    assert path.read_bytes() == schema(kind), "write the schemas again: python -m bapipe.formats.schemas"


@pytest.mark.parametrize("kind", KINDS)
def test_schemas_describe_properties_without_python_docstrings(kind: str) -> None:
    tree = json.loads(schema(kind))
    assert not any(word in schema(kind).decode() for word in ("Raises:", "Attributes:", "\\n"))
    described = [
        (name, title)
        for title, definition in tree["$defs"].items()
        for name, entry in definition["properties"].items()
        if "description" in entry
    ]
    assert len(described) > 5


def test_the_order_of_a_plan_is_parsed_once(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training asks for the table in every step; parsing 64 ranks of 256 micro-batches takes 50 ms."""
    parsed: list[str] = []

    def counting(texts: tuple[str, ...]) -> tuple[Action, ...] | None:
        parsed.extend(texts)
        return parse_actions(texts)

    monkeypatch.setattr("bapipe.formats.plan.parse_actions", counting)
    again = decode_as(encode(plan), Plan)
    tables = {id(again.table) for _ in range(3)}
    assert (len(parsed), len(tables)) == (sum(map(len, plan.order)), 1)
    assert again == plan
    assert encode(again) == encode(plan)
    assert again.table == plan.table
    certified = with_certificate(again, replace(again.certificate, space="another"))
    assert certified == replace(again, certificate=replace(again.certificate, space="another", digest=again.digest))
    assert certified.table is again.table
    assert again.certificate.space == plan.certificate.space


def test_an_order_of_absurdly_many_actions_is_not_made(plan: Plan) -> None:
    tree = json.loads(encode(plan))
    del tree["order"]
    tree |= {"num_microbatches": 10**15, "minibatch_size": 10**15 * plan.microbatch_size}
    with pytest.raises(InvalidFile) as caught:
        decode(json.dumps(tree).encode())
    assert str(caught.value) == (
        "1000000000000000 micro-batches on 2 stages: want at most 131,072 forwards in a step, or the `order` - at "
        "`$.num_microbatches`"
    )


def test_a_device_or_a_pipe_is_written_to_and_stays_one(tmp_path: Path) -> None:
    pipe, null, full = (tmp_path / name for name in ("pipe", "null", "full"))
    os.mkfifo(pipe)
    null.symlink_to("/dev/null")
    full.symlink_to("/dev/full")
    own = tmp_path / "own"
    with own.open("wb") as opened:
        (tmp_path / "stdout").symlink_to(f"/proc/self/fd/{opened.fileno()}")
        for path in (null, tmp_path / "stdout"):
            check_writable(path)
            write_bytes(path, b"text")
            assert path.is_symlink()
        opened.write(b"more")
    assert own.read_bytes() == b"textmore"
    with pytest.raises(BapipeError, match=r"^.*full: cannot be written: No space left on device"):
        write_bytes(full, b"text")
    with pytest.raises(BapipeError, match=r"^.*pipe: cannot be written: No such device or address"):  # nobody reads it
        write_bytes(pipe, b"text")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_bytes(pipe, b"text")
    assert os.read(reader, 100) == b"text"
    os.close(reader)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "null", "own", "pipe", "stdout"]


def test_a_link_is_written_through_and_stays_one(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    own, new = tmp_path / "folder" / "own", tmp_path / "folder" / "new"
    own.write_bytes(b"old")
    for link, target in (("to_own", own), ("to_new", new)):
        (tmp_path / link).symlink_to(target)
        check_writable(tmp_path / link)
        write_bytes(tmp_path / link, b"text")
        assert (tmp_path / link).is_symlink()
        assert target.read_bytes() == b"text"
    (tmp_path / "to_nowhere").symlink_to(tmp_path / "none" / "file")
    with pytest.raises(BapipeError, match=r"to_nowhere: cannot be written: no folder .*none"):
        check_writable(tmp_path / "to_nowhere")
    (tmp_path / "round").symlink_to(tmp_path / "round")
    for refusing in (check_writable, partial(write_bytes, text=b"text")):
        with pytest.raises(BapipeError, match="round: cannot be written: Too many levels of symbolic links"):
            refusing(tmp_path / "round")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "round", "to_new", "to_nowhere", "to_own"]
    assert sorted(path.name for path in own.parent.iterdir()) == ["new", "own"]


def test_a_name_that_leaves_no_room_for_an_unfinished_file_is_refused_before_the_work(tmp_path: Path) -> None:
    check_writable(tmp_path / ("x" * 200))
    with pytest.raises(BapipeError, match=r"/x{250}: cannot be written: File name too long$"):
        check_writable(tmp_path / ("x" * 250))
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_another_user_where_only_owners_replace_files_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As root's /tmp/profile.json is to others, whatever its mode."""
    path = tmp_path / "profile.json"
    path.write_bytes(b"old")
    path.chmod(0o666)
    tmp_path.chmod(0o1777)
    check_writable(path)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    check_writable(tmp_path / "new.json")
    with pytest.raises(BapipeError) as caught:
        check_writable(path)
    assert str(caught.value) == (
        f"{path}: cannot be written: it is another user's, and in the folder {tmp_path} only the owner of a file may "
        "replace it: name another file"
    )
    tmp_path.chmod(0o777)
    check_writable(path)


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444])
def test_a_file_that_is_replaced_keeps_its_mode(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(mode)
    (tmp_path / "link").symlink_to(path)
    for name in (path, tmp_path / "link"):
        write_bytes(name, b"text")
        assert path.stat().st_mode & 0o777 == mode
    os.umask(mask := os.umask(0))
    write_bytes(tmp_path / "new", b"text")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o666 & ~mask


def test_a_file_that_cannot_keep_its_group_is_not_for_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, groups = tmp_path / "file", list[int]()
    path.write_bytes(b"old")
    path.chmod(0o664)
    monkeypatch.setattr(os, "fchown", lambda handle, owner, group: groups.append(group))
    write_bytes(path, b"text")
    assert (groups, path.stat().st_mode & 0o777) == ([path.stat().st_gid], 0o664)

    def refuse(handle: int, owner: int, group: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "fchown", refuse)
    write_bytes(path, b"text")
    assert path.stat().st_mode & 0o777 == 0o604


def test_another_type_is_no_kind_of_file(tmp_path: Path) -> None:
    with pytest.raises(BapipeError, match=r"^<class 'dict'> is no kind of file: want ModelProfile, Cluster or Plan$"):
        read(tmp_path / "plan.json", dict)  # type: ignore[type-var]


def test_a_value_in_place_of_the_path_is_refused_in_words(tmp_path: Path) -> None:
    profile = random_profile(Random(0), 2)
    with pytest.raises(BapipeError) as refused:
        write(profile, tmp_path / "profile.json")  # type: ignore[arg-type]
    assert str(refused.value) == (
        "the path to write to is of type ModelProfile: want the path first, then a ModelProfile, Cluster or Plan, as "
        "in `bapipe.write(path, plan)`"
    )
    assert not list(tmp_path.iterdir())
