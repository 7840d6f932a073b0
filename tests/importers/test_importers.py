"""Foreign profiles, worked out by hand, and the published totals of the converted ones."""

import re
from pathlib import Path

import pytest

from bapipe.errors import BapipeError
from bapipe.formats.codec import read
from bapipe.formats.layer_profile import LayerProfile
from bapipe.formats.measurement import LayerMeasurement
from bapipe.formats.profile import ModelProfile
from bapipe.importers import ImportMetadata, import_file, import_profile
from tests import ROOT


def origin(sizes: tuple[int, ...] = (8,), optimizer: str = "adam") -> ImportMetadata:
    return ImportMetadata(
        model="small",
        source="by hand",
        kind="cuda",
        device_name="V100",
        memory_bytes=100,
        batch_size=8,
        sizes=sizes,
        optimizer=optimizer,
    )


def times(forward: float, backward: float, sizes: str, params: float) -> str:
    return (
        f"forward_compute_time={forward}, backward_compute_time={backward}, activation_size={sizes}, "
        f"parameter_size={params}"
    )


TRANSLATION = f"""\
node2 -- Embedding(5, 2) -- {times(1, 6, "40.0", 80)}
node1 -- Input0 -- {times(99, 0, "16.0", 0)}
node3 -- EmuBidirLSTM(  (bidir): LSTM(2, 2, bidirectional=True)) -- {times(2, 0.5, "80.000", 8)}
node4 -- LSTM(4, 2) -- {times(3, 4, "[40.0; 6.0; 6.0]", 32)}
node5 -- __getitem__(0) -- {times(0, 0, "40.0", 0)}
node6 -- __getitem__(1) -- {times(0, 0, "6.0", 0)}
node7 -- ReLU(inplace) -- {times(0.25, 0.75, "40.0", 0)}
node8 -- LSTM(2, 2) -- {times(3, 9, "[40.0; 6.0; 6.0]", 16)}
node9 -- __getitem__(0) -- {times(0, 0, "40.0", 0)}
node10 -- Add -- {times(0, 0, "40.0", 0)}
node11 -- Classifier(  (classifier): Linear(2, 5)) -- {times(2, 1, "100.0", 44)}
\tnode1 -- node2
\tnode2 -- node3
\tnode1 -- node3
\tnode3 -- node4
\tnode4 -- node5
\tnode4 -- node6
\tnode5 -- node7
\tnode7 -- node8
\tnode6 -- node8
\tnode8 -- node9
\tnode9 -- node10
\tnode5 -- node10
\tnode10 -- node11
"""


def layers(profile: ModelProfile) -> dict[str, tuple[LayerProfile, LayerMeasurement]]:
    return {a.name: (a, m) for a, m in zip(profile.layers, profile.measurements[0].layers, strict=True)}


def test_pipedream_with_every_trap() -> None:
    profile = import_profile(TRANSLATION, origin())
    found = layers(profile)
    assert list(found) == ["node2+node3", "node4", "node7", "node8+node10+node11"]
    first, lstm, relu, last = (a for a, _ in found.values())
    assert (first.kind, first.inputs, first.outputs) == ("Embedding+EmuBidirLSTM", ("input0",), ("node3",))
    assert (lstm.inputs, lstm.outputs) == (("node3",), ("node4:0", "node4:1"))
    assert (relu.inputs, relu.outputs) == (("node4:0",), ("node7",))
    assert (last.inputs, last.outputs) == (("node4:1", "node7", "node4:0"), ("node11",))
    assert [a.param_bytes for a, _ in found.values()] == [88, 32, 0, 60]
    assert [a.optimizer_state_bytes for a, _ in found.values()] == [176, 64, 0, 120]
    at = [(m.forward_ns, m.input_grad_ns, m.weight_grad_ns) for _, m in found.values()]
    assert at == [
        (3_000_000, 0, 6_500_000),  # model inputs need no gradient; loading them is no layer
        (3_000_000, 2_000_000, 2_000_000),
        (250_000, 750_000, 0),
        (5_000_000, 5_000_000, 5_000_000),
    ]
    assert [m.output_bytes for _, m in found.values()] == [(80,), (40, 6), (40,), (100,)]
    assert [m.stash_bytes for _, m in found.values()] == [40 + 80, 52, 0, 52 + 40 + 100]
    assert profile.environment == {
        "source": "by hand",
        "batch_size": 8,
        "input_and_weight_gradient": "halves of the measured backward",
    }


