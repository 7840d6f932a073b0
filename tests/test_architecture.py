"""Imports point down the layers, heavy packages stay where they belong, public names and options are pinned."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import typer

import bapipe
from bapipe.cli import app
from bapipe.cli.lazy_group import COMMANDS
from tests import ROOT
from tests.sources import FILES, PACKAGE, calls_of, nodes_of, relative, tree_of

LAYERS = [
    {"errors", "torchrun"},
    {"stop_signals", "field_types", "module_path"},
    {
        "units",
        "options",
        "optimizers",
        "hardware",
        "device_types",
        "printable",
        "progress",
        "processes",
        "one_thread",
        "user_folders",
        "_optional",
    },
    {"tables"},
    {"schedules"},
    {"formats"},
    {"graph", "losses", "torch_device", "torch_settings", "torch_private"},
    {"job", "diagnosis", "module_state"},
    {"simulator", "tracing"},
    {"importers", "estimates", "zoo", "equivalence"},
    {"profiler"},
    {"planner"},
    {"runtime"},
    {"training"},
    {"report"},
    {"explorer"},
    {"__init__"},
    {"cli"},
    {"__main__"},
]
"""Lowest first. A module imports from layers below its own; within a package such as `planner` from its files too."""

PLANNER_FOLDERS = [
    {"inputs", "compute"},
    {"results"},
    {"stages"},
    {"branch_and_bound"},
    {"action_order", "device_line", "fixed_placements", "long_chain", "throughput"},
    {""},
    {"analysis"},
]
"""Lowest first, as in `LAYERS`; "" is the files of `planner/` itself, which drive the searches."""

TORCH = {
    "job",
    "diagnosis",
    "module_state",
    "tracing",
    "equivalence",
    "losses",
    "torch_device",
    "torch_settings",
    "torch_private",
    "profiler",
    "runtime",
    "training",
    "zoo",
}
HEAVY = {
    "torch": TORCH,
    "numba": {"planner"},
    "numpy": {"zoo", "planner", "simulator"},
    "PIL": {"zoo"},
    "sentencepiece": {"zoo"},
    "sacrebleu": {"zoo"},
    "ortools": {"planner"},
    "networkx": {"graph", "formats"},
    "pandas": {"tables"},
}


def modules() -> list[tuple[str, Path]]:
    """(top-level name inside the package, file)"""
    return [(path.relative_to(PACKAGE).parts[0].removesuffix(".py"), path) for path in FILES]


@cache
def imports(path: Path) -> list[tuple[str, bool]]:
    """(dotted name, whether it is at the top of the file) of every import, but those for type checkers only."""
    tree = tree_of(path)
    checking = {
        id(node)
        for block in nodes_of(path)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    found = []
    for node in nodes_of(path):
        if id(node) in checking:
            continue
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found += [
                (f"{node.module}.{alias.name}" if node.module == "bapipe" else str(node.module), node in tree.body)
                for alias in node.names
            ]
        elif isinstance(node, ast.Import):
            found += [(alias.name, node in tree.body) for alias in node.names]
    return found


@pytest.mark.parametrize(("name", "path"), modules(), ids=lambda x: relative(x) if isinstance(x, Path) else "")
def test_imports_point_down(name: str, path: Path) -> None:
    level = next(i for i, layer in enumerate(LAYERS) if name in layer)
    for imported, _ in imports(path):
        parts = imported.split(".")
        if parts[0] != "bapipe" or parts[1:2] == [name]:
            continue
        target = parts[1] if len(parts) > 1 else "__init__"
        assert any(target in layer for layer in LAYERS[:level]), (
            f"{path.name} imports {imported}, which is not below it"
        )


def test_the_table_of_packages_has_each_once_below_those_that_it_imports() -> None:
    table = (ROOT / "docs" / "architecture.md").read_text().split("## Packages")[1].split("\n## ")[0]
    first_cells = "".join(re.findall(r"^\| (`.*?`) \|", table, flags=re.MULTILINE))
    listed = re.findall(r"`(\w+)(?:\.py|/)`", first_cells)
    assert sorted(listed) == sorted({name for name, _ in modules()} - {"__init__", "__main__"})
    for name, path in modules():
        above = listed[: listed.index(name)] if name in listed else listed
        for imported, _ in imports(path):
            package, _, rest = imported.partition(".")
            target = rest.split(".")[0]
            assert package != "bapipe" or target in ("", name, *above), f"{relative(path)} imports {imported}"


def test_imports_between_folders_of_the_planner_point_down() -> None:
    level = {folder: i for i, folders in enumerate(PLANNER_FOLDERS) for folder in folders}
    for path in FILES:
        if path.is_relative_to(PACKAGE / "planner"):
            folder = path.parent.relative_to(PACKAGE / "planner").as_posix().removeprefix(".")
            for imported, _ in imports(path):
                parts = imported.split(".")
                if parts[:2] == ["bapipe", "planner"]:
                    target = parts[2] if len(parts) > 2 and parts[2] in level else ""
                    assert target == folder or level[target] < level[folder], f"{relative(path)} imports {imported}"


@pytest.mark.parametrize(("name", "path"), modules(), ids=lambda x: relative(x) if isinstance(x, Path) else "")
def test_heavy_packages_stay_where_they_belong(name: str, path: Path) -> None:
    for imported, at_top in imports(path):
        package = imported.split(".")[0]
        if path.name == "_optional.py" and not at_top:  # the one place where torch is loaded when it is first used
            continue
        assert name in HEAVY.get(package, {name}), f"{path.name} imports {package}"


def test_only_one_file_knows_the_solver_and_loads_it_when_it_is_used() -> None:
    for _, path in modules():
        found = [at_top for imported, at_top in imports(path) if imported.split(".")[0] == "ortools"]
        assert not found or (path.name == "cp_sat.py" and not any(found)), path


def private_torch_names(path: Path) -> list[str]:
    """Names with a leading underscore that a file takes from torch, or from an object that it does not define itself.

    Names of the latter kind are found by what the file defines: its functions, classes, fields and attributes of self.
    """
    nodes = nodes_of(path)
    if not any(imported.split(".")[0] == "torch" for imported, _ in imports(path)):
        return []

    def is_private(name: str) -> bool:
        of_named_tuples = name in ("_asdict", "_fields", "_make", "_replace")
        return name.startswith("_") and not name.startswith("__") and not of_named_tuples

    found = []
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "torch":
            names = [*str(node.module).split("."), *(alias.name for alias in node.names)]
            found += [f"from {node.module} import {name}" for name in names if is_private(name)]
        elif isinstance(node, ast.Import):
            dotted = [alias.name for alias in node.names if alias.name.split(".")[0] == "torch"]
            found += [f"import {name}" for name in dotted if any(map(is_private, name.split(".")))]
    stored = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    own = {node.attr for node in stored if ast.unparse(node.value) == "self"}
    own |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {node.target.id for node in nodes if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    for node in nodes:
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            found += [ast.unparse(node)] if ast.unparse(node.value) not in ("os", "sys") else []
    for called, call in calls_of(path):
        if called in ("getattr", "setattr", "hasattr"):
            name = call.args[1]
            if isinstance(name, ast.Constant) and is_private(str(name.value)):
                found.append(ast.unparse(call))
    return found


def test_private_names_of_torch_stay_in_one_package() -> None:
    for name, path in modules():
        assert name == "torch_private" or not private_torch_names(path), path
    assert sum(len(private_torch_names(path)) for path in (PACKAGE / "torch_private").iterdir() if path.is_file()) > 20


def test_only_the_command_line_prints_and_exits() -> None:
    for name, path in modules():
        for called, _ in calls_of(path):
            assert name == "cli" or called not in ("print", "sys.exit", "exit"), f"{path.name}: {called}"


@pytest.mark.parametrize(
    "command",
    [
        "import bapipe",
        "import bapipe.cli, bapipe.cli.plan, bapipe.cli.profile, bapipe.cli.run",
        "import bapipe.planner.plan_step",
        "import bapipe.planner.action_order.search",
    ],
)
def test_planning_loads_no_heavy_package(command: str) -> None:
    code = f"import sys; {command}; print([m for m in {sorted(HEAVY)} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_small_problems_are_planned_without_the_compiler() -> None:
    """It takes half a second to load; only searches over many devices need it."""
    code = (
        "import sys, bapipe\n"
        "from bapipe.planner.inputs.options import PlanOptions; from tests.builders import chain, devices\n"
        "bapipe.plan({'a': chain([1, 2, 3])}, devices(2), PlanOptions(minibatch_size=4))\n"
        "print('numba' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"


def test_help_loads_no_command() -> None:
    """`bapipe --help` answers at once: it imports the parser, but neither the commands nor their dependencies."""
    code = (
        "import sys; from bapipe.cli import app; sys.argv[1:] = ['--help']\n"
        "try: app()\n"
        "except SystemExit: pass\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('msgspec', 'rich', 'numpy')], file=sys.stderr)\n"
        "print([m for m in sys.modules if m.startswith('bapipe.') and not m.startswith('bapipe.cli')], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.splitlines() == [
        "[]",
        "['bapipe.errors', 'bapipe.printable', 'bapipe.torchrun', 'bapipe.stop_signals']",
    ]


def test_each_command_begins_its_help_with_its_line_in_the_list() -> None:
    for name, (path, short_help) in COMMANDS.items():
        module, _, function = path.partition(":")
        docstring = getattr(importlib.import_module(module), function).__doc__
        assert docstring.splitlines()[0] == short_help, name


def test_type_checkers_see_the_annotations() -> None:
    assert (PACKAGE / "py.typed").is_file()


def test_without_torch_the_package_can_be_listed_and_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in bapipe._NEEDS_TORCH:
        monkeypatch.delitem(vars(bapipe), name, raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    members = dict(inspect.getmembers(bapipe))
    assert bapipe.__all__ == sorted({*members} & {*bapipe.__all__} | bapipe._NEEDS_TORCH)
    assert not members.keys() & bapipe._NEEDS_TORCH
    for name in bapipe._NEEDS_TORCH:
        with pytest.raises(bapipe.BapipeError, match=r"need torch \(.*\): pip install torch safetensors pillow$"):
            getattr(bapipe, name)


def test_public_names() -> None:
    assert sorted(bapipe._MODULE_OF) == sorted(bapipe.__all__)
    assert set(bapipe.__all__) <= set(dir(bapipe))
    with pytest.raises(AttributeError):
        bapipe.nothing  # type: ignore[attr-defined]  # noqa: B018
    assert sorted(bapipe.__all__) == [
        "Alternative", "Bandwidth", "BapipeError", "Certificate", "Changes", "Cluster", "Comparison", "ConstraintsUnmet", "Device", "Evaluation", "Example",
        "ForwardResult", "GenerationConfig", "Goal", "Infeasible", "InvalidFile", "InvalidModel", "InvalidSchedule", "LayerFailed", "Link",
        "ModelProfile", "PendingLoss", "Pipeline", "PipelineDataset", "Plan", "PlanOptions", "Prediction", "RunFailed", "Settings", "StagePlan",
        "StepReport", "Stopped", "Timeline", "TrainConfig", "TrainResult", "compare", "edit", "make", "plan", "profile", "read", "run", "simulate", "to_networkx", "weighted_mean", "write",
    ]  # fmt: skip
    for name in bapipe.__all__:
        assert getattr(bapipe, name) is not None


def test_type_checkers_see_every_public_name() -> None:
    block = next(
        node
        for node in tree_of(PACKAGE / "__init__.py").body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    imported = {
        alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert imported == bapipe._MODULE_OF


def test_the_page_of_the_interface_documents_every_public_name_and_no_other() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    documented = re.findall(r"^\.\. auto(?:class|exception|function):: bapipe\.(\w+)$", text, flags=re.MULTILINE)
    assert sorted(documented) == sorted(bapipe.__all__)
    assert text.count(":: ") == len(documented) + 1, "and the docstring of bapipe.errors"


def test_command_line_options() -> None:
    group = typer.main.get_command(app)
    options = {
        name: sorted(opt for p in command.params for opt in p.opts if opt.startswith("--") and opt != "--help")
        for name, command in group.commands.items()  # type: ignore[attr-defined]
    }
    assert options == {
        "profile": [
            "--arg", "--autocast", "--channels-last", "--check", "--co-runners", "--device", "--exhaustive", "--json", "--kind", "--layer-by-layer",
            "--leaf-module", "--microbatch-size", "--operator-layers", "--optimizer", "--output", "--tf32", "--threads",
        ],
        "import": [
            "--batch-size", "--device", "--device-name", "--json", "--layers", "--members", "--memory-bytes",
            "--microbatch-size", "--model", "--optimizer", "--output", "--source",
        ],
        "cluster": ["--between", "--device", "--devices", "--hosts", "--json", "--like", "--output", "--probe", "--within"],
        "estimate": ["--cluster", "--json", "--kind", "--output", "--split", "--whole"],
        "plan": [
            "--arg", "--cluster", "--constraint", "--device", "--devices", "--explain", "--group", "--json",
            "--largest", "--least", "--memory-limit", "--memory-margin", "--microbatch-size", "--min-throughput", "--minibatch-size",
            "--objective", "--output", "--pareto", "--pin", "--recompute", "--replicas", "--schedule", "--stages", "--time-limit", "--within",
        ],
        "compare": [
            "--arg", "--cluster", "--device", "--devices", "--html", "--json", "--markdown", "--memory-limit", "--microbatch-size",
            "--minibatch-size", "--recompute", "--replicas", "--schedule", "--strategies", "--time-limit", "--whole",
        ],
        "edit": [
            "--cut", "--json", "--keep", "--microbatch-size", "--minibatch-size", "--move", "--no-cuts", "--output",
            "--place", "--profile", "--recompute", "--recompute-layer", "--schedule", "--swap",
        ],
        "doctor": ["--json"],
        "explore": [
            "--arg", "--browser", "--cluster", "--csv", "--devices", "--exact", "--json", "--markdown", "--microbatch-size",
            "--minibatch-size", "--port", "--profile", "--schedule", "--trace", "--vary",
        ],
        "simulate": ["--json", "--trace"],
        "show": ["--html", "--json", "--profile", "--trace"],
        "run": [
            "--arg", "--augment", "--buckets", "--checkpoint", "--checkpoint-every", "--clip-norm", "--data", "--data-workers", "--device",
            "--eval-every", "--eval-samples", "--json", "--keep", "--lr", "--lr-schedule", "--optimizer", "--optimizer-arg", "--profile",
            "--replan", "--report-every", "--resume", "--seed", "--skip-unreadable", "--steps", "--tensorboard", "--timeout", "--trace", "--trust-factory", "--warmup", "--weights", "--without",
        ],
        "export": ["--json", "--output"],
        "convert-checkpoint": ["--json"],
    }  # fmt: skip
