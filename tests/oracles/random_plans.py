"""Random legal plans with their profiles: `random_case(seed)`, the same for the same seed. Standard library only."""

import random

MIB = 2**20


def random_case(seed):
    """(plan/1, {device kind: profile/1}) as decoded JSON; the devices of every fourth are groups."""
    plan, profiles = case_of(random.Random(f"bapipe reference {seed}"), random.Random(f"bapipe lanes {seed}"))
    if seed % 4 == 3:
        with_groups(random.Random(f"bapipe groups {seed}"), plan, profiles)
    if seed % 5 == 2:
        with_host_times(random.Random(f"bapipe host {seed}"), profiles)
    return plan, profiles


def with_host_times(rng, profiles):
    """Gives most of the measurements times of the host, as a GPU's have them."""
    for profile in profiles.values():
        top = rng.choice([10, 60, 200])
        for measurement in profile["measurements"]:
            if rng.random() < 0.2:
                continue
            for layer in measurement["layers"]:
                if rng.random() < 0.8:
                    names = ("forward_ns", "input_grad_ns", "weight_grad_ns", "backward_ns")
                    layer["host"] = {name: rng.choice([0, rng.randint(0, top)]) for name in names}


def case_of(rng, rng_of_lanes=None):
    """A case drawn from a source of random choices."""
    style = {
        "grid": rng.random() < 0.5,  # multiples of ten make ties
        "zero": rng.choice([0.0, 0.05, 0.3]),  # how often a time is nothing
        "top": rng.choice([10, 40, 200]),  # the longest time
        "unit": rng.choice([1, 1, 1, 10**6]),  # bytes a nanosecond at the usual bandwidth
        "large": rng.random() < 0.4,  # gradients of several buckets
        "even": rng.random() < 0.25,  # almost all times equal, for many ties
    }
    names = rng.sample(["cpu", "gpu", "fpga"], rng.randint(1, 3))
    cluster = random_cluster(rng, style, names)
    with_lanes(rng_of_lanes or rng, cluster)
    kinds = [kind for kind in names if any(device["kind"] == kind for device in cluster["devices"])]
    layers = random_layers(rng, style)
    microbatch_size = rng.randint(1, 8)
    profiles = random_profiles(rng, style, layers, kinds, microbatch_size)
    stages = random_stages(rng, layers, [device["name"] for device in cluster["devices"]])
    num_microbatches = rng.randint(1, 6)
    with_recomputed_layers(rng_of_lanes or rng, stages)
    plan = {
        "bapipe": "plan/1",
        "model": "random",
        "factory": None,
        "arguments": {},
        "profiles": {kind: "0" * 64 for kind in kinds},
        "cluster": cluster,
        "minibatch_size": microbatch_size * num_microbatches,
        "microbatch_size": microbatch_size,
        "num_microbatches": num_microbatches,
        "schedule": "1f1b",
        "stages": stages,
        "order": random_order(rng, stages, num_microbatches, [device["name"] for device in cluster["devices"]]),
        "prediction": {"step_ns": 0, "samples_per_s": 0.0, "bubble": 0.0, "ranks": []},
        "certificate": {"lower_bound_ns": 0, "gap": 0.0, "proven_optimal": False, "space": ""},
        "alternatives": [],
    }
    return plan, profiles


