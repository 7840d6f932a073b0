"""Parses the layer tables of ParaDL (Kahira et al. 2021, arXiv:2104.09075), a line for each layer of a chain.

    Dataset|ImageNet
    Input|1280000x3x226x226
    Model|VGG16
    CONV1_1|3x226x226|3x64x3x3|64x226x226|0.008245589

A line has the name, the input (channels and extents), the weights (channels, filters and window), the output, and the
seconds of forward and backward of one sample. Lines that begin with `#` are comments. The tables are peculiar:

- If one layer only has a time, it is that of the whole network; here each layer has a share in proportion to its
  multiplications, as ParaDL itself divides it.
- Weights of layers without a window (norms, activations) count as none. Biases are not in the tables, nor are the
  second inputs of additions.
- Forward and backward are one time. A backward has twice the products of a forward, so the forward is a third.
"""

import re
from collections.abc import Sequence
from fractions import Fraction
from math import prod

from bapipe.errors import BapipeError
from bapipe.importers.figures import figure
from bapipe.importers.to_profile import ImportedLayer, forward_of
from bapipe.units import MAX_INT

BYTES_PER_VALUE = 4
_EXTENTS = re.compile(r"[0-9]{1,9}(x[0-9]{1,9}){0,7}")
_WANTED = "want NAME|CxWxH|CxFxKxK|FxWxH|seconds"


def is_paradl(text: str) -> bool:
    """Returns whether the text of a file looks like a table of ParaDL."""
    return text.lstrip().startswith("Dataset|")


def parse_paradl(text: str, batch_size: int) -> tuple[ImportedLayer, ...]:
    """Returns the layers of a table as a chain, with times and sizes of a whole batch.

    Raises:
        BapipeError: a line is none of the header or of a layer, or a figure is not a number or too large.
    """
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and not re.match(r"\s*(#|(Dataset|Input|Model)\|)", line):
            rows.append((number, [cell.strip() for cell in line.split("|")]))
    layers: list[ImportedLayer] = []
    for row, total_ns in zip(rows, _times_ns(rows, batch_size), strict=True):
        layers.append(_layer(*row, total_ns, batch_size, layers[-1].name if layers else "input"))
    return tuple(layers)


def _times_ns(rows: Sequence[tuple[int, Sequence[str]]], batch_size: int) -> list[int]:
    """Returns the time of each layer for a batch."""
    given = []
    for number, cells in rows:
        if len(cells) != 5:
            raise BapipeError(f"line {number} is no layer of ParaDL's table: '{'|'.join(cells)[:80]}'; {_WANTED}")
        given.append(figure(number, cells[4], "time", 10**9))
    if sum(ns > 0 for ns in given) != 1:
        return [ns * batch_size for ns in given]
    products = [_products(number, cells) for number, cells in rows]
    total = sum(products)
    return [int(Fraction(sum(given) * batch_size * part, total)) for part in products] if total else given


def _products(line: int, cells: Sequence[str]) -> int:
    """Returns how many multiplications a forward has for one sample."""
    weights, output = _extents(line, cells[2], "weights"), _extents(line, cells[3], "output")
    return prod(weights) * prod(output[1:])


def _layer(line: int, cells: Sequence[str], total_ns: int, batch_size: int, source: str) -> ImportedLayer:
    def num_bytes(cell: str, what: str, factor: int = 1) -> int:
        value = prod(_extents(line, cell, what)) * BYTES_PER_VALUE * factor
        if value > MAX_INT:
            raise BapipeError(f"line {line}: the {what} {cell} is too large")
        return value

    if total_ns > MAX_INT:
        raise BapipeError(f"line {line}: the time {cells[4]} is too large; want the seconds of one sample")
    name, output_bytes = f"{cells[0]}:{line}", num_bytes(cells[3], "output", batch_size)
    return ImportedLayer(
        name=name,
        kind=re.sub(r"_?[0-9].*", "", cells[0]) or cells[0],
        inputs=(source,),
        outputs=(name,),
        forward_ns=forward_of(total_ns),
        backward_ns=total_ns - forward_of(total_ns),
        output_bytes=(output_bytes,),
        stash_bytes=output_bytes,
        param_bytes=num_bytes(cells[2], "weights"),
    )


def _extents(line: int, cell: str, what: str) -> list[int]:
    if not _EXTENTS.fullmatch(cell):
        raise BapipeError(f"line {line}: '{cell[:40]}' is not the size of the {what}; {_WANTED}")
    return [int(extent) for extent in cell.split("x")]
