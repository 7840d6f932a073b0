"""A second simulator for plan/1, slow and plain, written independently of bapipe from its rules alone.

Everything is worked out again whenever it is needed: no heaps, no running totals; only what is asked of a `Case`, which
never changes, is remembered (`remembered`). The heart is `play`, which
stands on one instant after another and does there exactly what rule 4 says: what ends, transfers, actions, again until
nothing changes. The clock then jumps to the next instant at which something ends.
"""

import re
from fractions import Fraction
from functools import wraps
from itertools import permutations
from math import ceil

BUCKET_BYTES = 25 * 2**20
FIGURES = (
    "forward_ns",
    "input_grad_ns",
    "weight_grad_ns",
    "stash_bytes",
    "gradient_stash_bytes",
    "workspace_bytes",
)
HOST_FIGURES = ("forward_ns", "input_grad_ns", "weight_grad_ns", "backward_ns")


def simulate(plan, profiles):
    """Spans, transfers, all-reduces, updates, step and peak memory of a plan; ValueError if its table is illegal."""
    case = Case(plan, profiles)
    table = read_table(case)
    spans, transfers = play(case, table)
    syncs = all_reduces(case, table, spans)
    sums = shared_sums(case, table, spans, syncs)
    updates = run_updates(case, table, spans, syncs, sums)
    # Rule 6: the step ends when the last device is done, with its actions and its updates. Transfers do not count.
    ends = [0] + [end for _, _, _, end in spans.values()] + [end for _, _, _, end in updates]
    return {
        "step_ns": max(ends),
        "spans": [
            (device, f"{s}{phase}{m}", spans[s, phase, m][2], spans[s, phase, m][3])
            for device in case.device_names
            for s, phase, m in table[device]
        ],
        "transfers": transfers,
        "syncs": syncs + [(min(stages), size, start, end) for stages, size, start, end in sums],
        "updates": updates,
        "peak_bytes": {device: peak(case, table, spans, device) for device in case.device_names},
    }


# ---------------------------------------------------------------------------------------------------------------------
# What the files say


def half_up(number):
    """Rounded to the nearest integer, halves upwards, exactly."""
    exact = Fraction(number)
    return (2 * exact.numerator + exact.denominator) // (2 * exact.denominator)


def remembered(answer):
    """A method of `Case` that works out its answer to a question once."""

    @wraps(answer)
    def asked(self, *question, **more):
        key = (answer, question, tuple(more.items())) if more else (answer, question)
        if key not in self.answers:
            self.answers[key] = answer(self, *question, **more)
        return self.answers[key]

    return asked