def test_stages_of_a_partitioned_graph_are_left_out() -> None:
    """As PipeDream's optimizer writes it: behind each node the stage that it is in."""
    nodes, edges = TRANSLATION[: TRANSLATION.index("\t")], TRANSLATION[TRANSLATION.index("\t") :]
    staged = "".join(f"{line} -- stage_id={i // 4}\n" for i, line in enumerate(nodes.splitlines()))
    assert import_profile(staged + edges, origin()) == import_profile(TRANSLATION, origin())


def test_figures_of_items_are_those_of_their_node() -> None:
    """Also of an item of an item; what is selected from an input is loaded with it, without time."""
    text = (
        f"node1 -- Input0 -- {times(99, 0, '16.0', 0)}\n"
        f"node2 -- __getitem__(0) -- {times(99, 0, '8.0', 0)}\n"
        f"node3 -- Split(2) -- {times(1, 4, '[4.0; 2.0]', 16)}\n"
        f"node4 -- __getitem__(1) -- {times(2, 1, '[2.0; 6.0]', 8)}\n"
        f"node5 -- __getitem__(0) -- {times(4, 3, '2.0', 4)}\n"
        f"node6 -- ReLU() -- {times(8, 8, '2.0', 0)}\n"
        "\tnode1 -- node2\n\tnode2 -- node3\n\tnode3 -- node4\n\tnode4 -- node5\n\tnode5 -- node6\n"
    )
    (split, at_split), (relu, at_relu) = layers(import_profile(text, origin())).values()
    assert (split.name, split.inputs, split.outputs) == ("node3", ("input0",), ("node3:1:0",))
    assert (at_split.forward_ns, at_split.weight_grad_ns, split.param_bytes) == (7_000_000, 8_000_000, 28)
    assert (at_split.output_bytes, at_split.stash_bytes) == ((2,), 6)
    assert (relu.inputs, at_relu.forward_ns) == (("node3:1:0",), 8_000_000)


def test_other_sizes_are_scaled_in_proportion_and_named() -> None:
    profile = import_profile(TRANSLATION, origin(sizes=(8, 2), optimizer="sgd"))
    assert profile.microbatch_sizes == (2, 8)
    assert profile.environment["scaled_in_proportion"] == [2]
    small = profile.at(2)[1]
    assert (small.forward_ns, small.input_grad_ns, small.weight_grad_ns) == (750_000, 500_000, 500_000)
    assert (small.stash_bytes, small.output_bytes) == (13, (10, 2))  # 6 / 4 = 1.5, rounded up
    assert all(layer.optimizer_state_bytes == 0 for layer in profile.layers)


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_a_table_is_a_chain(delimiter: str) -> None:
    text = "layer,fwd_ms,bwd (us),Activation MiB,param_bytes\nconv, 1.5, 3000, 2, 0\n\nfc,2,1,0.5,7\n"
    profile = import_profile(text.replace(",", delimiter), origin())
    (a, at_a), (b, at_b) = layers(profile).values()
    assert (a.name, a.inputs, a.outputs) == ("conv", ("input",), ("conv",))
    assert (b.name, b.inputs, b.outputs, b.param_bytes) == ("fc", ("conv",), ("fc",), 7)
    assert (at_a.forward_ns, at_a.input_grad_ns, at_a.weight_grad_ns) == (1_500_000, 3_000_000, 0)
    assert (at_b.forward_ns, at_b.input_grad_ns, at_b.weight_grad_ns) == (2_000_000, 500, 500)
    assert (at_a.output_bytes, at_a.stash_bytes, at_b.stash_bytes) == ((2 * 2**20,), 2 * 2**20, 2**19)


def test_layers_of_a_table_may_have_the_name_of_the_input() -> None:
    profile = import_profile(HEADER + "input,1,2,3,4\ninput',1,2,3,4\nfc,1,2,3,4\n", origin())
    inputs = [layer.inputs for layer in profile.layers]
    assert inputs == [("input''",), ("input",), ("input'",)]


@pytest.mark.parametrize("unit", ["us", "µs", "\N{GREEK SMALL LETTER MU}s", "\N{GREEK CAPITAL LETTER MU}S"])
def test_microseconds_have_three_spellings(unit: str) -> None:
    profile = import_profile(f"layer,forward ({unit}),bwd_{unit},act bytes,param_bytes\na,1,2,3,4\n", origin())
    ((_, at),) = layers(profile).values()
    assert (at.forward_ns, at.input_grad_ns + at.weight_grad_ns) == (1000, 2000)


def test_a_title_of_name_and_unit_is_preferred() -> None:
    text = (
        "layer_type,name,forward_std_ms,forward_ms,backward_std,backward (ms),activation_grad_bytes,act_kb,"
        "param_bytes,update_ms\nconv,a,9,1,9,2,9,3,4,9\n"
    )
    plain = "name,forward_ms,backward_ms,act_kb,param_bytes\na,1,2,3,4\n"
    assert import_profile(text, origin()) == import_profile(plain, origin())