def nanoseconds(rng, style):
    if rng.random() < style["zero"]:
        return 0
    if style["even"]:
        return 10
    if style["grid"]:
        return 10 * rng.randint(0, style["top"] // 10)
    return rng.randint(0, style["top"])


def tensor_bytes(rng, style):
    if rng.random() < 0.1:
        return 0
    if style["even"]:
        return rng.choice([10, 10, 10, 20]) * style["unit"]
    if style["grid"]:
        return 10 * rng.randint(1, 8) * style["unit"]
    return rng.randint(1, 100 * style["unit"])


def random_link(rng, style):
    if style["even"]:
        return {"bytes_per_s": 10**9 * style["unit"], "latency_ns": 0}
    latency = rng.choice([0, 0, 10, 20, 50]) if style["grid"] else rng.randint(0, 40)
    factors = [1, 1, 1, 2, 5] if style["grid"] else [0.3, 0.5, 0.7, 1, 1.5, 3]
    return {"bytes_per_s": int(rng.choice(factors) * 10**9 * style["unit"]), "latency_ns": latency}


def random_cluster(rng, style, kinds):
    hosts = rng.sample(["a", "b", "c"], rng.randint(1, 3))
    speeds = rng.choice([[1.0], [1.0, 0.5, 2.0], [1.0, 0.5, 1.5, 0.3, 2.0], [0.4, 0.8, 1.6, 0.7, 1.1, 3.0]])
    slow = rng.choice([0.0, 0.4, 0.4, 1.0])  # how often a device does not overlap transfers
    devices = []
    for number in range(rng.choice([1, 2, 2, 3, 3, 3, 4, 4, 5])):
        device = {
            "name": f"d{number}",
            "host": rng.choice(hosts),
            "kind": rng.choice(kinds),
            "memory_bytes": 10**12,
            "speed": rng.choice(speeds),
            "overlaps_transfers": rng.random() >= slow,
        }
        if device["speed"] == 1.0 and rng.random() < 0.3:
            del device["speed"]
        if device["overlaps_transfers"] and rng.random() < 0.3:
            del device["overlaps_transfers"]
        devices.append(device)
    cluster = {
        "bapipe": "cluster/1",
        "devices": devices,
        "intra_host": random_link(rng, style),
        "inter_host": random_link(rng, style),
    }
    if rng.random() < 0.3:
        cluster["intra_host_sum"] = random_link(rng, style)
    names = [device["name"] for device in devices]
    pairs = [(a, b) for a in names for b in names if a != b]
    if pairs and rng.random() < 0.5:
        chosen = rng.sample(pairs, rng.randint(1, min(4, len(pairs))))
        cluster["links"] = [{"from": a, "to": b, **random_link(rng, style)} for a, b in chosen]
    elif rng.random() < 0.5:
        cluster["links"] = []
    return cluster


def with_lanes(rng, cluster):
    """Lets some devices that overlap transfers run forward and backward side by side, in a third of the cases."""
    often = rng.choice([0.0, 0.0, 0.0, 0.0, 0.5, 1.0])
    for device in cluster["devices"]:
        if device.get("overlaps_transfers", True):
            if rng.random() < often:
                device["side_by_side"] = True
            elif rng.random() < 0.2:
                device["side_by_side"] = False


def with_groups(rng, plan, profiles):
    """Makes groups of the devices of a case, of unlike sizes if no stage has unlike replicas and no weights are tied."""
    cluster, kind_of = plan["cluster"], {device["name"]: device["kind"] for device in plan["cluster"]["devices"]}
    tied = any(layer.get("shared_bytes") for layer in next(iter(profiles.values()))["layers"])
    may_differ = not tied and all(len({kind_of[name] for name in stage["devices"]}) == 1 for stage in plan["stages"])
    same = rng.randint(2, 4)
    sizes = dict(zip(profiles, rng.sample([1, 2, 3, 4], len(profiles)) if may_differ else [same] * 3))
    for device in cluster["devices"]:
        size = sizes[device["kind"]]
        if size == 1:
            continue
        device["members"] = [f"{device['name']}.{number}" for number in range(size)]
        if rng.random() < 0.2:
            a, b = rng.sample(device["members"], 2)
            slow = {"bytes_per_s": cluster["intra_host"]["bytes_per_s"] // 3 + 1, "latency_ns": rng.randint(0, 40)}
            cluster.setdefault("links", []).append({"from": a, "to": b, **slow})
    for kind, profile in profiles.items():
        if sizes[kind] > 1:
            profile["device"] |= {"members": sizes[kind], "split": rng.choice(["spatial", "filter", "tensor"])}
            share_bytes(rng, profile, sizes[kind] if may_differ else 1)
    if not may_differ:  # kinds with as many members agree on all bytes
        first, *others = profiles.values()
        for other in others:
            for layer, agreed in zip(other["layers"], first["layers"], strict=True):
                layer["group_sum_bytes"] = agreed.get("group_sum_bytes", 0)


def share_bytes(rng, profile, size):
    """Gives each member its part of the bytes, and says how many gradients the members sum."""
    for layer in profile["layers"]:
        for field in ("param_bytes", "trained_bytes", "optimizer_state_bytes"):
            if field in layer:
                layer[field] //= size
        trained = layer.get("trained_bytes", layer["param_bytes"])
        if rng.random() < 0.7:
            layer["group_sum_bytes"] = rng.choice([0, trained, rng.randint(0, trained)])
    for measurement in profile["measurements"]:
        for figures in measurement["layers"]:
            figures["output_bytes"] = [num_bytes // size for num_bytes in figures["output_bytes"]]
            if rng.random() < 0.6:
                backward_ns = figures.get("backward_ns", figures["input_grad_ns"] + figures["weight_grad_ns"])
                figures["forward_exchange_ns"] = rng.choice([figures["forward_ns"], figures["forward_ns"] // 2])
                figures["backward_exchange_ns"] = rng.choice([backward_ns, backward_ns // 3])


def random_layers(rng, style):
    """The layers of profile/1 but for update_ns, in topological order."""
    layers = []
    tensors = []  # names of the tensors made so far, the newest last
    model_inputs = ["input", "mask"][: rng.randint(1, 2)]
    for number in range(rng.choice([1, 2, 3, 3, 4, 4, 5, 5, 6, 6])):
        name = f"layer{number}"
        inputs = []
        if not tensors or rng.random() < 0.15:
            inputs.append(rng.choice(model_inputs))
        if tensors and (not inputs or rng.random() < 0.7):
            inputs.append(tensors[-1])
        while tensors and rng.random() < 0.4:  # skips
            tensor = rng.choice(tensors)
            if tensor not in inputs:
                inputs.append(tensor)
        outputs = [name] + [f"{name}.{extra}" for extra in range(1, rng.choice([1, 1, 1, 2, 3]))]
        if style["large"]:
            param_bytes = rng.choice([0, 1, rng.randint(0, 40 * MIB), 25 * MIB, 25 * MIB - 1, 30 * MIB, 13 * MIB])
        else:
            param_bytes = rng.choice([0, 0, rng.randint(1, 500), 100])
        layer = {
            "name": name,
            "kind": "Linear",
            "inputs": inputs,
            "outputs": outputs,
            "param_bytes": param_bytes,
            "optimizer_state_bytes": rng.choice([0, param_bytes, 2 * param_bytes]),
        }
        without = [tensor for tensor in outputs if rng.random() < 0.2]
        if without or rng.random() < 0.3:
            layer["no_gradient"] = without
        if rng.random() < 0.3:
            layer["shares"] = []
        layers.append(layer)
        tensors.extend(reversed(outputs))
    if rng.random() < 0.3:
        share_parameters(rng, layers)
    if rng.random() < 0.4:
        freeze_parameters(rng, layers)
    return layers


def share_parameters(rng, layers):
    """Up to two groups of layers that share parameters, which one of each group counts."""
    free = list(layers)
    for _ in range(rng.randint(1, 2)):
        counting = [layer for layer in free if layer["param_bytes"] > 0]
        if not counting or len(free) < 2:
            return
        owner = rng.choice(counting)
        users = rng.sample([layer for layer in free if layer is not owner], min(len(free) - 1, rng.choice([1, 1, 2])))
        group = [layer["name"] for layer in layers if layer is owner or layer in users]
        for layer in (owner, *users):
            layer["shares"] = [name for name in group if name != layer["name"]]
            free.remove(layer)
        for user in users:
            user["shared_bytes"] = rng.randint(1, owner["param_bytes"])


def freeze_parameters(rng, layers):
    """Some layers train only some of their parameters, or none; the bytes that a layer does not say are all trained."""
    trained = {}
    for layer in layers:
        trained[layer["name"]] = layer["param_bytes"]
        if rng.random() < 0.6:
            trained[layer["name"]] = layer["trained_bytes"] = rng.choice([0, rng.randint(0, layer["param_bytes"])])
    for layer in layers:
        if layer.get("shared_bytes"):
            owner = next(o for o in layers if o["name"] in layer["shares"] and not o.get("shared_bytes"))
            most = min(layer["shared_bytes"], trained[owner["name"]])
            layer["shared_trained_bytes"] = rng.choice([0, most, rng.randint(0, most)])


def random_profiles(rng, style, layers, kinds, size):
    """A profile for each kind. The kinds agree on the graph and on all bytes that cross or that belong to parameters."""

    def sizes():
        below, above = size - rng.randint(1, 4), size + rng.randint(1, 4)
        choices = [[size], [size, above]]
        if below >= 1:
            choices += [[below, size], [below, above], [below, above], [below, above]]
            if below >= 2:
                choices.append([below - 1, below, above])
        return rng.choice(choices)

    one_for_all = rng.random() < 0.5
    common = sizes()
    if one_for_all:  # the same sizes for each kind, and any bytes
        table = [[[tensor_bytes(rng, style) for _ in layer["outputs"]] for layer in layers] for _ in common]

        def output_bytes(number, measured):
            return table[common.index(measured)][number]

    else:  # sizes of each kind's own, and bytes in proportion to the size so that the kinds agree between them
        slopes = [[tensor_bytes(rng, style) for _ in layer["outputs"]] for layer in layers]

        def output_bytes(number, measured):
            return [slope * measured for slope in slopes[number]]

    profiles = {}
    for kind in kinds:
        measurements = []
        for measured in common if one_for_all else sizes():
            figures = []
            for number in range(len(layers)):
                whole, left = rng.random(), rng.random()
                figure = {
                    "forward_ns": nanoseconds(rng, style),
                    "input_grad_ns": nanoseconds(rng, style),
                    "weight_grad_ns": nanoseconds(rng, style),
                    "stash_bytes": rng.choice([0, rng.randint(0, 100), rng.randint(0, 100)]),
                    "workspace_bytes": rng.choice([0, rng.randint(0, 100), rng.randint(0, 300)]),
                    "output_bytes": list(output_bytes(number, measured)),
                }
                if whole < 0.2:
                    figure["backward_ns"] = nanoseconds(rng, style)
                if left < 0.4:
                    figure["gradient_stash_bytes"] = rng.randint(0, 100)
                if figure["workspace_bytes"] == 0 and rng.random() < 0.5:
                    del figure["workspace_bytes"]
                figures.append(figure)
            measurements.append({"microbatch_size": measured, "layers": figures})
        own = []
        for layer in layers:
            copy = {key: list(value) if isinstance(value, list) else value for key, value in layer.items()}
            update_ns = nanoseconds(rng, style)
            if update_ns or rng.random() < 0.5:
                copy["update_ns"] = update_ns
            own.append(copy)
        profiles[kind] = {
            "bapipe": "profile/1",
            "model": "random",
            "factory": None,
            "arguments": {},
            "device": {"kind": kind, "name": kind, "memory_bytes": 10**12},
            "dtype": "float32",
            "optimizer": "sgd",
            "environment": {},
            "layers": own,
            "measurements": measurements,
        }
    return profiles


def random_stages(rng, layers, devices):
    count = rng.choice([rng.randint(1, len(layers)), min(len(layers), rng.randint(2, 4))])
    cuts = [0, *sorted(rng.sample(range(1, len(layers)), count - 1)), len(layers)]
    recompute = rng.choice([0.0, 0.3, 0.6])
    replicate = rng.choice([0.0, 0.3, 0.6, 0.9])
    stages = []
    for first, after in zip(cuts, cuts[1:]):
        replicas = rng.randint(1, min(3, len(devices))) if rng.random() < replicate else 1
        stages.append(
            {
                "layers": [layer["name"] for layer in layers[first:after]],
                "devices": rng.sample(devices, replicas),
                "recompute": rng.random() < recompute,
            }
        )
    return stages


def with_recomputed_layers(rng, stages):
    """Lets half of the recomputing stages of several layers recompute only some of them."""
    for stage in stages:
        if stage["recompute"] and len(stage["layers"]) > 1 and rng.random() < 0.5:
            stage["recompute_layers"] = rng.sample(stage["layers"], rng.randint(1, len(stage["layers"]) - 1))


def random_order(rng, stages, num_microbatches, devices):
    """Each device's share of one random order of all actions in which each comes after what it needs."""
    last = len(stages) - 1
    split = rng.choice([0.0, 0.5, 1.0])
    needs = {}
    for s in range(len(stages)):
        for m in range(num_microbatches):
            needs[s, "F", m] = [(s - 1, "F", m)] if s > 0 else []
            needs[s, "I", m] = [(s, "F", m)] + ([(s + 1, "I", m)] if s < last else [])
            needs[s, "W", m] = [(s, "I", m)]
    whole = {(s, m): rng.random() >= split for s in range(len(stages)) for m in range(num_microbatches)}
    for (s, m), together in whole.items():
        if together:  # B stands where its I stands
            del needs[s, "W", m]
    replicas = len(stages[last]["devices"])
    for m in range(replicas, num_microbatches):  # rule 8: ascending on each device of the last stage
        needs[last, "F", m].append((last, "F", m - replicas))
    # What to prefer: any of these makes orders of another shape; weights are drawn once a case.
    weight = {phase: rng.choice([0.1, 1, 10]) for phase in "FIW"}
    early = rng.choice([1.0, 0.5, 0.1])  # how much less each later micro-batch is wanted
    order = []
    while needs:
        ready = [action for action, before in needs.items() if not any(other in needs for other in before)]
        chosen = rng.choices(ready, [weight[phase] * early**m for _, phase, m in ready])[0]
        del needs[chosen]
        order.append(chosen)
    lists = {device: [] for device in devices}
    for s, phase, m in order:
        device = stages[s]["devices"][m % len(stages[s]["devices"])]
        lists[device].append(f"{s}{'B' if phase == 'I' and whole[s, m] else phase}{m}")
    return [lists[device] for device in devices]