class Case:
    """A plan with its profiles, as questions and answers."""

    def __init__(self, plan, profiles):
        self.answers = {}
        self.cluster = plan["cluster"]
        self.device_names = [device["name"] for device in self.cluster["devices"]]
        self.devices = {device["name"]: device for device in self.cluster["devices"]}
        self.stages = plan["stages"]
        self.order = plan["order"]
        self.size = plan["microbatch_size"]
        self.micro_batches = range(plan["num_microbatches"])
        self.last_stage = len(self.stages) - 1
        self.profiles = profiles
        self.used_kinds = []
        for stage in self.stages:
            if not stage["devices"] or len(set(stage["devices"])) != len(stage["devices"]):
                raise ValueError(f"A stage needs one or more different devices, not {stage['devices']}.")
            for name in stage["devices"]:
                if name not in self.devices:
                    raise ValueError(f"A stage names the device {name!r}, which the cluster does not have.")
                kind = self.devices[name]["kind"]
                if kind not in profiles:
                    raise ValueError(f"There is no profile for the device kind {kind!r}.")
                if kind not in self.used_kinds:
                    self.used_kinds.append(kind)
        self.layer_figures = {kind: figures_at(profiles[kind], self.size) for kind in self.used_kinds}
        self.graphs = self.agreed_graphs()
        self.graph = self.graphs[self.used_kinds[0]]
        self.check_groups()
        self.check_stages()

    def agreed_graphs(self):
        """kind -> name -> inputs, {output: bytes}, {output: gradient bytes}, param and optimizer bytes.

        All kinds with as many members must agree.
        """
        graphs = {}
        for kind in self.used_kinds:
            graph = {}
            for layer in self.profiles[kind]["layers"]:
                sizes = dict(
                    zip(layer["outputs"], self.layer_figures[kind][layer["name"]]["output_bytes"], strict=True)
                )
                no_gradient = layer.get("no_gradient", [])
                graph[layer["name"]] = {
                    "inputs": layer["inputs"],
                    "bytes": sizes,
                    "with_gradient": set(sizes) - set(no_gradient),
                    "gradient_bytes": {t: 0 if t in no_gradient else b for t, b in sizes.items()},
                    "param_bytes": layer["param_bytes"],
                    "trained_bytes": layer.get("trained_bytes", layer["param_bytes"]),
                    "optimizer_state_bytes": layer["optimizer_state_bytes"],
                    "shares": layer.get("shares", []),
                    "shared_bytes": layer.get("shared_bytes", 0),
                    "shared_trained_bytes": layer.get("shared_trained_bytes", layer.get("shared_bytes", 0)),
                    "group_sum_bytes": layer.get("group_sum_bytes", 0),
                }
            graphs[kind] = graph
        for a in self.used_kinds:
            for b in self.used_kinds:
                sizes = [self.profiles[kind]["device"].get("members", 1) for kind in (a, b)]
                if list(graphs[a]) != list(graphs[b]) or (sizes[0] == sizes[1] and graphs[a] != graphs[b]):
                    raise ValueError("The profiles of the device kinds disagree on the graph or on its bytes.")
        return graphs

    def check_groups(self):
        """Rule 8: a group's profile is of its size; replicas, and stages with tied weights, are alike."""
        for stage in self.stages:
            for name in stage["devices"]:
                if self.members(name) != self.profiles[self.devices[name]["kind"]]["device"].get("members", 1):
                    raise ValueError(f"The profile of {name!r} is of another number of members.")
            if len({self.members(name) for name in stage["devices"]}) > 1:
                raise ValueError("The replicas of a stage are groups of unlike sizes.")
        sizes = {self.members(name) for stage in self.stages for name in stage["devices"]}
        if len(sizes) > 1 and any(layer["shared_bytes"] for layer in self.graph.values()):
            raise ValueError("Groups of unlike sizes share parameters.")

    def members(self, name):
        return len(self.devices[name].get("members", [name]))

    def graph_of(self, s):
        """The graph with the bytes of one member of the devices of stage s."""
        return self.graphs[self.devices[self.stages[s]["devices"][0]]["kind"]]

    def are_alike(self, s):
        """Whether stage s and the one after it are on groups of one size."""
        here, there = (self.members(self.stages[t]["devices"][0]) for t in (s, s + 1))
        return here == there

    def check_stages(self):
        home = {}
        for s, stage in enumerate(self.stages):
            if not stage["layers"]:
                raise ValueError(f"Stage {s} has no layers.")
            for name in stage["layers"]:
                if name not in self.graph or name in home:
                    raise ValueError(f"Stage {s} lists {name!r}, which is no layer or is in two stages.")
                home[name] = s
        if set(home) != set(self.graph):
            raise ValueError("Some layer is in no stage.")
        self.home = home
        for producer in self.graph:
            for consumer in self.graph:
                if set(self.graph[producer]["bytes"]) & set(self.graph[consumer]["inputs"]):
                    if home[producer] > home[consumer]:
                        raise ValueError(
                            f"Layer {consumer!r} is in an earlier stage than {producer!r}, which it needs."
                        )

    # -- devices ------------------------------------------------------------------------------------------------------

    def device_of(self, s, m):
        """Rule 2: micro-batch m runs on device number m mod r."""
        replicas = self.stages[s]["devices"]
        return replicas[m % len(replicas)]

    @remembered
    def speed(self, device):
        return Fraction(str(self.devices[device].get("speed", 1.0)))

    @remembered
    def overlaps(self, device):
        return self.devices[device].get("overlaps_transfers", True)

    @remembered
    def link_ns(self, source, target, size):
        """Rule 4: latency + ⌈bytes ÷ bandwidth⌉ on the link from source to target."""
        same_host = self.devices[source]["host"] == self.devices[target]["host"]
        link = self.cluster["intra_host"] if same_host else self.cluster["inter_host"]
        for entry in self.cluster.get("links", []):
            if entry["from"] == source and entry["to"] == target:
                link = entry
        return self.message_ns(link, size)

    def member_link_ns(self, device, size):
        """Rule 8: the slowest message between two members of a group."""
        named = {(entry["from"], entry["to"]): entry for entry in self.cluster.get("links", [])}
        pairs = permutations(self.devices[device].get("members", []), 2)
        return max(self.message_ns(named.get(pair, self.cluster["intra_host"]), size) for pair in pairs)

    def ring_ns(self, names, size, with_members):
        """Rule 5: 2 (r - 1) messages of an r-th of the bytes over the slowest link, r counting members if they sum, too."""
        r = sum(self.members(name) for name in names) if with_members else len(names)
        if r == 1 or size == 0:
            return 0
        part = ceil(Fraction(size, r))
        hops = [self.link_ns(source, target, part) for source, target in permutations(names, 2)]
        if with_members:
            hops += [self.member_link_ns(name, part) for name in names if self.members(name) > 1]
        own = self.host_sum_link(names)
        if own is not None:
            hops.append(self.message_ns(own, part))
        return 2 * (r - 1) * max(hops)

    def sum_ns(self, names, size, in_groups):
        """Rule 8: the gradients that the members sum around all of them, then the others around partners."""
        return self.ring_ns(names, in_groups, True) + self.ring_ns(names, size - in_groups, False)

    def message_ns(self, link, size):
        return link["latency_ns"] + ceil(Fraction(size * 10**9, link["bytes_per_s"]))

    def host_sum_link(self, names):
        """Rule 5: how devices of one host sum with their own compute, where the cluster says so."""
        hosts = {self.devices[name]["host"] for name in names}
        return self.cluster.get("intra_host_sum") if len(hosts) == 1 else None

    # -- stages -------------------------------------------------------------------------------------------------------

    def of_layers(self, s, last=None):
        names = self.stages[s]["layers"]
        return names if last is None else names[len(names) - last :]

    def figures(self, s, device, figure, last=None):
        """That figure of the stage's layers (of its `last` layers only) in the profile of the device's kind."""
        names = self.of_layers(s, last)
        return [self.layer_figures[self.devices[device]["kind"]][name][figure] for name in names]

    @remembered
    def stage_ns(self, s, device, figure, last=None):
        """Rule 1: the sum over the layers, divided by the speed, rounded half up; not the part that members exchange."""
        return self.divided(self.of_layers(s, last), device, figure)

    def divided(self, names, device, figure):
        mine = self.layer_figures[self.devices[device]["kind"]]
        total = sum(mine[name][figure] for name in names)
        exchanged = sum(mine[name].get(f"exchange {figure}", 0) for name in names)
        return half_up((total - exchanged) / self.speed(device)) + exchanged

    def host_ns(self, s, device, figure, last=None):
        """Rule 1: the sum of the host's times, whatever the speed of the device."""
        return sum(self.figures(s, device, f"host {figure}", last))

    def update_ns(self, s, device):
        """The update of the stage's layers and, by their part of it, of its copies of shared parameters."""
        mine = self.layer_figures[self.devices[device]["kind"]]
        total = sum(self.figures(s, device, "update_ns"))
        for owner, _, trained in copies(self, s):
            if trained:
                total += mine[owner]["update_ns"] * trained // self.graph_of(s)[owner]["trained_bytes"]
        return half_up(total / self.speed(device))

    @remembered
    def backward_ns(self, s, device, last=None):
        """Rule 1: B = I + W; where a layer of those has a B of its own, the sum of the layers' own, rounded once."""
        if not any(self.figures(s, device, "has_backward", last)):
            return self.stage_ns(s, device, "input_grad_ns", last) + self.stage_ns(s, device, "weight_grad_ns", last)
        return self.stage_ns(s, device, "backward_ns", last)

    @remembered
    def whole_ns(self, s, phase, device, last=None):
        """Rule 1: the device's time and the host's, recomputed F included in B and I; the longer one counts."""
        again, mine = self.again_ns(s, device), self.layer_figures[self.devices[device]["kind"]]
        host_again = sum(mine[name]["host forward_ns"] for name in self.again(s))
        times = {
            "F": (self.stage_ns(s, device, "forward_ns", last), self.host_ns(s, device, "forward_ns", last)),
            "B": (
                again + self.backward_ns(s, device, last),
                host_again + self.host_ns(s, device, "backward_ns", last),
            ),
            "I": (
                again + self.stage_ns(s, device, "input_grad_ns", last),
                host_again + self.host_ns(s, device, "input_grad_ns", last),
            ),
            "W": (
                self.stage_ns(s, device, "weight_grad_ns", last),
                self.host_ns(s, device, "weight_grad_ns", last),
            ),
        }
        if not self.sends_back(s):
            times["I"] = (again, host_again)
            times["W"] = (self.backward_ns(s, device, last), self.host_ns(s, device, "backward_ns", last))
        return max(times[phase])

    @remembered
    def action_ns(self, s, phase, device):
        """What an action takes where it runs: on the whole device, or on one of its two lanes."""
        alone = self.alone_ns(s, phase, device)
        if not self.has_lanes(device):
            return alone
        if phase == "W":
            until_i = self.on_lane(device, "B", self.alone_ns(s, "I", device))
            return self.on_lane(device, "B", self.alone_ns(s, "I", device) + alone) - until_i
        return self.on_lane(device, "F" if phase == "F" else "B", alone)

    def has_lanes(self, device):
        return self.devices[device].get("side_by_side", False)

    def lanes(self, device):
        return ["forward", "backward"] if self.has_lanes(device) else ["only"]

    def lane_of(self, action, device):
        """The forward lane, the backward lane, or the only one."""
        if not self.has_lanes(device):
            return "only"
        return "forward" if action[1] == "F" else "backward"

    def on_lane(self, device, phase, alone):
        """`alone` ns of work on the whole device take this long on the lane of F or of B, which has its share of it."""
        homes = [s for s, stage in enumerate(self.stages) if device in stage["devices"]]
        work = {lane: sum(self.alone_ns(s, lane, device) for s in homes) for lane in "FB"}
        if work[phase] == 0:
            return alone
        share = Fraction(work[phase], work["F"] + work["B"])
        return half_up(alone / share)

    @remembered
    def alone_ns(self, s, phase, device):
        """Rule 1, of the whole stage."""
        return self.whole_ns(s, phase, device)

    @remembered
    def sends_back(self, s):
        """Rule 1: whether some tensor that comes into stage s has a gradient."""
        coming = {name for name in self.graph if self.home[name] < s}
        staying = set(self.graph) - coming
        used = {tensor for name in staying for tensor in self.graph[name]["inputs"]}
        return any(used & self.graph[name]["with_gradient"] for name in coming)

    @remembered
    def left_for_w(self, s, device):
        """What the I of one micro-batch leaves for its W."""
        return sum(self.figures(s, device, "gradient_stash_bytes")) if self.sends_back(s) else 0

    def again(self, s):
        """The layers of a stage that run once more before its backward."""
        stage = self.stages[s]
        return stage.get("recompute_layers", stage["layers"]) if stage["recompute"] else []

    @remembered
    def again_ns(self, s, device):
        """Rule 1: their F, a sum of its own that is divided and rounded by itself."""
        return self.divided(self.again(s), device, "forward_ns")

    @remembered
    def held_bytes(self, s, device):
        """(what lives from F to the end of the backward, what lives besides from the start of the backward)."""
        mine = self.layer_figures[self.devices[device]["kind"]]
        again = self.again(s)
        second = sum(mine[name]["stash_bytes"] for name in again)
        if again and "recompute_layers" not in self.stages[s]:
            return self.received_bytes(s), second
        first = sum(mine[name]["stash_bytes"] for name in self.stages[s]["layers"] if name not in again)
        graph = self.graph_of(s)
        for producer, layer in graph.items():
            for tensor, size in layer["bytes"].items():
                users = {name for name, other in graph.items() if tensor in other["inputs"]}
                into = producer not in again and users & set(again)
                out_of = producer in again and users & (set(self.stages[s]["layers"]) - set(again))
                if into or out_of:
                    first += size
        return first, second

    @remembered
    def sent_bytes(self, s, what):
        """Rule 8: what the link of a member carries after stage s; between unlike groups, the larger end's bytes."""
        ends = [s] if self.are_alike(s) else [s, s + 1]
        return max(self.cut_bytes(s, what, by=end) for end in ends)

    @remembered
    def received_bytes(self, s):
        """Rule 8: the activations that a member gets before stage s; from an unlike group, as its own profile says."""
        if s == 0:
            return 0
        return self.cut_bytes(s - 1, "bytes", by=s - 1 if self.are_alike(s - 1) else s)

    @remembered
    def cut_bytes(self, s, what, by):
        """Rule 3: bytes (or gradient bytes) of all tensors made in stage s or before and used after stage s.

        They are those of a member of the devices of stage `by`.
        """
        if s < 0 or s >= self.last_stage:
            return 0
        total = 0
        graph = self.graph_of(by)
        for producer, layer in graph.items():
            for tensor in layer["bytes"]:
                users = [self.home[name] for name, other in graph.items() if tensor in other["inputs"]]
                if self.home[producer] <= s and any(user > s for user in users):
                    total += layer[what][tensor]
        return total