@pytest.mark.parametrize(("unit", "num_bytes"), [("bytes", 2), ("kb", 1_500), ("mb", 1_500_000), ("kib", 1_536)])
def test_units_of_sizes(unit: str, num_bytes: int) -> None:
    value = "2" if unit == "bytes" else "1.5"
    profile = import_profile(f"layer,forward_ms,backward_ms,activation_bytes,param_{unit}\na,1,2,3,{value}\n", origin())
    assert profile.layers[0].param_bytes == num_bytes


@pytest.mark.parametrize("format_", ["table", "pipedream", "paradl"])
def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path, format_: str) -> None:
    text = {
        "table": HEADER + "a,1,2,3,4\n",
        "pipedream": f"node1 -- ReLU() -- {times(1, 2, '4.0', 0)}\n",
        "paradl": "Dataset|ImageNet\nCONV1_1|3x8x8|3x4x3x3|4x8x8|0.5\n",
    }[format_]
    (tmp_path / "plain.txt").write_text(text, encoding="utf-8")
    (tmp_path / "marked.txt").write_text(text, encoding="utf-8-sig")
    assert import_file(tmp_path / "marked.txt", origin()) == import_file(tmp_path / "plain.txt", origin())


HEADER = "layer,forward_ms,backward_ms,activation_bytes,parameter_bytes\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no layer in the file: want PipeDream's graph.txt, or a table with a header"),
        (
            "node1 -- Conv2d(3) -- forward=1\n",
            "line 1 is neither a node nor an edge of PipeDream's graph.txt: 'node1 -- Conv2d(3) -- forward=1'; want "
            "'node1 -- Module -- forward_compute_time=ms, backward_compute_time=ms, activation_size=bytes, "
            "parameter_size=bytes' or, indented, 'node1 -- node2'",
        ),
        (TRANSLATION + "\tnode1 -- node99\n", "line 25 has an edge of 'node99', which is not a node of the file"),
        (
            TRANSLATION + "\tnode4 -- node3\n",
            "line 25 has an edge from 'node4' back to 'node3'; want nodes numbered in their order",
        ),
        (
            "layer,forward_ms\n",
            "no column for backward in the header layer, forward_ms; want layer, forward_ms, backward_ms, "
            "activation_bytes, parameter_bytes, each with its unit",
        ),
        (
            "layer,forward (мs)\n",  # a Cyrillic letter
            "column 'forward (мs)' has no unit; want one of ns, us, ms, s, such as forward_s",
        ),
        ("layer,forward\n", "column 'forward' has no unit; want one of ns, us, ms, s, such as forward_s"),
        (
            "layer,forward_ms,backward_input_ms,backward_weight_ms,activation_bytes,parameter_bytes\n",
            "2 columns for backward: 'backward_input_ms', 'backward_weight_ms'; want one, such as 'backward_ms': rename "
            "or remove the others, and add up parts of one figure",
        ),
        (
            "layer,fwd_ms,forward_us\n",
            "2 columns for forward: 'fwd_ms', 'forward_us'; want one, such as 'forward_ms': rename or remove the "
            "others, and add up parts of one figure",
        ),
        (
            "layer,forward_ms,backward_ms,activation_bytes,parameter_Mb\n",
            "column 'parameter_Mb' may be in bits: write its unit in bytes, with a large B",
        ),
        (HEADER + ",1,2,3,4\n", "line 2 has no name of a layer: name it, or remove the row"),
        (HEADER + "a,1,2,3\n", "line 2 has 4 columns; the header has 5"),
        (HEADER + "a,1,x,3,4\n", "line 2: 'x' is not a valid backward; want a number >= 0"),
        (HEADER + "a,-1,2,3,4\n", "line 2: '-1' is not a valid forward; want a number >= 0"),
        (HEADER + "a,1,2,nan,4\n", "line 2: 'nan' is not a valid output; want a number >= 0"),
        (
            HEADER + "a,1,2,3,4\na,1,2,3,4\n",
            "a second layer is named 'a'; names must be unique - at `$.layers[1].name`",
        ),
    ],
)
def test_errors_name_the_line(text: str, message: str) -> None:
    with pytest.raises(BapipeError) as error:
        import_profile(text, origin())
    assert str(error.value) == message


def test_an_unknown_optimizer() -> None:
    with pytest.raises(BapipeError, match=re.escape("unknown optimizer 'lion'; want one of sgd, sgd-momentum, adam")):
        import_profile(TRANSLATION, origin(optimizer="lion"))


