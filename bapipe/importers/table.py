"""Parses tables with a row for each layer of a chain, the input of planners such as DAPPLE (arXiv:2007.01045).

The first row names the columns, with their units: a name for the layer, `forward`, `backward`, `activation` (or
`output`) and `param`, such as

    layer,forward_ms,backward_ms,activation_bytes,parameter_bytes
    conv1,1.5,3.1,802816,9408
"""

import csv
import re
from collections.abc import Mapping, Sequence, Set
from itertools import count

from bapipe.errors import BapipeError
from bapipe.importers.figures import figure
from bapipe.importers.to_profile import ImportedLayer

_COLUMNS = {
    "name": r"layer|name",
    "forward": r"f|fw|fwd|forward",
    "backward": r"b|bw|bwd|backward",
    "output": r"act|activation|activations|output",
    "params": r"param|params|parameter|parameters|weight|weights",
}
_MICRO = str.maketrans("µμ", "uu")
"""The micro sign and the Greek letter, which look alike."""

_TIMES = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9}
_SIZES = {"bytes": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_EXAMPLES = {
    "name": "layer",
    "forward": "forward_ms",
    "backward": "backward_ms",
    "output": "activation_bytes",
    "params": "parameter_bytes",
}


def parse_table(text: str) -> tuple[ImportedLayer, ...]:
    """Returns the rows of a table as a chain of layers; columns are separated by commas, semicolons, tabs or bars.

    Raises:
        BapipeError: a column is missing, without a unit or there twice, a row has another length, or a figure is not a
            number.
    """
    rows = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    if not rows:
        return ()
    delimiter = max(",;\t|", key=rows[0][1].count)
    titles = _cells(*rows[0], delimiter)
    for title in titles:
        if re.search(r"(?<![^\W\d_])[KMG]i?b(?![^\W\d_])", title):
            raise BapipeError(f"column '{title}' may be in bits: write its unit in bytes, with a large B")
    header = [cell.lower().translate(_MICRO) for cell in titles]
    columns = {column: _find(column, header) for column in _COLUMNS}
    cells_of = {number: _cells(number, line, delimiter) for number, line in rows[1:]}
    for number, cells in cells_of.items():
        if len(cells) != len(header):
            raise BapipeError(f"line {number} has {len(cells)} columns; the header has {len(header)}")
        if not cells[columns["name"][0]]:
            raise BapipeError(f"line {number} has no name of a layer: name it, or remove the row")
    source = _model_input({cells[columns["name"][0]] for cells in cells_of.values()})
    layers: list[ImportedLayer] = []
    for number, cells in cells_of.items():
        layers.append(_layer(number, cells, columns, layers[-1].name if layers else source))
    return tuple(layers)


def _model_input(names: Set[str]) -> str:
    """Returns a name for the input of the model, which no layer has: a layer's output has the layer's name."""
    return next(name for i in count() if (name := "input" + "'" * i) not in names)


def _cells(number: int, line: str, delimiter: str) -> list[str]:
    try:
        return [cell.strip() for cell in next(csv.reader([line], delimiter=delimiter))]
    except csv.Error as error:
        raise BapipeError(f"line {number} is not a row of a table: {error}") from None


def _find(column: str, header: Sequence[str]) -> tuple[int, int]:
    """Returns the position of a column and the factor of its unit.

    A title of a name and a unit alone, such as `forward_ms`, is preferred to ones with further words, such as
    `forward_std_ms`.
    """
    units: Mapping[str, int] = {"name": {}, "forward": _TIMES, "backward": _TIMES}.get(column, _SIZES)
    found: dict[int, list[str]] = {}
    for position, title in enumerate(header):
        words = re.findall(r"[^\W\d_]+", title)  # of letters of any script: a unit is known whole, or not at all
        if words and re.fullmatch(_COLUMNS[column], words[0]):
            found[position] = words
    if not found:
        wanted = f"{', '.join(_EXAMPLES.values())}, each with its unit"
        raise BapipeError(f"no column for {column} in the header {', '.join(header)}; want {wanted}")
    plain_endings = [[unit] for unit in units] or [[]]
    plain = [position for position, words in found.items() if words[1:] in plain_endings]
    position, *others = plain or found
    if others:
        titles = "', '".join(header[i] for i in (position, *others))
        raise BapipeError(
            f"{1 + len(others)} columns for {column}: '{titles}'; want one, such as '{_EXAMPLES[column]}': rename or "
            "remove the others, and add up parts of one figure"
        )
    unit = found[position][-1]
    if not units:
        return position, 1
    if unit in units:
        return position, units[unit]
    raise BapipeError(
        f"column '{header[position]}' has no unit; want one of {', '.join(units)}, such as "
        f"{found[position][0]}_{[*units][-1]}"
    )


def _layer(number: int, cells: Sequence[str], columns: Mapping[str, tuple[int, int]], source: str) -> ImportedLayer:
    def value(column: str) -> int:
        position, factor = columns[column]
        return figure(number, cells[position], column, factor)

    name = cells[columns["name"][0]]
    return ImportedLayer(
        name=name,
        kind="layer",
        inputs=(source,),
        outputs=(name,),
        forward_ns=value("forward"),
        backward_ns=value("backward"),
        output_bytes=(value("output"),),
        stash_bytes=value("output"),
        param_bytes=value("params"),
    )