def figures_at(profile, size):
    """layer name -> figure -> value at the micro-batch size; interpolated linearly and rounded half up if not measured."""
    measured = {}
    for entry in profile["measurements"]:
        measured[entry["microbatch_size"]] = entry["layers"]
    if not min(measured) <= size <= max(measured):
        raise ValueError(f"Micro-batch size {size} is outside the measured sizes {sorted(measured)}.")
    low = max(known for known in measured if known <= size)
    high = min(known for known in measured if known >= size)

    def between(at_low, at_high):
        if low == high:
            return at_low
        return half_up(at_low + Fraction((at_high - at_low) * (size - low), high - low))

    figures = {}
    for number, layer in enumerate(profile["layers"]):
        at_low, at_high = measured[low][number], measured[high][number]
        values = {figure: between(at_low.get(figure, 0), at_high.get(figure, 0)) for figure in FIGURES}
        values["has_backward"] = "backward_ns" in at_low or "backward_ns" in at_high
        values["backward_ns"] = values["input_grad_ns"] + values["weight_grad_ns"]
        if values["has_backward"]:
            own = [at.get("backward_ns", at["input_grad_ns"] + at["weight_grad_ns"]) for at in (at_low, at_high)]
            values["backward_ns"] = between(*own)
        # Of the exchange in B as much is in I as I takes, the rest in W.
        forward, backward = (
            between(at_low.get(f"{phase}_exchange_ns", 0), at_high.get(f"{phase}_exchange_ns", 0))
            for phase in ("forward", "backward")
        )
        values["exchange forward_ns"] = forward
        values["exchange input_grad_ns"] = min(backward, values["input_grad_ns"])
        rest = backward - values["exchange input_grad_ns"]
        values["exchange weight_grad_ns"] = min(rest, values["weight_grad_ns"])
        apart = values["exchange input_grad_ns"] + values["exchange weight_grad_ns"]
        values["exchange backward_ns"] = backward if values["has_backward"] else apart
        values["output_bytes"] = [
            between(a, b) for a, b in zip(at_low["output_bytes"], at_high["output_bytes"], strict=True)
        ]
        # Times of the host: between a size that has them and one that has not, those of the one that has.
        at_host = [at["host"] for at in (at_low, at_high) if "host" in at] or [dict.fromkeys(HOST_FIGURES, 0)]
        for figure in HOST_FIGURES:
            values[f"host {figure}"] = between(at_host[0][figure], at_host[-1][figure])
        values["update_ns"] = layer.get("update_ns", 0)
        figures[layer["name"]] = values
    return figures


