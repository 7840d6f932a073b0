"""The command line as a user meets it: exit codes, one-line errors, files that are whole or not there."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any, get_args

import msgspec
import pytest

from bapipe.cli.flags import with_flags
from bapipe.formats.codec import fingerprint, read, write
from bapipe.formats.plan import Plan
from bapipe.formats.profile import Split
from bapipe.report.formatting import ms
from bapipe.simulator.simulate import simulate
from bapipe.zoo import ZOO
from tests import ROOT
from tests.builders import devices
from tests.cli.forked import Done, run_command
from tests.explorer.page_data import data_of, loads_nothing
from tests.random_profiles import random_profile


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A profile and a cluster of two devices of its kind."""
    write(tmp_path / "profile.json", random_profile(Random(5), 6))
    write(tmp_path / "cluster.json", devices(2, memory_bytes=10**6, latency_ns=5))
    return tmp_path


def bapipe(folder: Path, *arguments: str, **environment: str) -> Done | subprocess.CompletedProcess[str]:
    """Runs the command as on a machine without a GPU: errors say what there is."""
    usual = {"XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "150", "CUDA_VISIBLE_DEVICES": ""}
    own = os.environ | usual | environment
    if not any(name.startswith("PYTHON") for name in environment):  # what Python reads when it starts
        return run_command(arguments, folder, own, timeout_s=120)
    return subprocess.run(
        [sys.executable, "-c", "from bapipe.cli import main; main()", *arguments],
        cwd=folder,
        env=own,
        capture_output=True,
        text=True,
        timeout=120,
    )


def planned(folder: Path, *more: str) -> Plan:
    done = bapipe(folder, "plan", "profile.json", "--cluster", "cluster.json", "--minibatch-size", "8", *more)
    assert done.returncode == 0, done.stderr
    return read(folder / "plan.json", Plan)


def test_show_prints_files_and_differences_as_json(folder: Path) -> None:
    plan = planned(folder, "--stages", "2")
    shown = json.loads(bapipe(folder, "show", "plan.json", "--json").stdout)
    assert msgspec.convert(shown, Plan) == plan
    assert json.loads(bapipe(folder, "show", "profile.json", "--json").stdout)["bapipe"] == "profile/1"
    assert json.loads(bapipe(folder, "show", "plan.json", "plan.json", "--json").stdout) == {
        "changes": ["no difference"]
    }
    refused = bapipe(folder, "show", "profile.json", "profile.json", "--json")
    assert refused.stderr == "error: --json goes with one file or with two plans\n"


def test_plan_writes_the_plan_that_it_prints(folder: Path) -> None:
    plan = planned(folder, "--stages", "2")
    profile = random_profile(Random(5), 6)
    assert plan.certificate.proven_optimal
    assert plan.profiles == {"a": fingerprint(profile)}
    assert len(plan.stages) == 2
    assert {a.name for a in plan.alternatives} == {"one-device", "data-parallel", "equal-layers"}
    assert simulate(plan, {"a": profile}).prediction(8) == plan.prediction


def test_the_same_input_gives_the_same_bytes(folder: Path) -> None:
    planned(folder)
    first = (folder / "plan.json").read_bytes()
    planned(folder)
    assert (folder / "plan.json").read_bytes() == first


def test_compare_lists_the_best_plan_of_each_schedule(folder: Path) -> None:
    where = "profile.json", "--cluster", "cluster.json", "--minibatch-size", "8"
    done = bapipe(folder, "compare", *where, "--schedule", "1f1b,gpipe,zb-v", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert list(found["plans"]) == ["1f1b", "gpipe", "zb-v"]
    assert {other["name"] for other in found["others"]} >= {"one-device", "data-parallel"}
    assert found["failed"] == {}
    for schedule in ("1f1b", "gpipe", "zb-v"):
        alone = planned(folder, "--schedule", schedule)
        assert found["plans"][schedule]["step_ns"] == alone.prediction.step_ns
        assert found["plans"][schedule]["space"] == alone.certificate.space
    shown = bapipe(folder, "compare", *where, "--schedule", "gpipe").stdout
    assert "data-parallel" in shown
    assert "without replicas" not in shown


def test_compare_says_where_it_is_without_replicas_and_under_a_memory_limit(folder: Path) -> None:
    where = "profile.json", "--cluster", "cluster.json", "--minibatch-size", "8", "--schedule", "1f1b"
    alone = planned(folder, "--schedule", "1f1b", "--no-replicas", "--memory-limit", "1GB")
    done = bapipe(folder, "compare", *where, "--no-replicas", "--memory-limit", "1GB", "--json")
    assert json.loads(done.stdout)["plans"]["1f1b"]["step_ns"] == alone.prediction.step_ns
    shown = bapipe(folder, "compare", *where, "--no-replicas", "--memory-limit", "1GB").stdout
    assert "devices, without replicas, with at most 1,000,000,000 bytes on each device\n" in shown


def test_compare_says_whose_gap_a_searched_order_has(folder: Path) -> None:
    where = "profile.json", "--cluster", "cluster.json", "--minibatch-size", "8", "--schedule", "search"
    plan = planned(folder, "--schedule", "search")
    shown = bapipe(folder, "compare", *where).stdout
    is_named = plan.schedule != "search"
    said = f"search: with schedule {plan.schedule}; its gap is that of all plans with named schedules"
    assert (said if is_named else "search: its gap is that of all orders of the actions of its stages") in shown


def test_compare_names_strategies_that_do_not_fit(folder: Path) -> None:
    where = "profile.json", "--cluster", "cluster.json", "--minibatch-size", "8"
    limit = str(planned(folder, "--schedule", "1f1b", "--no-replicas").prediction.ranks[0].peak_bytes)
    done = bapipe(folder, "compare", *where, "--memory-limit", "1")
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1].startswith("error: no plan was found that fits in memory; the closest is ")
    some = json.loads(bapipe(folder, "compare", *where, "--memory-limit", limit, "--json", "--no-recompute").stdout)
    assert some["plans"]
    assert all(plan["peak_bytes"] <= int(limit) for plan in some["plans"].values())


def test_simulate_repeats_the_plan(folder: Path) -> None:
    plan = planned(folder)
    done = bapipe(folder, "simulate", "plan.json", "profile.json", "--json", "--trace", "trace.json")
    assert done.returncode == 0
    assert msgspec.json.decode(done.stdout, type=type(plan.prediction)) == plan.prediction
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    actions = [e for e in events if e["ph"] == "X" and e["name"] in plan.order[0]]
    assert [e["name"] for e in sorted(actions, key=lambda e: e["ts"])] == list(plan.order[0])


def test_edit_prints_what_changes_and_writes_only_where_told(folder: Path) -> None:
    plan = planned(folder, "--stages", "2", "--no-replicas")
    before = (folder / "plan.json").read_bytes()
    done = bapipe(folder, "edit", "plan.json", "--move", "stage 0 -1 layer", "--microbatch-size", "2")
    assert done.returncode == 0, done.stderr
    assert "nothing was written" in done.stderr
    assert (folder / "plan.json").read_bytes() == before
    names = plan.stages[0].layers
    assert f"stage 0: {len(names)} layers '{names[0]}' to '{names[-1]}' -> {len(names) - 1} layers" in done.stdout
    assert "schedule" not in done.stdout.split("over every cut")[0]
    written = bapipe(
        folder, "edit", "plan.json", "--schedule", "zb-h1", "--swap", "d0", "d1", "-o", "mine.json", "--json"
    )
    assert written.returncode == 0, written.stderr
    mine, found = read(folder / "mine.json", Plan), json.loads(written.stdout)
    assert found["before"]["prediction"] == json.loads(msgspec.json.encode(plan.prediction))
    assert found["after"]["prediction"] == json.loads(msgspec.json.encode(mine.prediction))
    assert any(line.startswith("schedule: ") for line in found["changes"])
    simulated = bapipe(folder, "simulate", "mine.json", "profile.json", "--json")
    assert json.loads(simulated.stdout) == json.loads(msgspec.json.encode(mine.prediction))


def test_edit_makes_one_stage_of_all_layers(folder: Path) -> None:
    plan = planned(folder, "--stages", "2", "--no-replicas")
    done = bapipe(folder, "edit", "plan.json", "--no-cuts", "-o", "mine.json")
    assert done.returncode == 0, done.stderr
    (stage,) = read(folder / "mine.json", Plan).stages
    assert stage.layers == plan.stages[0].layers + plan.stages[1].layers
    both = bapipe(folder, "edit", "plan.json", "--no-cuts", "--cut", "l3")
    assert (both.returncode, both.stderr) == (1, "error: --cut l3 and --no-cuts: want one of them\n")


@pytest.mark.parametrize(
    ("option", "value"), [("--schedule", ["foo"]), ("--exact", []), ("--csv", []), ("--microbatch-size", ["2"])]
)
def test_explore_refuses_options_of_tables_for_its_page(folder: Path, option: str, value: list[str]) -> None:
    done = bapipe(folder, "explore", "profile.json", "--cluster", "cluster.json", option, *value)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {option} goes with --vary")


@pytest.mark.parametrize(("option", "value"), [("--port", ["8000"]), ("--no-browser", []), ("--trace", ["t.json"])])
def test_explore_refuses_options_of_its_page_for_tables(folder: Path, option: str, value: list[str]) -> None:
    done = bapipe(folder, "explore", "profile.json", "--vary", "link=1,2", option, *value)
    assert done.returncode == 1
    assert done.stderr == f"error: {option} is for the page, which --vary does not open: leave out one of them\n"


def test_explore_refuses_more_devices_than_its_page_shows(folder: Path) -> None:
    done = bapipe(folder, "explore", "profile.json", "--devices", "300", "--no-browser")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == (
        "error: 300 devices: the page shows at most 256; explore some of them, by --devices or --cluster, or all by "
        "--vary; bapipe show with --html draws a plan for them"
    )


def test_edit_needs_the_profile_of_the_plan(folder: Path) -> None:
    planned(folder)
    elsewhere = {"XDG_CACHE_HOME": str(folder / "empty")}
    done = bapipe(folder, "edit", "plan.json", "--schedule", "gpipe", **elsewhere)
    assert done.returncode == 1
    assert "the profile of kind 'a' that the plan was made from is not in the cache" in done.stderr
    named = bapipe(folder, "edit", "plan.json", "--schedule", "gpipe", "--profile", "profile.json", **elsewhere)
    assert named.returncode == 0, named.stderr


@pytest.mark.parametrize("file", ["profile.json", "plan.json"])
def test_names_are_whole_at_80_columns(folder: Path, file: str) -> None:
    profile = random_profile(Random(5), 6)
    names = {layer.name: f"block.{i}.attention" for i, layer in enumerate(profile.layers)}
    layers = tuple(msgspec.structs.replace(layer, name=names[layer.name]) for layer in profile.layers)
    write(folder / "profile.json", msgspec.structs.replace(profile, layers=layers))
    planned(folder)
    shown = bapipe(folder, "show", file, COLUMNS="80").stdout
    assert "block.0.attention" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_a_terminal_without_shades_shows_the_timeline_in_ascii(folder: Path) -> None:
    planned(folder)
    done = bapipe(folder, "show", "plan.json", PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert ". forward  # backward" in done.stdout


def test_all_schedules_are_searched_at_once(folder: Path) -> None:
    plan = planned(folder, "--schedule", "all")
    assert "interleaved-1f1b" in plan.certificate.space
    assert "fbp-as" not in plan.certificate.space


def test_no_schedule_of_the_searched_space_is_said_not_to_be_searched(folder: Path) -> None:
    where = ("profile.json", "--cluster", "cluster.json", "--minibatch-size", "8", "--time-limit", "1")
    done = bapipe(folder, "plan", *where, "--schedule", "search", "--json")
    assert done.returncode == 0, done.stderr
    searched = read(folder / "plan.json", Plan).certificate.space.partition("; schedules ")[2].partition(";")[0]
    (said,) = [text for text in json.loads(done.stdout)["remarks"] if text.startswith("not searched: ")]
    left_out = said.removeprefix("not searched: ").partition(";")[0]
    assert "zb-v" in left_out.split(", ")
    assert "zb-h1" in searched.split(", ")
    assert not set(left_out.split(", ")) & set(searched.split(", "))


def test_a_memory_limit_has_units(folder: Path) -> None:
    where = "plan", "profile.json", "--cluster", "cluster.json", "--minibatch-size", "8", "-o", "x.json"
    said = [bapipe(folder, *where, "--memory-limit", text).stderr for text in ("1", "1B", "0.001KB")]
    errors = [text.splitlines()[-1] for text in said]  # "planning" may come before it, if that is slow
    assert "no plan fits" in errors[0]
    assert errors[1] == errors[0] == errors[2]
    refused = bapipe(folder, *where, "--memory-limit", "2 GX")
    assert refused.returncode == 2
    assert "'2 GX' is not a size" in refused.stderr
    refused = bapipe(folder, *where, "--memory-limit", "2Gb")
    assert refused.returncode == 2
    assert "'2Gb' may be of bits" in refused.stderr


def test_a_trace_of_another_plan_is_refused(folder: Path) -> None:
    planned(folder, "--stages", "2", "--no-replicas")
    assert bapipe(folder, "simulate", "plan.json", "profile.json", "--trace", "trace.json").returncode == 0
    assert bapipe(folder, "show", "plan.json", "--trace", "trace.json").returncode == 0
    planned(folder, "--stages", "1", "--no-replicas")
    done = bapipe(folder, "show", "plan.json", "--trace", "trace.json")
    assert done.returncode == 1
    assert "is not of this plan" in done.stderr


def test_a_pinned_plan_is_not_overwritten(folder: Path) -> None:
    planned(folder)
    before = (folder / "plan.json").read_bytes()
    done = bapipe(folder, "plan", "profile.json", "--pin", "plan.json")
    assert done.returncode == 1
    assert "plan.json would be overwritten" in done.stderr
    assert (folder / "plan.json").read_bytes() == before


def test_a_plan_in_the_place_of_another_one_keeps_that(folder: Path) -> None:
    planned(folder, "--stages", "2")
    first = (folder / "plan.json").read_bytes()
    command = ("plan", "profile.json", "--cluster", "cluster.json", "--minibatch-size", "8", "--stages", "1", "--json")
    done = bapipe(folder, *command)
    assert (folder / "plan.json~").read_bytes() == first
    assert "plan.json was there already, with another content: it is kept as plan.json~" in done.stderr
    restored = bapipe(folder, "edit", "plan.json~", "--profile", "profile.json", "-o", "plan.json")
    assert "error: plan.json~ would be overwritten by a copy of plan.json, and is an input" in restored.stderr
    documented = (ROOT / "docs" / "json.md").read_text()
    assert [key for key in json.loads(done.stdout) if f"`{key}`" not in documented] == []
    assert "was there already" not in bapipe(folder, *command).stderr


def test_an_imported_profile_is_printed_as_json(folder: Path) -> None:
    (folder / "table.csv").write_text("layer,forward_ms,backward_ms,param_bytes,output_bytes\na,1,2,3,4\nb,1,2,3,4\n")
    done = bapipe(folder, "import", "table.csv", "--batch-size", "4", "-o", "imported.json", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads((folder / "imported.json").read_text())


@pytest.mark.parametrize(
    ("path", "model"), [("graph.txt", "folder"), ("../folder/graph.txt", "folder"), ("a.csv", "a")]
)
def test_an_imported_model_has_the_name_of_its_file(folder: Path, path: str, model: str) -> None:
    where = folder / "folder"
    where.mkdir()
    for name in ("graph.txt", "a.csv"):
        (where / name).write_text("layer,forward_ms,backward_ms,param_bytes,output_bytes\na,1,2,3,4\n")
    done = bapipe(where, "import", path, "--batch-size", "4", "--json")
    assert json.loads(done.stdout)["model"] == model


def test_a_plan_changed_by_hand_is_shown_without_proof(folder: Path) -> None:
    planned(folder, "--stages", "2", "--no-replicas")
    content = json.loads((folder / "plan.json").read_text())
    stages = content["stages"]
    stages[1]["layers"].insert(0, stages[0]["layers"].pop())
    (folder / "hand.json").write_text(json.dumps(content))
    shown = bapipe(folder, "show", "hand.json", "--html", "hand.html")
    assert shown.returncode == 0, shown.stderr
    for text in (shown.stdout, json.dumps(data_of((folder / "hand.html").read_bytes()))):
        assert "changed by hand since it was judged" in text
        assert "proven optimal" not in text
        assert "per step" not in text
    simulated = bapipe(folder, "simulate", "hand.json", "profile.json")
    assert "equal-layers" not in simulated.stdout
    assert "made by hand" in simulated.stdout
    pinned = bapipe(folder, "plan", "profile.json", "--pin", "hand.json", "-o", "pinned.json")
    assert pinned.returncode == 0, pinned.stderr
    assert read(folder / "pinned.json", Plan).stages == read(folder / "hand.json", Plan).stages


def test_a_plan_for_throughput_prints_its_load_and_is_simulated(folder: Path) -> None:
    plan = planned(folder, "--objective", "throughput")
    assert plan.objective == "throughput"
    assert plan.certificate.proven_optimal
    assert plan.certificate.lower_bound_ns == plan.prediction.load_ns
    shown = bapipe(folder, "show", "plan.json")
    assert "once the pipeline is full: " in shown.stdout
    done = bapipe(folder, "simulate", "plan.json", "profile.json", "--json")
    assert json.loads(done.stdout)["step_ns"] == plan.prediction.step_ns


def test_show_draws_the_step_of_a_plan_whose_profile_the_cache_has(folder: Path) -> None:
    plan = planned(folder, "--stages", "2")
    title, step = "order, not to scale", f"(0 to {ms(plan.prediction.step_ns)})"
    shown = bapipe(folder, "show", "plan.json").stdout
    assert (title in shown, step in shown) == (False, True)
    elsewhere = bapipe(folder, "show", "plan.json", XDG_CACHE_HOME=str(folder / "empty")).stdout
    assert (title in elsewhere, step in elsewhere) == (True, False)


def test_a_plan_is_simulated_with_the_profile_in_the_cache(folder: Path) -> None:
    plan = planned(folder, "--stages", "2")
    done = bapipe(folder, "simulate", "plan.json", "--json")
    assert json.loads(done.stdout)["step_ns"] == plan.prediction.step_ns
    elsewhere = bapipe(folder, "simulate", "plan.json", XDG_CACHE_HOME=str(folder / "empty"))
    assert elsewhere.returncode == 1
    assert elsewhere.stderr.endswith("is not in the cache of this machine: name its file behind the plan's\n")


def test_the_front_says_where_its_plans_are(folder: Path) -> None:
    done = bapipe(folder, "plan", "profile.json", "--cluster", "cluster.json", "--minibatch-size", "4", "--pareto")
    text = " ".join(done.stdout.split())
    assert "`bapipe explore` shows such plans, under Front, and saves them" in text
    assert "memory was tried in steps of 30%: --least memory finds the plan that needs least" in text


@pytest.mark.parametrize("command", ["plan", "compare"])
def test_an_unknown_schedule_is_refused_before_a_model_is_measured(folder: Path, command: str) -> None:
    for source in ("vgg16", "profile.json"):
        done = bapipe(folder, command, source, "--devices", "2", "--schedule", "foo")
        assert (done.returncode, done.stderr.split("; ")[0]) == (1, "error: unknown schedule 'foo'")


@pytest.mark.parametrize("file", ["profile.json", "cluster.json", "plan.json"])
def test_show_draws_every_file(folder: Path, file: str) -> None:
    planned(folder, "--stages", "2")
    done = bapipe(folder, "show", file)
    assert done.returncode == 0
    assert done.stderr == ""
    assert {"profile.json": "l5", "cluster.json": "within a host", "plan.json": "equal-layers"}[file] in done.stdout


def test_show_draws_a_profile_as_a_page(folder: Path) -> None:
    done = bapipe(folder, "show", "profile.json", "--html", "shape.html")
    assert done.returncode == 0
    assert done.stdout.endswith("wrote shape.html\n")
    page = (folder / "shape.html").read_bytes()
    assert len(data_of(page)["model"]["layers"]) == 6
    assert loads_nothing(page)


def test_the_version_is_printed(folder: Path) -> None:
    done = bapipe(folder, "--version")
    assert (done.returncode, done.stdout) == (0, f"bapipe {version('bapipe')}\n")


def test_the_package_runs_as_a_module(folder: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "bapipe", "--help"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, bapipe(folder, "--help", COLUMNS="80").stdout)
    assert "Usage: bapipe [OPTIONS] COMMAND" in done.stdout


def test_old_spellings_of_options_still_work(folder: Path) -> None:
    done = bapipe(folder, "profile", "nothing", "--fine", "--whole", "encoder.*", "--neighbours", "1")
    assert done.returncode == 1
    assert "unknown model 'nothing'" in done.stderr
    assert "--neighbours" not in bapipe(folder, "profile", "--help").stdout
    other = bapipe(folder, "compare", "profile.json", "--whole")  # an option of this command's own
    assert "'--whole' requires an argument" in other.stderr


def test_errors_of_the_library_name_the_flag(folder: Path) -> None:
    done = bapipe(folder, "plan", "profile.json", "--cluster", "cluster.json", "--minibatch-size", "7919")
    assert "choose a smaller --minibatch-size" in done.stderr or "change --minibatch-size" in done.stderr
    assert with_flags("name blocks with `leaf_modules`") == "name blocks with --leaf-module"
    assert with_flags("`num_stages` 3 and `$.layers` and `nothing`") == "--stages 3 and `$.layers` and `nothing`"
    assert (
        with_flags("want one of adam in `settings=bapipe.Settings(optimizer=...)`") == "want one of adam in --optimizer"
    )


def test_every_command_has_help(folder: Path) -> None:
    for command in ("profile", "cluster", "plan", "simulate", "show", "run"):
        assert "Usage: " in bapipe(folder, command, "--help").stdout
    shown = " ".join(bapipe(folder, "profile", "--help").stdout.split())
    assert f"One of {', '.join(ZOO)}; a factory of your own, as module.path:function; or hf:CLASS" in shown


def test_help_says_what_devices_and_splits_are(folder: Path) -> None:
    help_of = {
        command: " ".join(bapipe(folder, command, "--help").stdout.split())
        for command in ("plan", "cluster", "edit", "estimate", "compare")
    }
    assert "Number of devices like the profiled one, with an assumed link" in help_of["plan"]
    assert "Number of devices. Default: all of this machine, or with --like one for each host" in help_of["cluster"]
    assert "a network card for each device" in help_of["cluster"]
    assert "dualpipe-v, or all (but fbp-as)" in help_of["plan"]
    assert "--swap DEVICE DEVICE" in help_of["edit"]
    assert [split for split in get_args(Split) if f" {split}: " not in help_of["estimate"]] == []
    assert "sharded data (ZeRO-3, FSDP), and the best plan" in help_of["compare"]


OVERWRITTEN = "would be overwritten, and is an input of this command: name another file to write"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("plan", "none.json"), 1, "none.json: no such file"),
        (("show", "profil.json"), 1, "profil.json: no such file; did you mean 'profile.json'?"),
        (
            ("plan", "vgg17", "--devices", "2"),
            1,
            f"unknown model 'vgg17': want one of {', '.join(ZOO)}, or a factory of your own as module.path:function; "
            "did you mean 'vgg16'?",
        ),
        (
            ("profile", "vgg17"),
            1,
            f"unknown model 'vgg17': want one of {', '.join(ZOO)}, or a factory of your own as module.path:function; "
            "did you mean 'vgg16'?",
        ),
        (("profile", "vgg16", "--microbatch-size", "0"), 1, "'0' is not a list of different positive integers such as 1,2,4,8"),
        (("profile", "vgg16", "--arg", "x"), 1, "--arg x: want KEY=VALUE, such as image_size=64"),
        (
            ("plan", "profile.json", "--cluster", "cluster.json", "--minibatch-size", "7", "--microbatch-size", "2"),
            1,
            "a mini-batch of 7 does not divide into micro-batches of 2",
        ),
        (
            ("plan", "profile.json", "--cluster", "cluster.json", "--minibatch-size", "8", "--microbatch-size", "8"),
            1,
            "micro-batches of 8 are not within those profiled (a: 1, 2, 4): choose another --microbatch-size, "
            "or profile more sizes - at `$.measurements`",
        ),
        (
            ("plan", "profile.json", "--cluster", "cluster.json", "--stages", "3"),
            1,
            "3 stages asked for; 2 devices, 6 layers and 1f1b, gpipe allow 1, 2",
        ),
        (
            ("plan", "profile.json", "--cluster", "cluster.json", "--objective", "throughput", "--stages", "2"),
            1,
            "--objective throughput chooses the stages: leave --stages 2 out",
        ),
        (
            ("plan", "profile.json", "--cluster", "cluster.json", "--objective", "throughput", "--schedule", "zb-h1"),
            1,
            "--objective throughput runs 1f1b, not zb-h1: leave --schedule out",
        ),
        (
            ("plan", "profile.json", "--cluster", "cluster.json", "--schedule", "1b1f"),
            1,
            "unknown schedule '1b1f'; choose from gpipe, 1f1b, 1f1b+1, 1f1b+2, eager-1f1b, 2f2b, fbp-as, zb-h1, zb-h2, "
            "gpipe-2bp, 1f1b-2bp, interleaved-1f1b, looped-bfs, zb-v, v-half, v-min, dualpipe-v, all, search",
        ),
        (
            ("plan", "profile.json", "--cluster", "cluster.json", "--devices", "2"),
            1,
            "--cluster and --devices both define the devices; give one of them",
        ),
        (("plan", "profile.json", "profile.json"), 1, "needs a kind of its own, such as a-small (profile with --kind), which those devices of the cluster have, too"),
        (("plan", "profile.json"), 1, "define the devices: --devices N like the profiled one, or --cluster FILE"),
        (("simulate", "profile.json", "profile.json"), 1, "profile.json: this is a profile (profile/1), and a plan (plan/1) is wanted: make one with `bapipe plan PROFILE` - at `$.bapipe`"),
        (("show", "damaged.json"), 1, "damaged.json: not JSON: Input data was truncated - at `$`"),
        (("show", "cluster.json", "--html", "x.html"), 1, "--html goes with a plan or a profile; cluster.json is a cluster"),
        (("show", "profile.json", "--profile", "profile.json"), 1, "--profile goes with --html: the page shows the times of its layers; add --html FILE"),
        (("show", "profile.json", "--trace", "t.json"), 1, "--trace goes with a plan; profile.json is a profile"),
        (("show", "profile.json", "--html", "./profile.json"), 1, f"profile.json {OVERWRITTEN}"),
        (("simulate", "none.json", "profile.json", "--trace", "profile.json"), 1, f"profile.json {OVERWRITTEN}"),
        (("compare", "profile.json", "--cluster", "cluster.json", "--html", "cluster.json"), 1, f"cluster.json {OVERWRITTEN}"),
        (("plan", "profile.json", "--devices", "2", "-o", "profile.json"), 1, f"profile.json {OVERWRITTEN}"),
        (("estimate", "profile.json", "--split", "spatial:2", "--cluster", "cluster.json", "-o", "cluster.json"), 1, f"cluster.json {OVERWRITTEN}"),
        (("cluster", "--like", "profile.json", "-o", "profile.json"), 1, f"profile.json {OVERWRITTEN}"),
        (("import", "profile.json", "--batch-size", "1"), 1, f"profile.json {OVERWRITTEN}"),
        (("run", "profile.json", "--trace", "profile.json"), 1, f"profile.json {OVERWRITTEN}"),
        (("plan", "profile.json", "-o", "-"), 1, "-: nothing is written to stdout by this name: name a file, or /dev/stdout"),
        (("estimate", "profile.json", "--split", "spatial:" + "9" * 5000, "--cluster", "cluster.json"), 1, "9: want one of tensor, filter, channel, spatial, sharded, and members, such as spatial:4"),
        (("run", "none.json"), 1, "none.json: no such file"),
        (("plan", "vgg16", "--device", "cuda:99"), 1, "torch finds no device 'cuda:99' on this machine: choose --device cpu, or install torch for CUDA"),
        (("compare", "profile.json", "--device", "cuda"), 1, "--device cuda goes with a model; a profile says where it was measured"),
        (("compare", "profile.json", "--strategies", "--json", "--markdown"), 1, "--json and --markdown are two formats: give one of them"),
        (("run", "vgg17"), 1, "did you mean 'vgg16'?"),
        (("plan", "profile.json", "--cluster", "cluster.json", "-o", "none/plan.json"), 1, "none/plan.json: cannot be written: no folder none"),
    ],
)  # fmt: skip
def test_a_user_error_is_one_line(folder: Path, arguments: tuple[str, ...], code: int, message: str) -> None:
    (folder / "damaged.json").write_bytes((folder / "profile.json").read_bytes()[:100])
    before = sorted(os.listdir(folder))
    done = bapipe(folder, *arguments)
    assert done.returncode == code
    assert done.stdout == ""
    *progress, error = done.stderr.splitlines()
    assert error.startswith("error: ")
    assert error.endswith(message)
    assert set(progress) <= {"planning"}  # on a slow machine, where inputs are not read after two seconds
    assert sorted(os.listdir(folder)) == before