def test_errors_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "graph.txt"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(BapipeError, match=re.escape(f"{path}: not a text file")):
        import_file(path, origin())
    path.write_text(HEADER)
    with pytest.raises(BapipeError, match=re.escape(f"{path}: no layer in the file")):
        import_file(path, origin())


CONVERTED = ROOT / "profiles" / "v100"


@pytest.mark.parametrize(
    ("name", "batch_size", "forward_ms", "backward_ms", "num_params"),
    [
        ("vgg16", 128, 234, 439, 138_357_544),
        ("resnet50", 128, 182, 261, 25_557_032),
        ("gnmt8", 32, 33.5, 55.9, None),
        ("gnmt16", 128, 183, 338, None),
    ],
)
def test_the_converted_profiles_add_up_to_the_published_totals(
    name: str, batch_size: int, forward_ms: float, backward_ms: float, num_params: int | None
) -> None:
    profile = read(CONVERTED / f"{name}.json", ModelProfile)
    measured = profile.at(batch_size)
    assert sum(m.forward_ns for m in measured) / 1e6 == pytest.approx(forward_ms, abs=0.6)
    assert sum(m.input_grad_ns + m.weight_grad_ns for m in measured) / 1e6 == pytest.approx(backward_ms, abs=0.6)
    if num_params is not None:
        assert sum(layer.param_bytes for layer in profile.layers) == 4 * num_params


def node(name: str, kind: str = "ReLU()", forward: str = "1", size: str = "4.0") -> str:
    return (
        f"{name} -- {kind} -- forward_compute_time={forward}, backward_compute_time=1, activation_size={size}, "
        "parameter_size=0\n"
    )


def chain_of(items: int) -> str:
    """A node with two outputs, and items of items of it."""
    nodes = [node("node1", "LSTM(2)", size="[4.0; 2.0]")]
    nodes += [node(f"node{i + 2}", "__getitem__(0)", size="[4.0; 2.0]") for i in range(items)]
    return "".join([*nodes, *(f"\tnode{i + 1} -- node{i + 2}\n" for i in range(items))])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (node("node1", forward="1.2.3"), "line 1: '1.2.3' is not a valid forward time; want a number >= 0"),
        (node("node1", forward="9" * 5000), f"line 1: '{'9' * 40}' is not a valid forward time; want a number >= 0"),
        (node("node1", size="9" * 19), f"line 1: the activation size {'9' * 19} is too large; check the unit"),
        (node("node1") + node("node1"), "line 2: a second node is named 'node1'"),
        (
            node("node1") + node("node2", "__getitem__(0)"),
            "'node2' is an item of no node: want an edge from the node that it is taken from",
        ),
        (chain_of(2000), "'node66' is an item of an item, more than 64 deep"),
        ("x -- y\n" * 50_001, "more than 50,000 lines; want the layers of one model"),
        (
            "layer,f_ms,b_ms,act_kb,param_kb\n" + "x" * 200_000 + ",1,1,1,1",
            "line 2 is not a row of a table: field larger than field limit (131072)",
        ),
        (
            "layer,f_ms,b_ms,act_kb,param_kb\na,1e400,1,1,1",
            "line 2: '1e400' is not a valid forward; want a number >= 0",
        ),
        ("layer,f_s,b_ms,act_kb,param_kb\na,1e300,1,1,1", "line 2: the forward 1e300 is too large; check the unit"),
        ("layer,f_s,b_ms,act_kb,param_kb\na,nan,1,1,1", "line 2: 'nan' is not a valid forward; want a number >= 0"),
    ],
)
def test_a_file_beyond_a_limit_is_refused(text: str, message: str) -> None:
    with pytest.raises(BapipeError) as caught:
        import_profile(text, origin())
    assert str(caught.value) == message


def test_a_profile_that_cannot_be_read_back_is_not_imported() -> None:
    with pytest.raises(BapipeError, match=r"Expected `int` <= 9223372036854775807 - at `\$.measurements\[0\].layers"):
        import_profile(node("node1", size="9" * 18), origin(sizes=(2**20,)))


def test_a_node_with_a_long_number_sorts_by_it() -> None:
    last = "node" + "9" * 5000
    profile = import_profile(node(last) + node("node2") + f"\tnode2 -- {last}\n", origin())
    assert [layer.name for layer in profile.layers] == ["node2", last]


def test_a_graph_of_many_nodes_takes_linear_time() -> None:
    """Looking at every pair of tens of thousands of nodes would take minutes."""
    num = 5_000
    edges = "".join(f"\tnode{i} -- node{i + 1}\n" for i in range(1, num))
    profile = import_profile("".join(node(f"node{i}") for i in range(1, num + 1)) + edges, origin())
    assert len(profile.layers) == num
    assert profile.layers[-1].inputs == (f"node{num - 1}",)