# ---------------------------------------------------------------------------------------------------------------------
# Rule 8: the table


def read_table(case):
    """device -> [(stage, phase, micro-batch), ...]; all of rule 8 but the deadlock, which `play` finds."""
    if len(case.order) != len(case.device_names):
        raise ValueError(f"The order has {len(case.order)} lists for {len(case.device_names)} devices.")
    table = {}
    places = {}
    for device, actions in zip(case.device_names, case.order, strict=True):
        table[device] = []
        for position, text in enumerate(actions):
            match = re.fullmatch(r"([0-9]+)([FBIW])([0-9]+)", text)
            if match is None:
                raise ValueError(f"{text!r} is not an action.")
            s, phase, m = int(match[1]), match[2], int(match[3])
            if s > case.last_stage or m not in case.micro_batches:
                raise ValueError(f"{text} names a stage or a micro-batch that the plan does not have.")
            if case.device_of(s, m) != device:
                raise ValueError(f"{text} stands in the order of {device}, not of {case.device_of(s, m)}.")
            if (s, phase, m) in places:
                raise ValueError(f"{text} is there twice.")
            places[s, phase, m] = position
            table[device].append((s, phase, m))
    for s in range(len(case.stages)):
        for m in case.micro_batches:
            phases = [phase for phase in "FBIW" if (s, phase, m) in places]
            if phases not in (["F", "B"], ["F", "I", "W"]):
                raise ValueError(f"Stage {s} does {phases} of micro-batch {m}, not F and B, nor F, I and W.")
            if sorted(phases, key=lambda phase: places[s, phase, m]) != phases:
                raise ValueError(f"Stage {s} does not do {', '.join(phases)} of micro-batch {m} in that order.")
    for device in case.device_names:
        arrivals = [m for s, phase, m in table[device] if s == case.last_stage and phase == "F"]
        if arrivals != sorted(arrivals):
            raise ValueError(f"The last stage does F on {device} in the order {arrivals}, not ascending.")
    return table


