"""What a profile says of layers besides their measurements."""

from collections import OrderedDict

from torch import nn

from tests.models.small_modules import profile


def test_a_layer_may_be_named_target() -> None:
    module = nn.Sequential(
        OrderedDict([("stem", nn.Linear(6, 6)), ("target", nn.Linear(6, 6)), ("head", nn.Linear(6, 5))])
    )
    made = profile(module, 6)
    assert [(layer.name, layer.inputs) for layer in made.layers[1:]] == [
        ("target", ("stem",)),
        ("head", ("target",)),
        ("loss", ("head", "input:target")),
    ]