@pytest.mark.parametrize("stdout", ["/dev/stdout", "/dev/fd/1"])
@pytest.mark.parametrize("layout", [(), ("--json",)])
def test_a_file_on_stdout_is_alone_there(folder: Path, stdout: str, layout: tuple[str, ...]) -> None:
    plan = ("plan", "profile.json", "--cluster", "cluster.json", "--minibatch-size", "8", *layout)
    done = bapipe(folder, *plan, "-o", stdout)
    assert done.returncode == 0
    bapipe(folder, *plan, "-o", "plan.json")
    assert done.stdout == (folder / "plan.json").read_text()
    assert ('"certificate"' if layout else f"wrote {stdout}") in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan",),
        ("nothing",),
        ("plan", "profile.json", "--minibatch-size", "x"),
        ("show", "--x"),
        ("plan", "profile.json", "--memory-limit", "9" * 5000),
    ],
)
def test_wrong_usage_exits_with_2(folder: Path, arguments: tuple[str, ...]) -> None:
    assert bapipe(folder, *arguments).returncode == 2


def test_nothing_fits_exits_with_3_and_names_the_closest_plan(folder: Path) -> None:
    done = bapipe(
        folder, "plan", "profile.json", "--cluster", "cluster.json", "--memory-limit", "60", "--minibatch-size", "8"
    )
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1].startswith("error: no plan fits in memory; the closest is ")
    assert "bytes short" in done.stderr
    assert not (folder / "plan.json").exists()