# ---------------------------------------------------------------------------------------------------------------------
# Rules 2 to 4: the timeline


def play(case, table):
    """({(stage, phase, micro-batch): (device, text, start, end)}, [transfers in order of their start])."""
    now = 0
    running = []  # (device, action, start, end) of actions begun but not ended
    flying = []  # (transfer, start, end) of transfers begun but not ended; transfer as made by `transfer_after`
    waiting = []  # transfers that are ready and have not begun
    ended = set()  # actions that have ended
    arrived = set()  # (direction, sender stage, micro-batch) whose data is at the receiver
    spans = {}
    flights = []

    def transfer_after(action):
        """The (ready, sender, direction, m, from, to, bytes) that an action's end sets off, or None: rule 3."""
        s, phase, m = action
        if phase == "F" and s < case.last_stage:
            return (now, s, "F", m, case.device_of(s, m), case.device_of(s + 1, m), case.sent_bytes(s, "bytes"))
        if phase in "BI" and s > 0:
            size = case.sent_bytes(s - 1, "gradient_bytes")
            return (now, s, "B", m, case.device_of(s, m), case.device_of(s - 1, m), size)
        return None

    def precedence(transfer):
        """Rule 4: readiness, then the lower (sending) stage, then forward first, then the lower micro-batch."""
        ready, sender, direction, m = transfer[:4]
        return (ready, sender, "FB".index(direction), m)

    def inputs_are_there(action):
        s, phase, m = action
        if phase == "F":  # rule 3: F of the stage before and its transfer
            return s == 0 or ("F", s - 1, m) in arrived
        if phase == "W":  # rule 3: its own I
            return (s, "I", m) in ended
        # rule 3: its own F, and B or I of the stage after and its transfer
        return (s, "F", m) in ended and (s == case.last_stage or ("B", s + 1, m) in arrived)

    def computes(device, lanes=("only", "forward", "backward")):
        return any(busy == device and case.lane_of(action, device) in lanes for busy, action, _, _ in running)

    def is_held(device):
        """Rule 4: a transfer occupies those of its ends that do not overlap."""
        return not case.overlaps(device) and any(device in transfer[4:6] for transfer, _, _ in flying)

    def may_fly(transfer):
        """Rule 4: the link is idle, and so is every end that does not overlap."""
        source, target = transfer[4:6]
        if any(other[4:6] == (source, target) for other, _, _ in flying):
            return False
        return all(case.overlaps(end) or not (computes(end) or is_held(end)) for end in (source, target))

    lists = {
        (device, lane): [action for action in table[device] if case.lane_of(action, device) == lane]
        for device in case.device_names
        for lane in case.lanes(device)
    }
    while True:
        changed = True
        while changed:
            changed = False
            # Rule 4, first: what ends.
            for entry in [entry for entry in running if entry[3] == now]:
                device, action, start, end = entry
                running.remove(entry)
                ended.add(action)
                changed = True
                transfer = transfer_after(action)
                if transfer is not None:
                    _, sender, direction, m, source, target, size = transfer
                    if source == target or size == 0:
                        arrived.add((direction, sender, m))  # takes no time, occupies nothing
                    else:
                        waiting.append(transfer)
            for entry in [entry for entry in flying if entry[2] == now]:
                (_, sender, direction, m, source, target, _), start, end = entry
                flying.remove(entry)
                arrived.add((direction, sender, m))
                changed = True
            # Rule 4, then: transfers that can start.
            for transfer in sorted(waiting, key=precedence):
                if may_fly(transfer):
                    _, sender, direction, m, source, target, size = transfer
                    end = now + case.link_ns(source, target, size)
                    waiting.remove(transfer)
                    flying.append((transfer, now, end))
                    flights.append((source, target, direction, sender, m, now, end))
                    changed = True
            # Rule 4, then: actions that can start (rule 2: the head of each device's order, as early as it can).
            for (device, lane), mine in lists.items():
                head = next((action for action in mine if action not in spans), None)
                if head and not computes(device, [lane]) and not is_held(device) and inputs_are_there(head):
                    s, phase, m = head
                    end = now + case.action_ns(s, phase, device)
                    running.append((device, head, now, end))
                    spans[head] = (device, f"{s}{phase}{m}", now, end)
                    changed = True
        ends = [entry[3] for entry in running] + [entry[2] for entry in flying]
        if not ends:
            break
        now = min(ends)

    stuck = [actions for actions in table.values() if any(action not in spans for action in actions)]
    if stuck:  # rule 8: nothing deadlocks
        heads = [next(action for action in actions if action not in spans) for actions in stuck]
        raise ValueError("The table deadlocks: " + ", ".join(f"{s}{p}{m}" for s, p, m in heads) + " never start.")
    return spans, flights


