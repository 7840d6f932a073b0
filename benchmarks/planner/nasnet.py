"""The graphs of NASNet-A (Zoph et al. 2018, arXiv:1707.07012, fig. 4), whose cells read the two cells before them."""

Inputs = list[tuple[str, ...]]
"""The tensors that each layer uses; layer i makes the tensor `l<i>`."""

MOBILE_CELLS = 4
LARGE_CELLS = 6
"""Normal cells between two reduction cells."""

CONVOLUTION = 4
"""Layers of a separable convolution: ReLU, depthwise, pointwise, batch norm; applied twice."""


class _Graph:
    """Layers so far, in topological order."""

    def __init__(self) -> None:
        self.inputs: Inputs = []

    def layer(self, *tensors: str) -> str:
        """Adds a layer that reads some tensors; returns what it makes."""
        self.inputs.append(tensors)
        return f"l{len(self.inputs) - 1}"

    def layers(self, tensor: str, count: int) -> str:
        """Adds layers one after another."""
        for _ in range(count):
            tensor = self.layer(tensor)
        return tensor

    def separable(self, tensor: str) -> str:
        return self.layers(tensor, 2 * CONVOLUTION)

    def normal(self, before: str, last: str) -> str:
        """A normal cell on the outputs of the two cells before it, each first made as wide as the cell."""
        p, h = self.layers(before, 3), self.layers(last, 3)
        blocks = (
            self.layer(self.separable(h), h),
            self.layer(self.separable(p), self.separable(h)),
            self.layer(self.layer(h), p),
            self.layer(self.layer(p), self.layer(p)),
            self.layer(self.separable(p), self.separable(p)),
        )
        return self.layer(p, *blocks)

    def reduction(self, before: str, last: str) -> str:
        """A reduction cell, which halves the sides of its planes."""
        p, h = self.layers(before, 3), self.layers(last, 3)
        first = self.layer(self.separable(p), self.separable(h))
        second = self.layer(self.layer(h), self.separable(p))
        third = self.layer(self.layer(h), self.separable(p))
        fourth = self.layer(self.layer(h), self.separable(first))
        fifth = self.layer(self.layer(first), second)
        return self.layer(second, third, fourth, fifth)


def nasnet(num_cells: int) -> Inputs:
    """Returns the tensors that each layer of NASNet-A uses: a stem, and three times so many normal cells."""
    graph = _Graph()
    before = stem = graph.layers("x", 2)
    last = graph.reduction(stem, stem)
    before, last = last, graph.reduction(before, last)
    for repeat in range(3):
        for _ in range(num_cells):
            before, last = last, graph.normal(before, last)
        if repeat < 2:
            before, last = last, graph.reduction(before, last)
    graph.layers(last, 3)  # ReLU, pooling, the classifier
    return graph.inputs