def test_a_plan_for_another_model_is_refused(folder: Path) -> None:
    planned(folder)
    write(folder / "other.json", random_profile(Random(5), 5))
    done = bapipe(folder, "simulate", "plan.json", "other.json")
    assert (done.returncode, done.stderr) == (
        1,
        "error: the plan's layer 'l5' is not in the profile of random: use the profile that the plan was made from, "
        "or plan again\n",
    )


def test_another_profile_of_the_same_model_is_used_with_a_note(folder: Path) -> None:
    plan = planned(folder)
    tree: dict[str, Any] = json.loads((folder / "profile.json").read_bytes())
    tree["layers"][0]["update_ns"] += 10**6
    (folder / "slower.json").write_text(json.dumps(tree))
    done = bapipe(folder, "simulate", "plan.json", "slower.json", "--json")
    assert done.stderr == "the plan was made from another a profile of random\n"
    assert json.loads(done.stdout)["step_ns"] > plan.prediction.step_ns


def test_planning_needs_no_torch(folder: Path) -> None:
    """Planning, simulating and drawing work if torch cannot be imported."""
    (folder / "block").mkdir()
    for name in ("torch", "ortools", "networkx"):
        (folder / "block" / f"{name}.py").write_text("raise ImportError('not installed')")
    path = f"{folder / 'block'}{os.pathsep}{ROOT}"
    for arguments in (
        ("plan", "profile.json", "--cluster", "cluster.json", "--minibatch-size", "8"),
        ("plan", "profile.json", "--devices", "2", "--minibatch-size", "8"),
        ("simulate", "plan.json", "profile.json"),
        ("show", "plan.json"),
    ):
        assert bapipe(folder, *arguments, PYTHONPATH=path).returncode == 0


@pytest.mark.parametrize(
    ("error", "text"),
    [
        ("ModuleNotFoundError", "need torch (no torch here): pip install torch safetensors pillow\n"),
        (
            "ImportError",  # as where there is no memory for its libraries
            "need torch, which cannot be loaded (no torch here): allow more memory (ulimit -v), or install torch anew\n",
        ),
    ],
)
def test_measuring_without_torch_says_what_to_do(folder: Path, error: str, text: str) -> None:
    (folder / "block").mkdir()
    (folder / "block" / "torch.py").write_text(f"raise {error}('no torch here')")
    path = f"{folder / 'block'}{os.pathsep}{ROOT}"
    done = bapipe(folder, "profile", "vgg16", PYTHONPATH=path)
    assert done.returncode == 1
    assert done.stderr == f"error: profiling and running {text}"