# ---------------------------------------------------------------------------------------------------------------------
# Rules 5 and 6: all-reduces and updates


def buckets_of(case, s):
    """[(bytes, those that members sum, k)]: its gradients are all there once the k last layers of the stage are done."""
    buckets = []
    held = 0
    in_groups = 0
    layers = case.stages[s]["layers"]
    done = 0  # how many layers from the end must be done for the gradients held
    for k in range(1, len(layers) + 1):
        layer = case.graph_of(s)[layers[-k]]
        # Without replicas only the members of a group have anything to sum.
        size = layer["trained_bytes"] if len(case.stages[s]["devices"]) > 1 else layer["group_sum_bytes"]
        in_groups += layer["group_sum_bytes"]
        if size > 0:  # a layer without trained parameters has no gradient for a bucket to wait for
            held += size
            done = k
        if held >= BUCKET_BYTES:
            buckets.append((held, in_groups, done))
            held = in_groups = 0
    if held > 0:
        buckets.append((held, in_groups, done))
    return buckets


def all_reduces(case, table, spans):
    """Rule 5: [(stage, bucket bytes, start, end)]."""
    syncs = []
    for s, stage in enumerate(case.stages):
        free = 0  # the end of the bucket before
        own = case.host_sum_link(stage["devices"])
        for size, in_groups, k in buckets_of(case, s):
            ready = []
            for device in stage["devices"]:
                backwards = [action for action in table[device] if action[0] == s and action[1] in "BW"]
                if not backwards:
                    ready.append(0)
                    continue
                last = backwards[-1]
                if own is not None:  # the devices' compute sums, so it is free first
                    ready.append(spans[last][3])
                    continue
                moment = spans[last][2]
                after = case.whole_ns(s, last[1], device, last=k)
                if case.has_lanes(device):  # on the lane, the time since the start of B, or of the I before the W
                    before = case.alone_ns(s, "I", device) if last[1] == "W" else 0
                    after = case.on_lane(device, "B", before + after) - case.on_lane(device, "B", before)
                ready.append(moment + after)
            start = max(ready + [free])
            free = start + case.sum_ns(stage["devices"], size, in_groups)
            syncs.append((s, size, start, free))
    return syncs


