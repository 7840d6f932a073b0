"""The layers as a chain on one kind of device: the simulator's cost of any interval of layers, by prefix sums.

One interval at a time, in Python integers. `interval_times.py` and `interval_memory.py` compute the same costs for all
intervals at once, with numpy.
"""

from collections.abc import Sequence
from copy import copy
from itertools import accumulate
from operator import add, sub

from bapipe.formats.profile import ModelProfile
from bapipe.simulator.cuts import kept_tensor_bytes
from bapipe.simulator.interval_costs import cut_bytes, gradient_crosses
from bapipe.simulator.layer_totals import LayerTotals, layer_totals, sum_totals
from bapipe.simulator.stage import Stage, StageCost
from bapipe.simulator.stage_cost import cost_of_totals, fill_buckets, group_bucket_bytes
from bapipe.simulator.tied_weights import TiedWeightCost, TiedWeights


class Chain:
    """A profile at one micro-batch size, in the profile's layer order, on devices of one kind and speed.

    Cut c lies before layer c: cut 0 is the start of the chain, cut `num_layers` its end.

    Attributes:
        device_kind: the kind of device that the profile was measured on.
        num_members: how many members a device has if it is a group, else 1.
        send_bytes, grad_bytes: bytes of activations and of gradients per micro-batch that cross each cut. [layers + 1]
    """

    def __init__(self, profile: ModelProfile, microbatch_size: int, speed: float) -> None:
        measured = profile.at(microbatch_size)
        self._rows = list(zip(profile.layers, measured, strict=True))
        self.num_layers, self.device_kind = len(measured), profile.device.kind
        self._speed = speed
        totals = [layer_totals(layer, m) for layer, m in zip(profile.layers, measured, strict=True)]
        # Sums over the layers before each cut. [layers + 1]
        self._totals = list(accumulate(totals, _add, initial=LayerTotals()))
        self._workspace = [m.workspace_bytes for m in measured]
        self.num_members = profile.device.num_members
        self._group_gradients = [layer.group_gradient_bytes for layer in profile.layers]
        # The bytes of gradients that are all-reduced, without and with replicas. [2][layers]
        self._summed = [[layer.summed_bytes(has_replicas=any_) for layer in profile.layers] for any_ in (False, True)]
        self._has_group_sums = any(self._group_gradients)
        self.send_bytes, self.grad_bytes = (sums.tolist() for sums in cut_bytes(profile, microbatch_size))
        # Whether a stage that begins at each cut sends a gradient back. [layers + 1]
        self._sends_gradient = gradient_crosses(profile).tolist()
        self._names = [layer.name for layer in profile.layers]
        self._tied_weights = TiedWeights(profile.layers)
        # Caches, because the layouts that a search simulates have most of their intervals in common.
        self._costs: dict[tuple[int, int, frozenset[int], bool], StageCost] = {}
        self._buckets: dict[tuple[int, int, bool], tuple[tuple[int, int], ...]] = {}

    def at_speed(self, speed: float) -> "Chain":
        """Returns the same layers on devices of another speed."""
        other = copy(self)
        other._speed, other._costs = speed, {}
        return other

    def cost(
        self, start: int, stop: int, *, recompute: frozenset[int] = frozenset(), has_replicas: bool = False
    ) -> StageCost:
        """Returns the cost of a stage with layers [start, stop) on one device.

        Args:
            recompute: the numbers of the layers that are recomputed.
            has_replicas: whether the device is one of several replicas, which sum their gradients.
        """
        key = (start, stop, recompute, has_replicas)
        cost = self._costs.get(key)
        if cost is None:
            ends = [end for end, _ in self.buckets(start, stop, has_replicas=has_replicas)]
            cost = self._costs[key] = cost_of_totals(
                self._totals_of(start, stop),
                max(self._workspace[start:stop]),
                # The backward begins with the last layer: a bucket is complete after that of the last `end` layers.
                [self._totals_of(stop - end, stop) for end in ends],
                speed=self._speed,
                recomputed=sum_totals(self._totals_of(i, i + 1) for i in recompute),
                tied=self.tied_weight_cost(start, stop),
                sends_gradient=self._sends_gradient[start],
            )
        return cost

    def kept_tensor_bytes(self, start: int, stop: int, recompute: frozenset[int]) -> int | None:
        """Returns the bytes of the tensors that layers [start, stop) keep because only some of them are recomputed.

        None if all or none of them are recomputed.
        """
        if len(recompute) in (0, stop - start):
            return None
        return kept_tensor_bytes(self._rows, self._names[start:stop], {self._names[i] for i in recompute})

    def tied_weight_cost(self, start: int, stop: int) -> TiedWeightCost:
        """Returns the memory and gradients that tied weights add to a stage with layers [start, stop)."""
        return self._tied_weights.cost_of(frozenset(self._names[start:stop]))

    def buckets(self, start: int, stop: int, *, has_replicas: bool) -> tuple[tuple[int, int], ...]:
        """Returns the all-reduce buckets of layers [start, stop) as `simulator.stage_cost.fill_buckets` does."""
        if not has_replicas and not self._has_group_sums:
            return ()
        key = (start, stop, has_replicas)
        if key not in self._buckets:
            self._buckets[key] = fill_buckets(self._summed[has_replicas][start:stop][::-1])
        return self._buckets[key]

    def group_bucket_bytes(self, start: int, stop: int, *, has_replicas: bool) -> tuple[int, ...]:
        """Returns the bytes of each of these buckets that members of a group sum; () if members sum nothing."""
        if not self._has_group_sums:
            return ()
        ends = [end for end, _ in self.buckets(start, stop, has_replicas=has_replicas)]
        return group_bucket_bytes(ends, self._group_gradients[start:stop][::-1])

    def _totals_of(self, start: int, stop: int) -> LayerTotals:
        return LayerTotals(*map(sub, self._totals[stop], self._totals[start]))


def stage_on(chains: Sequence[Chain], start: int, stop: int, *, recompute: frozenset[int]) -> Stage:
    """Returns the stage with layers [start, stop) and one replica per chain.

    Args:
        chains: the layers on each replica's device. [replicas]
        recompute: the numbers of the layers that are recomputed.
    """
    has_replicas = len(chains) > 1
    return Stage(
        costs=tuple(chain.cost(start, stop, recompute=recompute, has_replicas=has_replicas) for chain in chains),
        # As in the simulator, the sizes at a cut come from the profile of the first replica.
        num_members=chains[0].num_members,
        send_bytes=chains[0].send_bytes[stop],
        grad_bytes=chains[0].grad_bytes[stop],
        input_bytes=chains[0].send_bytes[start],
        input_grad_bytes=chains[0].grad_bytes[start],
        bucket_bytes=tuple(num_bytes for _, num_bytes in chains[0].buckets(start, stop, has_replicas=has_replicas)),
        group_bucket_bytes=chains[0].group_bucket_bytes(start, stop, has_replicas=has_replicas),
        tied_gradients=chains[0].tied_weight_cost(start, stop).gradients,
        recompute=bool(recompute),
        kept_tensor_bytes=chains[0].kept_tensor_bytes(start, stop, recompute),
    )


def _add(sums: LayerTotals, layer: LayerTotals) -> LayerTotals:
    return LayerTotals(*map(add, sums, layer))
