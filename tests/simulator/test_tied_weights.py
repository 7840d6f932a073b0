"""What layers that share parameters cost in different stages, by hand."""

from msgspec.structs import replace

from bapipe.formats.layer_profile import LayerProfile
from bapipe.simulator.tied_weights import TiedGradient, TiedWeightCost, TiedWeights, inseparable_layers, legal_cuts


def layer(name: str, param_bytes: int = 0, shares: tuple[str, ...] = (), shared_bytes: int = 0) -> LayerProfile:
    return LayerProfile(
        name=name, kind="Linear", inputs=("x",), outputs=(name,), param_bytes=param_bytes,
        optimizer_state_bytes=2 * param_bytes, update_ns=param_bytes, shares=shares, shared_bytes=shared_bytes,
    )  # fmt: skip


TIED = (
    layer("embedding", 100, ("decoder", "head")),
    layer("block", 30),
    layer("decoder", 0, ("embedding", "head"), 100),
    layer("head", 10, ("embedding", "decoder"), 80),
)


def test_tied_weights_cost_nothing_if_one_stage_has_all_users() -> None:
    shares = TiedWeights(TIED)
    assert shares.cost_of({"embedding", "block", "decoder", "head"}) == TiedWeightCost()
    assert shares.cost_of({"block"}) == TiedWeightCost()


def test_a_stage_without_the_layer_that_counts_them_holds_a_copy() -> None:
    gradients = (TiedGradient(owner="embedding", num_bytes=100),)
    assert TiedWeights(TIED).cost_of({"embedding", "block"}) == TiedWeightCost(gradients=gradients)
    copied = TiedWeightCost(
        gradients=gradients, param_bytes=100, gradient_bytes=100, optimizer_bytes=200, update_ns=100
    )
    assert TiedWeights(TIED).cost_of({"decoder", "head"}) == copied
    assert TiedWeights(TIED).cost_of({"head"}) == copied


def test_tied_weights_that_are_not_trained_cost_only_their_copy() -> None:
    layers = [replace(made, trained_bytes=0, optimizer_state_bytes=0, update_ns=0) for made in TIED]
    layers[2:] = [replace(made, shared_trained_bytes=0) for made in layers[2:]]
    assert TiedWeights(layers).cost_of({"embedding", "block"}) == TiedWeightCost()
    assert TiedWeights(layers).cost_of({"head"}) == TiedWeightCost(param_bytes=100)
    assert not list(inseparable_layers(layers))


def test_a_copy_has_the_state_of_its_trained_part() -> None:
    half = replace(TIED[0], trained_bytes=50, optimizer_state_bytes=100, update_ns=60)
    user = replace(TIED[2], shared_trained_bytes=25)
    copied = TiedWeights([half, user]).cost_of({"decoder"})
    assert (copied.param_bytes, copied.gradient_bytes, copied.optimizer_bytes, copied.update_ns) == (100, 25, 50, 30)
    assert copied.gradients == (TiedGradient(owner="embedding", num_bytes=25),)


def test_only_parameters_of_unknown_size_tie_layers_together() -> None:
    assert not list(inseparable_layers(TIED))
    assert list(inseparable_layers([layer("a", 5, ("c",)), layer("b"), layer("c", 0, ("a",))])) == [(0, 2)]


def test_cuts_are_legal_where_they_part_no_layers_that_share_an_unknown_size() -> None:
    """Of seven layers, 1 and 3 are inseparable, and so are 2 and 4: cuts 2, 3 and 4 are between them."""
    shares = {1: ("l3",), 3: ("l1",), 2: ("l4",), 4: ("l2",)}
    assert legal_cuts([layer(f"l{i}", shares=shares.get(i, ())) for i in range(7)]) == [1, 5, 6]
    assert legal_cuts([layer("only")]) == []
    assert legal_cuts(TIED) == [1, 2, 3]