def groups(case):
    """[(the layer that counts shared parameters, {each other layer that uses them: (bytes, trained)})], by first users."""
    found = {}
    for name, layer in case.graph.items():
        if layer["shared_bytes"] > 0:
            owner = next(other for other in layer["shares"] if case.graph[other]["shared_bytes"] == 0)
            found.setdefault(owner, {})[name] = layer["shared_bytes"], layer["shared_trained_bytes"]
    return list(found.items())


def shared_sums(case, table, spans, syncs):
    """Gradients of parameters that several stages use: [(stages, bytes, start, end)]."""
    apart = []
    for place, (owner, users) in enumerate(groups(case)):
        stages = {case.home[name] for name in [owner, *users]}
        trained = max(size for _, size in users.values())
        if len(stages) > 1 and trained:
            apart.append((min(stages), place, stages, trained))
    sums = []
    for _, place, stages, size in sorted(apart, key=lambda item: item[:2]):
        devices = sorted({name for s in stages for name in case.stages[s]["devices"]})
        if len(devices) == 1:
            continue
        moments = [end for _, _, _, end in sums]
        moments += [end for s, _, _, end in syncs if s in stages]
        moments += [spans[action][3] for device in devices for action in table[device] if action[0] in stages]
        owned = case.graph[groups(case)[place][0]]
        in_groups = owned["group_sum_bytes"] * size // owned["trained_bytes"]
        sums.append((stages, size, max(moments), max(moments) + case.sum_ns(devices, size, in_groups)))
    return sums


def copies(case, s):
    """[(the layer that counts them, bytes, trained bytes)] of parameters that stage s uses and another stage counts."""
    found = []
    for owner, users in groups(case):
        if case.home[owner] != s and any(case.home[name] == s for name in users):
            found.append((owner, *(max(sizes) for sizes in zip(*users.values(), strict=True))))
    return found


def run_updates(case, table, spans, syncs, sums):
    """Rule 6: [(device, stage, start, end)], one at a time on a device after its last action."""
    updates = []
    for device in case.device_names:
        todo = []
        for s, stage in enumerate(case.stages):
            if device in stage["devices"]:
                own = [end for other, _, _, end in syncs if other == s]
                own += [end for stages, _, _, end in sums if s in stages]
                acts = [spans[action][3] for action in table[device] if action[0] == s]
                not_before = max(own) if own else max(acts, default=0)
                todo.append((not_before, s))
        clock = max([spans[action][3] for action in table[device]], default=0)
        for not_before, s in sorted(todo):
            start = max(clock, not_before)
            clock = start + case.update_ns(s, device)
            updates.append((device, s, start, clock))
    return updates


# ---------------------------------------------------------------------------------------------------------------------
# Rule 7: memory


def peak(case, table, spans, device):
    static = 0
    buffers = 0
    for s, stage in enumerate(case.stages):
        if device not in stage["devices"]:
            continue
        for name in stage["layers"]:
            layer = case.graph_of(s)[name]
            static += layer["param_bytes"] + layer["trained_bytes"] + layer["optimizer_state_bytes"]
        for owner, size, trained in copies(case, s):
            static += size + trained
            if trained:
                owned = case.graph_of(s)[owner]
                static += owned["optimizer_state_bytes"] * trained // owned["trained_bytes"]
        for m in case.micro_batches:
            if case.device_of(s, m) != device:
                continue
            if s > 0 and case.device_of(s - 1, m) != device:
                buffers += case.received_bytes(s)
            if s < case.last_stage and case.device_of(s + 1, m) != device:
                buffers += case.cut_bytes(s, "gradient_bytes", by=s)
    actions = table[device]
    if case.has_lanes(device):
        return static + buffers + peak_of_lanes(case, actions, spans, device)
    place = {action: number for number, action in enumerate(actions)}
    lives = []  # (the first and the last place at which bytes live, the bytes)
    for (s, phase, m), first in place.items():
        if phase != "F":
            continue
        backward = place[s, "B", m] if (s, "B", m) in place else place[s, "I", m]
        last = place[s, "B", m] if (s, "B", m) in place else place[s, "W", m]
        kept, besides = case.held_bytes(s, device)
        lives += [(first, last, kept), (backward, last, besides)]
        if (s, "I", m) in place:
            lives.append((backward, last, case.left_for_w(s, device)))
    moments = [0]
    for now, (running_stage, _, _) in enumerate(actions):
        # Places in the order stand for time: what ends at an instant is freed before what starts there is counted.
        total = max(case.figures(running_stage, device, "workspace_bytes"))
        total += sum(size for since, until, size in lives if since <= now <= until)
        moments.append(total)
    return static + buffers + max(moments)


def peak_of_lanes(case, actions, spans, device):
    """The most that stashes and workspaces take when an action of either lane starts; no place stands for a time here."""
    most = 0
    for action in actions:
        _, _, now, _ = spans[action]
        total = max(case.figures(action[0], device, "workspace_bytes"))
        for other in actions:
            _, _, start, end = spans[other]
            if case.lane_of(other, device) != case.lane_of(action, device) and start <= now < end:
                total += max(case.figures(other[0], device, "workspace_bytes"))
        for s, m in {(s, m) for s, _, m in actions}:
            forward, *backwards = [(s, phase, m) for phase in "FBIW" if (s, phase, m) in spans]

            def lives(since, until=backwards[-1], now=now, action=action):
                """From the start of one action to the end of another, which holds its own even if it takes no time."""
                return spans[since][2] <= now and (now < spans[until][3] or action == until)

            kept, besides = case.held_bytes(s, device)
            total += kept if lives(forward) else 0
            total += besides if lives(backwards[0]) else 0
            if len(backwards) == 2 and lives(backwards[0]):
                total += case.left_for_w(s, device)
        most = max(most, total)
    return most
