"""Tiny plans worked out by hand. `CASES`: name -> (plan, profiles, what a simulator must return); run the file to check.

Unless a case says otherwise: one host, every link 10^9 bytes/s (a byte a nanosecond), micro-batch size 1, one device
kind "k". What is expected lists spans, transfers, syncs and updates in full; the order inside a list means nothing.
"""

MIB = 2**20


def device(name, speed=1.0, overlaps=True, host="h", kind="k"):
    return {"name": name, "host": host, "kind": kind, "memory_bytes": 10**12, "speed": speed,
            "overlaps_transfers": overlaps}  # fmt: skip


def link(bytes_per_s, latency_ns):
    return {"bytes_per_s": bytes_per_s, "latency_ns": latency_ns}


def layer(name, inputs, outputs, params=0, optimizer=0, update=0, no_gradient=()):
    return {"name": name, "kind": "Linear", "inputs": inputs, "outputs": outputs, "param_bytes": params,
            "optimizer_state_bytes": optimizer, "update_ns": update, "no_gradient": list(no_gradient)}  # fmt: skip


def times(f, i, w, stash=0, workspace=0, out=(0,)):
    return {"forward_ns": f, "input_grad_ns": i, "weight_grad_ns": w, "stash_bytes": stash,
            "workspace_bytes": workspace, "output_bytes": list(out)}  # fmt: skip


def profile(layers, measurements, kind="k"):
    return {"bapipe": "profile/1", "model": "hand", "factory": None, "arguments": {},
            "device": {"kind": kind, "name": kind, "memory_bytes": 10**12}, "dtype": "float32", "optimizer": "sgd",
            "environment": {}, "layers": layers,
            "measurements": [{"microbatch_size": b, "layers": rows} for b, rows in measurements.items()]}  # fmt: skip


def plan(devices, stages, order, microbatches, intra=None, links=(), size=1):
    """stages: [(layers, devices, recompute)]; order: one line of actions a device."""
    intra = intra or link(10**9, 0)
    return {
        "bapipe": "plan/1", "model": "hand", "factory": None, "arguments": {},
        "profiles": {d["kind"]: "0" * 64 for d in devices},
        "cluster": {"bapipe": "cluster/1", "devices": devices, "intra_host": intra, "inter_host": link(1, 10**6),
                    "links": list(links)},
        "minibatch_size": size * microbatches, "microbatch_size": size, "num_microbatches": microbatches,
        "schedule": "1f1b",
        "stages": [{"layers": a, "devices": b, "recompute": c} for a, b, c in stages],
        "order": [line.split() for line in order],
        "prediction": {"step_ns": 0, "samples_per_s": 0.0, "bubble": 0.0, "ranks": []},
        "certificate": {"lower_bound_ns": 0, "gap": 0.0, "proven_optimal": False, "space": ""},
        "alternatives": [],
    }  # fmt: skip


def spans(name, text):
    """ "0F0 0-10, 0F1 10-20" on the device `name`."""
    found = []
    for part in text.split(", "):
        action, interval = part.split()
        start, end = interval.split("-")
        found.append((name, action, int(start), int(end)))
    return found


CASES = {}


# -- 1. A queue on a link ---------------------------------------------------------------------------------------------
# Stage 0 on a: F 10, I 4 + W 6 = B 10. Stage 1 on b: F 3, B 1 + 1 = 2. The tensor has 20 bytes, latency 5: 5 + 20 = 25.
# a: 0F0 0-10, 0F1 10-20, 0F2 20-30 (overlapping, so it never waits for the link).
# a→b: m0 ready 10: 10-35. m1 ready 20, link busy until 35: 35-60. m2 ready 30: 60-85.
# b: 1F0 35-38, 1F1 60-63, 1F2 85-88, 1B0 88-90, 1B1 90-92, 1B2 92-94.
# b→a: m0 ready 90: 90-115. m1 ready 92: 115-140. m2 ready 94: 140-165.
# a: 0B0 115-125, 0B1 140-150, 0B2 165-175. Updates: a 7 ns: 175-182. b 3 ns: 94-97. Step 182.
# Memory a: 2×100 + 50 = 250; stashes 3×11 = 33; workspace 8; receive buffers of gradients 3×20 = 60. 250+33+8+60 = 351.
#        b: 2×10 + 0 = 20; stashes 3×7 = 21; workspace 2; receive buffers of tensors 3×20 = 60. 20+21+2+60 = 103.
TWO_LAYERS = profile(
    [layer("x", ["input"], ["x"], 100, 50, 7), layer("y", ["x"], ["y"], 10, 0, 3)],
    {1: [times(10, 4, 6, 11, 8, [20]), times(3, 1, 1, 7, 2, [5])]},
)
CASES["queue on a link"] = (
    plan(
        [device("a"), device("b")],
        [(["x"], ["a"], False), (["y"], ["b"], False)],
        ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"],
        3,
        link(10**9, 5),
    ),
    {"k": TWO_LAYERS},
    {
        "step_ns": 182,
        "spans": spans("a", "0F0 0-10, 0F1 10-20, 0F2 20-30, 0B0 115-125, 0B1 140-150, 0B2 165-175")
        + spans("b", "1F0 35-38, 1F1 60-63, 1F2 85-88, 1B0 88-90, 1B1 90-92, 1B2 92-94"),
        "transfers": [
            ("a", "b", "F", 0, 0, 10, 35), ("a", "b", "F", 0, 1, 35, 60), ("a", "b", "F", 0, 2, 60, 85),
            ("b", "a", "B", 1, 0, 90, 115), ("b", "a", "B", 1, 1, 115, 140), ("b", "a", "B", 1, 2, 140, 165),
        ],
        "syncs": [],
        "updates": [("a", 0, 175, 182), ("b", 1, 94, 97)],
        "peak_bytes": {"a": 351, "b": 103},
    },
)  # fmt: skip


# -- 2. A device that does not overlap --------------------------------------------------------------------------------
# The same layers; a does not overlap, b does; two micro-batches, b as 1F1B.
# a: 0F0 0-10. At 10 the transfer of m0 goes before 0F1: 10-35. Then 0F1 35-45. b: 1F0 35-38, 1B0 38-40.
# At 40 the gradient of m0 is ready; a computes until 45.
# At 45: ready are the gradient of m0 (since 40) and the tensor of m1 (since 45), on two links, both needing a: the
#   gradient 45-70. At 70: the tensor of m1 (transfers before actions) 70-95; 0B0, whose gradient came at 70, waits.
# At 95: a 0B0 95-105; b 1F1 95-98, 1B1 98-100. Gradient of m1 ready 100, a busy until 105: 105-130. 0B1 130-140.
# Updates: a 140-147; b 100-103. Step 147.
# Memory a: 250 + 2×11 + 8 + 2×20 = 320. b: 20 + 1×7 + 2 + 2×20 = 69 (never two in flight).
CASES["no overlap"] = (
    plan(
        [device("a", overlaps=False), device("b")],
        [(["x"], ["a"], False), (["y"], ["b"], False)],
        ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"],
        2,
        link(10**9, 5),
    ),
    {"k": TWO_LAYERS},
    {
        "step_ns": 147,
        "spans": spans("a", "0F0 0-10, 0F1 35-45, 0B0 95-105, 0B1 130-140")
        + spans("b", "1F0 35-38, 1B0 38-40, 1F1 95-98, 1B1 98-100"),
        "transfers": [
            ("a", "b", "F", 0, 0, 10, 35), ("b", "a", "B", 1, 0, 45, 70),
            ("a", "b", "F", 0, 1, 70, 95), ("b", "a", "B", 1, 1, 105, 130),
        ],
        "syncs": [],
        "updates": [("a", 0, 140, 147), ("b", 1, 100, 103)],
        "peak_bytes": {"a": 320, "b": 69},
    },
)  # fmt: skip


# -- 3. Two replicas of unequal speed, two buckets ---------------------------------------------------------------------
# One stage of x (4 MiB), y (20 MiB), z (26 MiB) on a (speed 1.0) and b (0.5); 3 micro-batches: a runs 0 and 2, b runs 1.
# a: F 30, I 10+20+30 = 60, W 1+2+3 = 6, B 66. b: F 60, B 120 + 12 = 132.
# a: 0F0 0-30, 0B0 30-96, 0F2 96-126, 0B2 126-192. b: 0F1 0-60, 0B1 60-192.
# Buckets backwards: z fills 26 MiB = 27262976 (k = 1). y, x: 24 MiB = 25165824, the smaller last one (k = 3).
# Bucket 0 is done on a at 126 + 30 + 3 = 159, on b at 60 + 60 + 6 = 126: ready at 159.
#   Half: 13631488 bytes. a→b 10^12 bytes/s, latency 100: 100 + ⌈13631.488⌉ = 13732.
#   b→a 5×10^11 bytes/s, latency 50: 50 + ⌈27262.976⌉ = 27313, the slower. 2(2-1)×27313 = 54626: 159-54785.
# Bucket 1 is done at 192 on both; after bucket 0: 54785. Half: 12582912 bytes.
#   a→b 100 + ⌈12582.912⌉ = 12683; b→a 50 + ⌈25165.824⌉ = 25216. 2×25216 = 50432: 54785-105217.
# Updates: 100 + 0 + 5 = 105 on a: 105217-105322; 210 on b: 105217-105427. Step 105427.
# Memory: 2×50 MiB = 104857600, a stash 10+10+10 = 30, workspace max(1, 2, 3) = 3: 104857633 on both.
CASES["two replicas, two buckets"] = (
    plan(
        [device("a"), device("b", speed=0.5)],
        [(["x", "y", "z"], ["a", "b"], False)],
        ["0F0 0B0 0F2 0B2", "0F1 0B1"],
        3,
        links=[{"from": "a", "to": "b", **link(10**12, 100)}, {"from": "b", "to": "a", **link(5 * 10**11, 50)}],
    ),
    {
        "k": profile(
            [
                layer("x", ["input"], ["x"], 4 * MIB, 0, 100),
                layer("y", ["x"], ["y"], 20 * MIB, 0, 0),
                layer("z", ["y"], ["z"], 26 * MIB, 0, 5),
            ],
            {1: [times(10, 10, 1, 10, 1), times(10, 20, 2, 10, 2), times(10, 30, 3, 10, 3)]},
        )
    },
    {
        "step_ns": 105427,
        "spans": spans("a", "0F0 0-30, 0B0 30-96, 0F2 96-126, 0B2 126-192") + spans("b", "0F1 0-60, 0B1 60-192"),
        "transfers": [],
        "syncs": [(0, 27262976, 159, 54785), (0, 25165824, 54785, 105217)],
        "updates": [("a", 0, 105217, 105322), ("b", 0, 105217, 105427)],
        "peak_bytes": {"a": 104857633, "b": 104857633},
    },
)


# -- 3a. The same, summed with the devices' own compute ------------------------------------------------------------------
# A message takes no less than 40 + bytes / 2x10^11 bytes/s, and the sums wait for both last backwards, which end at 192.
# Bucket 0: half 13631488, 40 + ⌈68157.44⌉ = 68198 > 27313. 2×68198 = 136396: 192-136588.
# Bucket 1: half 12582912, 40 + ⌈62914.56⌉ = 62955 > 25216. 2×62955 = 125910: 136588-262498.
# Updates: 262498-262603 on a, 262498-262708 on b. Step 262708; spans and memory as before.
_beside, _profiles, _want = CASES["two replicas, two buckets"]
CASES["two replicas, summed with their own compute"] = (
    {**_beside, "cluster": {**_beside["cluster"], "intra_host_sum": link(2 * 10**11, 40)}},
    _profiles,
    {
        **_want,
        "step_ns": 262708,
        "syncs": [(0, 27262976, 192, 136588), (0, 25165824, 136588, 262498)],
        "updates": [("a", 0, 262498, 262603), ("b", 0, 262498, 262708)],
    },
)


# -- 4. Recomputing, in the first stage and in another ----------------------------------------------------------------
# Stage 0 on a: F 5, B 5 + 3 + 2 = 10. Stage 1 on b: F 7, B 7 + 4 + 1 = 12. Tensor 8 bytes, latency 2: 10.
# a: 0F0 0-5, 0F1 5-10. a→b m0 5-15, m1 (ready 10) 15-25. b: 1F0 15-22, 1F1 25-32, 1B0 32-44, 1B1 44-56.
# b→a m0 44-54, m1 56-66. a: 0B0 54-64, 0B1 66-76. No updates to speak of (0 ns): step 76.
# Memory b: kept a micro-batch 8 (the cut before). 1F1: 16; 1B0: 16 + 100 = 116; 1B1: 8 + 100. Workspace 9, buffers 2×8:
#   116 + 9 + 16 = 141. a: stage 0 keeps nothing of the input; 0B0: 50. Workspace 3, buffers 2×8: 50 + 3 + 16 = 69.
CASES["recompute"] = (
    plan(
        [device("a"), device("b")],
        [(["x"], ["a"], True), (["y"], ["b"], True)],
        ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"],
        2,
        link(10**9, 2),
    ),
    {
        "k": profile(
            [layer("x", ["input"], ["x"]), layer("y", ["x"], ["y"])],
            {1: [times(5, 3, 2, 50, 3, [8]), times(7, 4, 1, 100, 9, [1])]},
        )
    },
    {
        "step_ns": 76,
        "spans": spans("a", "0F0 0-5, 0F1 5-10, 0B0 54-64, 0B1 66-76")
        + spans("b", "1F0 15-22, 1F1 25-32, 1B0 32-44, 1B1 44-56"),
        "transfers": [
            ("a", "b", "F", 0, 0, 5, 15), ("a", "b", "F", 0, 1, 15, 25),
            ("b", "a", "B", 1, 0, 44, 54), ("b", "a", "B", 1, 1, 56, 66),
        ],
        "syncs": [],
        "updates": [("a", 0, 76, 76), ("b", 1, 56, 56)],
        "peak_bytes": {"a": 69, "b": 141},
    },
)  # fmt: skip


# -- 5. A skip tensor is relayed, without a gradient ------------------------------------------------------------------
# x gives t (10 bytes, to y) and skip (6 bytes, to z, no gradient); y gives u (4 bytes, to z). Latency 1.
# Cut 0: t + skip = 16 bytes, gradients 10. Cut 1: u + skip = 10 bytes, gradients 4. Each F 3, B 2 + 1 = 3.
# 0F0 0-3; 1 + 16: 3-20; 1F0 20-23; 1 + 10: 23-34; 2F0 34-37; 2B0 37-40; 1 + 4: 40-45; 1B0 45-48; 1 + 10: 48-59;
# 0B0 59-62. Step 62. Memory: stash 1 each and buffers a 10, b 16 + 4 = 20, c 10: 11, 21, 11.
CASES["relay of a skip tensor"] = (
    plan(
        [device("a"), device("b"), device("c")],
        [(["x"], ["a"], False), (["y"], ["b"], False), (["z"], ["c"], False)],
        ["0F0 0B0", "1F0 1B0", "2F0 2B0"],
        1,
        link(10**9, 1),
    ),
    {
        "k": profile(
            [
                layer("x", ["input"], ["t", "skip"], no_gradient=["skip"]),
                layer("y", ["t"], ["u"]),
                layer("z", ["u", "skip"], ["z"]),
            ],
            {1: [times(3, 2, 1, 1, 0, [10, 6]), times(3, 2, 1, 1, 0, [4]), times(3, 2, 1, 1, 0, [99])]},
        )
    },
    {
        "step_ns": 62,
        "spans": spans("a", "0F0 0-3, 0B0 59-62") + spans("b", "1F0 20-23, 1B0 45-48")
        + spans("c", "2F0 34-37, 2B0 37-40"),
        "transfers": [
            ("a", "b", "F", 0, 0, 3, 20), ("b", "c", "F", 1, 0, 23, 34),
            ("c", "b", "B", 2, 0, 40, 45), ("b", "a", "B", 1, 0, 48, 59),
        ],
        "syncs": [],
        "updates": [("a", 0, 62, 62), ("b", 1, 48, 48), ("c", 2, 40, 40)],
        "peak_bytes": {"a": 11, "b": 21, "c": 11},
    },
)  # fmt: skip


# -- 6. I and W apart, nothing to send --------------------------------------------------------------------------------
# Stage 0 on a: F 2, I 3, W 4. Stage 1 on b: F 5, I 6, W 7; the tensor has 0 bytes: there the instant F ends.
# a: 0F0 0-2, 0F1 2-4. b: 1F0 2-7, 1I0 7-13, 1F1 13-18, 1I1 18-24, 1W0 24-31, 1W1 31-38.
# a sends no gradient back: I 0, W 3 + 4 = 7. 0I0 13-13, 0I1 24-24 (0W0 stands after it), 0W0 24-31, 0W1 31-38.
# Updates: a 1: 35-36; b 2: 38-40. Step 40. Memory: the stash lives until W: 2×10 + workspace 4 = 24 on a, 2×20 = 40 on b.
CASES["I and W apart"] = (
    plan(
        [device("a"), device("b")],
        [(["x"], ["a"], False), (["y"], ["b"], False)],
        ["0F0 0F1 0I0 0I1 0W0 0W1", "1F0 1I0 1F1 1I1 1W0 1W1"],
        2,
        link(1, 1000),
    ),
    {
        "k": profile(
            [layer("x", ["input"], ["x"], update=1), layer("y", ["x"], ["y"], update=2)],
            {1: [times(2, 3, 4, 10, 4), times(5, 6, 7, 20)]},
        )
    },
    {
        "step_ns": 40,
        "spans": spans("a", "0F0 0-2, 0F1 2-4, 0I0 13-13, 0I1 24-24, 0W0 24-31, 0W1 31-38")
        + spans("b", "1F0 2-7, 1I0 7-13, 1F1 13-18, 1I1 18-24, 1W0 24-31, 1W1 31-38"),
        "transfers": [],
        "syncs": [],
        "updates": [("a", 0, 38, 39), ("b", 1, 38, 40)],
        "peak_bytes": {"a": 24, "b": 40},
    },
)


# -- 7. A replica without a micro-batch, W last, a layer without parameters in front -----------------------------------
# One stage of x (no parameters; F 1, I 10, W 5) and y (100 bytes; F 3, I 1, W 2) on a and b; one micro-batch, on a.
# a: 0F0 0-4, 0I0 4-4, 0W0 is all of B, 18: 4-22. The one bucket is y's 100 bytes; y's own B is done at 4 + 3 = 7; b is
# ready at 0. Half: 50 bytes, latency 3: 53; 2(2-1)×53 = 106: 7-113. Updates 9: 113-122 on both. Step 122.
# Memory: 2×100 + 100 = 300 on both; a: stash 5 + 6 and workspace max(7, 0): 318.
CASES["idle replica, W last"] = (
    plan([device("a"), device("b")], [(["x", "y"], ["a", "b"], False)], ["0F0 0I0 0W0", ""], 1, link(10**9, 3)),
    {
        "k": profile(
            [layer("x", ["input"], ["x"], 0, 0, 0), layer("y", ["x"], ["y"], 100, 100, 9)],
            {1: [times(1, 10, 5, 5, 7), times(3, 1, 2, 6, 0)]},
        )
    },
    {
        "step_ns": 122,
        "spans": spans("a", "0F0 0-4, 0I0 4-4, 0W0 4-22"),
        "transfers": [],
        "syncs": [(0, 100, 7, 113)],
        "updates": [("a", 0, 113, 122), ("b", 0, 113, 122)],
        "peak_bytes": {"a": 318, "b": 300},
    },
)


# -- 8. Unequal speeds, interpolated and rounded ----------------------------------------------------------------------
# Micro-batch size 3, measured at 2 and 4. Stage 0 is x and y on a, speed 1.5; stage 1 is z on b, speed 0.3.
# x: F 1→2 at 3: 1.5→2; I 2→4: 3; W 1→1: 1; stash 10→13: 11.5→12; bytes 3→6: 4.5→5. y: F 1→2: 2 (together 4, not 3);
#   I 1→3: 2; W 0→1: 0.5→1; stash 10→13: 12; bytes 20→21: 20.5→21.
# Stage 0: F 4/1.5 = 2.67→3; I 5/1.5 = 3.33→3; W 2/1.5 = 1.33→1; B = 3 + 1 = 4 (7/1.5 would round to 5).
# z: F 7, I 1, W 2 at 3 (all as at both sizes): F 7/0.3 = 23.33→23; I 3.33→3; W 6.67→7; B 10. Update 1/0.3 = 3.33→3.
# Stage 0 updates: (2 + 2)/1.5 = 2.67→3. The link from a to b: 21 bytes at 2×10^9/s: 10.5→11, latency 4: 15.
# The link back is the host's: 21 ns. x's tensor stays inside stage 0.
# 0F0 0-3; 3-18; 1F0 18-41; 1B0 41-51; 51-72; 0B0 72-76. Updates: a 76-79; b 51-54. Step 79.
# Memory: a 24 + 21 = 45; b stash 5 + 21 = 26.
CASES["unequal speeds, interpolation"] = (
    plan(
        [device("a", speed=1.5), device("b", speed=0.3)],
        [(["x", "y"], ["a"], False), (["z"], ["b"], False)],
        ["0F0 0B0", "1F0 1B0"],
        1,
        links=[{"from": "a", "to": "b", **link(2 * 10**9, 4)}],
        size=3,
    ),
    {
        "k": profile(
            [
                layer("x", ["input"], ["x"], update=2),
                layer("y", ["x"], ["y"], update=2),
                layer("z", ["y"], ["z"], update=1),
            ],
            {
                2: [times(1, 2, 1, 10, 0, [3]), times(1, 1, 0, 10, 0, [20]), times(7, 1, 2, 5)],
                4: [times(2, 4, 1, 13, 0, [6]), times(2, 3, 1, 13, 0, [21]), times(7, 1, 2, 5)],
            },
        )
    },
    {
        "step_ns": 79,
        "spans": spans("a", "0F0 0-3, 0B0 72-76") + spans("b", "1F0 18-41, 1B0 41-51"),
        "transfers": [("a", "b", "F", 0, 0, 3, 18), ("b", "a", "B", 1, 0, 51, 72)],
        "syncs": [],
        "updates": [("a", 0, 76, 79), ("b", 1, 51, 54)],
        "peak_bytes": {"a": 45, "b": 26},
    },
)


# -- 9. Two stages on one device --------------------------------------------------------------------------------------
# Stages 0 and 2 on a, stage 1 on b. F 4, 5, 2; B 4+2 = 6, 3+2 = 5, 2+2 = 4. Cut 0: 10 bytes = 10 ns. Cut 1: 3 ns.
# a: 0F0 0-4, 0F1 4-8. a→b cut 0 m0 4-14, m1 (ready 8) 14-24. b: 1F0 14-19, 1F1 24-29. b→a cut 1 m0 19-22, m1 29-32.
# a: 2F0 22-24, 2B0 24-28. a→b gradients of cut 1 m0 28-31. a: 2F1 32-34, 2B1 34-38; m1 38-41.
# b: 1B0 31-36, 1B1 41-46. b→a gradients of cut 0 m0 36-46, m1 46-56. a: 0B0 46-52, 0B1 56-62.
# Updates on a: stage 2 did its last action at 38, stage 0 at 62: stage 2 (5 ns) 62-67, stage 0 (3 ns) 67-70. b 46-47.
# Step 70. Memory a: stashes 10 (stage 0), 20 (stage 2), workspaces 1, 2; at 2F0: 2×10 + 20 + 2 = 42.
#   Buffers: gradients of cut 0 2×10, tensors of cut 1 2×3: 26. Together 68.
# b: stash 7: 1F1 and 1B0: 14; workspace 0; buffers: tensors 2×10, gradients 2×3: 26. Together 40.
CASES["two stages on one device"] = (
    plan(
        [device("a"), device("b")],
        [(["x"], ["a"], False), (["y"], ["b"], False), (["z"], ["a"], False)],
        ["0F0 0F1 2F0 2B0 2F1 2B1 0B0 0B1", "1F0 1F1 1B0 1B1"],
        2,
    ),
    {
        "k": profile(
            [
                layer("x", ["input"], ["x"], update=3),
                layer("y", ["x"], ["y"], update=1),
                layer("z", ["y"], ["z"], update=5),
            ],
            {1: [times(4, 4, 2, 10, 1, [10]), times(5, 3, 2, 7, 0, [3]), times(2, 2, 2, 20, 2, [1])]},
        )
    },
    {
        "step_ns": 70,
        "spans": spans("a", "0F0 0-4, 0F1 4-8, 2F0 22-24, 2B0 24-28, 2F1 32-34, 2B1 34-38, 0B0 46-52, 0B1 56-62")
        + spans("b", "1F0 14-19, 1F1 24-29, 1B0 31-36, 1B1 41-46"),
        "transfers": [
            ("a", "b", "F", 0, 0, 4, 14), ("a", "b", "F", 0, 1, 14, 24),
            ("b", "a", "F", 1, 0, 19, 22), ("b", "a", "F", 1, 1, 29, 32),
            ("a", "b", "B", 2, 0, 28, 31), ("a", "b", "B", 2, 1, 38, 41),
            ("b", "a", "B", 1, 0, 36, 46), ("b", "a", "B", 1, 1, 46, 56),
        ],
        "syncs": [],
        "updates": [("a", 2, 62, 67), ("a", 0, 67, 70), ("b", 1, 46, 47)],
        "peak_bytes": {"a": 68, "b": 40},
    },
)  # fmt: skip


# -- 10. Two senders to a device that does not overlap, ready at once -------------------------------------------------
# Stage 0 on a and c (they overlap): F 10, B 4 + 2 = 6. Stage 1 on b (does not): F 3, B 2 + 2 = 4. Tensor 10 bytes: 10 ns.
# 0F0 on a and 0F1 on c both 0-10. At 10 two transfers on two links want b; same readiness, stage, direction: micro-batch
# 0 first: 10-20. At 20 that of micro-batch 1 goes before 1F0: 20-30. b: 1F0 30-33, 1F1 33-36, 1B0 36-40.
# At 40 the gradient of 0 goes before 1B1: 40-50. 1B1 50-54, its gradient 54-64. a: 0B0 50-56. c: 0B1 64-70. Step 70.
# No parameters, so no all-reduce. Memory: a and c: buffer 10; b: buffers 2×10.
CASES["two senders, no overlap"] = (
    plan(
        [device("a"), device("b", overlaps=False), device("c")],
        [(["x"], ["a", "c"], False), (["y"], ["b"], False)],
        ["0F0 0B0", "1F0 1F1 1B0 1B1", "0F1 0B1"],
        2,
    ),
    {
        "k": profile(
            [layer("x", ["input"], ["x"]), layer("y", ["x"], ["y"])],
            {1: [times(10, 4, 2, 0, 0, [10]), times(3, 2, 2)]},
        )
    },
    {
        "step_ns": 70,
        "spans": spans("a", "0F0 0-10, 0B0 50-56") + spans("b", "1F0 30-33, 1F1 33-36, 1B0 36-40, 1B1 50-54")
        + spans("c", "0F1 0-10, 0B1 64-70"),
        "transfers": [
            ("a", "b", "F", 0, 0, 10, 20), ("c", "b", "F", 0, 1, 20, 30),
            ("b", "a", "B", 1, 0, 40, 50), ("b", "c", "B", 1, 1, 54, 64),
        ],
        "syncs": [],
        "updates": [("a", 0, 56, 56), ("b", 1, 54, 54), ("c", 0, 70, 70)],
        "peak_bytes": {"a": 10, "b": 20, "c": 10},
    },
)  # fmt: skip


# -- 11. A bucket inside a recomputing B; updates by the end of the all-reduce ----------------------------------------
# Stage 0 is x (30 MiB) and y (25 MiB) on a and b, recomputing; stage 1 is z (no parameters) on a. M = 2; F 4 + 6 = 10,
# I 1 + 2, W 3 + 4, B = 10 + 3 + 7 = 20; z: F 1, B 1 + 1 = 2. y's tensor has 0 bytes: nothing is ever sent.
# a: 0F0 0-10, then 1F0 10-11, 1B0 11-13, 0B0 13-33, and 1F1 33-34, 1B1 34-36 (0F1 ended on b at 10).
# b: 0F1 0-10, 0B1 36-56.
# Buckets: y 26214400 (k = 1), x 31457280 (k = 2). y done: a 13 + 10 + 2 + 4 = 29, b 36 + 16 = 52. x: a 33, b 56.
# The links: 10^15 bytes/s, latency 0. y: ⌈13107200 / 10^6⌉ = 14; 2×14 = 28: 52-80. x: ⌈15.72864⌉ = 16; 32: 80-112.
# Updates on a: stage 1 (last action 36) before stage 0 (112): stage 1 (8 ns) 36-44, stage 0 (6 ns) 112-118. b: 112-118.
# Step 118. Memory: static 2×(30 + 25) MiB = 115343360. Stage 0's input is no bytes: only the stash 9 inside B.
#   z: stash 2. a: 0B0: 9 + workspace 5 = 14; 1F0: 2. b the same 14. No buffers (0 bytes).
CASES["bucket inside a recomputing B"] = (
    plan(
        [device("a"), device("b")],
        [(["x", "y"], ["a", "b"], True), (["z"], ["a"], False)],
        ["0F0 1F0 1B0 0B0 1F1 1B1", "0F1 0B1"],
        2,
        link(10**15, 0),
    ),
    {
        "k": profile(
            [
                layer("x", ["input"], ["x"], 30 * MIB, 0, 2),
                layer("y", ["x"], ["y"], 25 * MIB, 0, 4),
                layer("z", ["y"], ["z"], 0, 0, 8),
            ],
            {1: [times(4, 1, 3, 4, 5), times(6, 2, 4, 5, 3), times(1, 1, 1, 2, 0)]},
        )
    },
    {
        "step_ns": 118,
        "spans": spans("a", "0F0 0-10, 1F0 10-11, 1B0 11-13, 0B0 13-33, 1F1 33-34, 1B1 34-36")
        + spans("b", "0F1 0-10, 0B1 36-56"),
        "transfers": [],
        "syncs": [(0, 26214400, 52, 80), (0, 31457280, 80, 112)],
        "updates": [("a", 1, 36, 44), ("a", 0, 112, 118), ("b", 0, 112, 118)],
        "peak_bytes": {"a": 115343374, "b": 115343374},
    },
)


# -- 12. Forward before backward at one instant -----------------------------------------------------------------------
# Stages 0 and 2 on a, which does not overlap; stage 1 on x (micro-batch 0) and y (micro-batch 1, speed 0.2).
# Stage 0: F 5, B 2 + 2 = 4. Stage 1: F 7, B 3 + 2 = 5, on y F 35, B 15 + 10 = 25. Stage 2: F 5, B 3 + 2 = 5.
# Both tensors 10 bytes: 10 ns. No parameters, so no all-reduce.
# a: 0F0 0-5; a→x m0 5-15; 0F1 15-20; a→y m1 20-30. x: 1F0 15-22; x→a m0 waits for a: 30-40. y: 1F1 30-65.
# a: 2F0 40-45, 2B0 45-50; a→x m0 50-60. x: 1B0 60-65.
# At 65 both 1F1 (on y) and 1B0 (on x) end, and both transfers need a. Both are stage 1's: forward first, y→a m1 65-75
#   (neither the lower cut nor the lower receiver counts: those would send x→a first). x→a 75-85, before 2F1.
# a: 2F1 85-90, 2B1 90-95; a→y m1 95-105, before 0B0; 0B0 105-109. y: 1B1 105-130; y→a 130-140. a: 0B1 140-144. Step 144.
# Memory a: stage 0 stash 1: two; stage 2 stash 2, one at a time: 2F0 is 2 + 2 = 4. Buffers: gradients of cut 0 2×10,
#   tensors of cut 1 2×10: 44. x and y: buffers 10 + 10, stash 3: 23.
CASES["forward before backward at one instant"] = (
    plan(
        [device("a", overlaps=False), device("x"), device("y", speed=0.2)],
        [(["p"], ["a"], False), (["q"], ["x", "y"], False), (["r"], ["a"], False)],
        ["0F0 0F1 2F0 2B0 2F1 2B1 0B0 0B1", "1F0 1B0", "1F1 1B1"],
        2,
    ),
    {
        "k": profile(
            [layer("p", ["input"], ["p"]), layer("q", ["p"], ["q"]), layer("r", ["q"], ["r"])],
            {1: [times(5, 2, 2, 1, 0, [10]), times(7, 3, 2, 3, 0, [10]), times(5, 3, 2, 2, 0, [1])]},
        )
    },
    {
        "step_ns": 144,
        "spans": spans("a", "0F0 0-5, 0F1 15-20, 2F0 40-45, 2B0 45-50, 2F1 85-90, 2B1 90-95, 0B0 105-109, 0B1 140-144")
        + spans("x", "1F0 15-22, 1B0 60-65") + spans("y", "1F1 30-65, 1B1 105-130"),
        "transfers": [
            ("a", "x", "F", 0, 0, 5, 15), ("a", "y", "F", 0, 1, 20, 30), ("x", "a", "F", 1, 0, 30, 40),
            ("a", "x", "B", 2, 0, 50, 60), ("y", "a", "F", 1, 1, 65, 75), ("x", "a", "B", 1, 0, 75, 85),
            ("a", "y", "B", 2, 1, 95, 105), ("y", "a", "B", 1, 1, 130, 140),
        ],
        "syncs": [],
        "updates": [("a", 2, 144, 144), ("a", 0, 144, 144), ("x", 1, 65, 65), ("y", 1, 130, 130)],
        "peak_bytes": {"a": 44, "x": 23, "y": 23},
    },
)  # fmt: skip


# -- 13. Recomputing with I and W apart, neighbours on one device ------------------------------------------------------
# Both stages on a; the tensor of 8 bytes is there at once and needs no buffer. Stage 0: F 1, B 2 + 3 = 5. Stage 1
# recomputes: F 1, I 1 + 2 = 3, W 3. 0F0 0-1, 1F0 1-2, 1I0 2-5, 0B0 5-10, 1W0 10-13. Step 13.
# Memory: stash 10 in stage 0, workspace 6; stage 1 keeps 8, and 100 more from the start of I to the end of W; workspace 4.
#   0F0: 10 + 6 = 16. 1F0: 10 + 8 + 4 = 22. 1I0: 10 + 8 + 100 + 4 = 122. 0B0: 10 + 8 + 100 + 6 = 124. 1W0: 8 + 100 + 4.
CASES["recompute, I and W apart"] = (
    plan(
        [device("a")],
        [(["x"], ["a"], False), (["y"], ["a"], True)],
        ["0F0 1F0 1I0 0B0 1W0"],
        1,
        link(1, 1000),
    ),
    {
        "k": profile(
            [layer("x", ["input"], ["x"]), layer("y", ["x"], ["y"])],
            {1: [times(1, 2, 3, 10, 6, [8]), times(1, 2, 3, 100, 4, [1])]},
        )
    },
    {
        "step_ns": 13,
        "spans": spans("a", "0F0 0-1, 1F0 1-2, 1I0 2-5, 0B0 5-10, 1W0 10-13"),
        "transfers": [],
        "syncs": [],
        "updates": [("a", 0, 13, 13), ("a", 1, 13, 13)],
        "peak_bytes": {"a": 124},
    },
)


# -- 14. Groups of two as replicas: gradients summed over all members, and over partners ------------------------------
# Members p, q of g and u, v of h. Layer x: F 10, B 4 + 6; 60 bytes of parameters, of which the members sum 40.
# g: 0F0 0-10, 0B0 10-20; h: 0F1 0-10, 0B1 10-20. The bucket of 60 bytes is full at 20.
# Ring of all 4 members: 6 messages of ⌈40 ÷ 4⌉ = 10. Rings of 2 partners: 2 messages of ⌈20 ÷ 2⌉ = 10. A link between
# u and v takes 3 + bytes, all others bytes: 6 × 13 + 2 × 10 = 98. Update 118-125.
# Memory of a member: 2 × 60 + 50 = 170, stash 11, workspace 8: 189.
def group(name, members, kind="k"):
    return device(name, kind=kind) | {"members": members}


def of_groups(tree, members, group_sums):
    """The profile as one of groups; `group_sums` are the bytes of each layer that members sum."""
    layers = [
        layer | {"group_sum_bytes": num_bytes} for layer, num_bytes in zip(tree["layers"], group_sums, strict=True)
    ]
    return tree | {"device": tree["device"] | {"members": members, "split": "spatial"}, "layers": layers}


CASES["groups as replicas"] = (
    plan(
        [group("g", ["p", "q"]), group("h", ["u", "v"])],
        [(["x"], ["g", "h"], False)],
        ["0F0 0B0", "0F1 0B1"],
        2,
        links=[{"from": "u", "to": "v"} | link(10**9, 3)],
    ),
    {"k": of_groups(profile([layer("x", ["input"], ["x"], 60, 50, 7)], {1: [times(10, 4, 6, 11, 8)]}), 2, [40])},
    {
        "step_ns": 125,
        "spans": [*spans("g", "0F0 0-10, 0B0 10-20"), *spans("h", "0F1 0-10, 0B1 10-20")],
        "transfers": [],
        "syncs": [(0, 60, 20, 118)],
        "updates": [("g", 0, 118, 125), ("h", 0, 118, 125)],
        "peak_bytes": {"g": 189, "h": 189},
    },
)


# -- 15. A group of two, then a single device --------------------------------------------------------------------------
# A member of g makes 20 bytes of the tensor, b needs all 40. Links take 5 + bytes: 45 between g and b.
# g: 0F0 0-10. g→b 10-55. b: 1F0 55-58, 1B0 58-60. b→g 60-105. g: 0B0 105-115.
# g has no replica, but its members sum x's 100 bytes: 2 messages of 5 + 50 from 115 on: 225. Update 225-232; b 60-63.
# Memory of a member of g: 2 × 100 + 50 = 250, stash 11, workspace 8, its own gradients of 20: 289.
#        b: 2 × 10 = 20, stash 7, workspace 2, a tensor of 40: 69.
CASES["a group, then a single device"] = (
    plan(
        [group("g", ["p", "q"]), device("b", kind="one")],
        [(["x"], ["g"], False), (["y"], ["b"], False)],
        ["0F0 0B0", "1F0 1B0"],
        1,
        link(10**9, 5),
    ),
    {
        "k": of_groups(TWO_LAYERS, 2, [100, 10]),
        "one": profile(TWO_LAYERS["layers"], {1: [times(20, 8, 12, 22, 8, [40]), times(3, 1, 1, 7, 2, [5])]}, "one"),
    },
    {
        "step_ns": 232,
        "spans": [*spans("g", "0F0 0-10, 0B0 105-115"), *spans("b", "1F0 55-58, 1B0 58-60")],
        "transfers": [("g", "b", "F", 0, 0, 10, 55), ("b", "g", "B", 1, 0, 60, 105)],
        "syncs": [(0, 100, 115, 225)],
        "updates": [("b", 1, 60, 63), ("g", 0, 225, 232)],
        "peak_bytes": {"g": 289, "b": 69},
    },
)


# -- 16. Nothing comes back over a cut --------------------------------------------------------------------------------
# The layers of case 1, but x has no gradient; two micro-batches as GPipe. b: I 0 and W 1 + 1, so B 2 as before.
# a: 0F0 0-10, 0F1 10-20. a→b: 10-35, 35-60. b: 1F0 35-38, 1F1 60-63, 1B0 63-65, 1B1 65-67. Nothing goes from b to a.
# a: 0B0 waits for 1B0 all the same, as the schedule says: 65-75; 0B1 75-85. Updates: a 85-92, b 67-70. Step 92.
# Memory a: 250 + 2×11 + 8 = 280. b: 20 + 2×7 + 2 + 2×20 = 76.
CASES["nothing comes back"] = (
    plan(
        [device("a"), device("b")],
        [(["x"], ["a"], False), (["y"], ["b"], False)],
        ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"],
        2,
        link(10**9, 5),
    ),
    {
        "k": profile(
            [layer("x", ["input"], ["x"], 100, 50, 7, no_gradient=["x"]), layer("y", ["x"], ["y"], 10, 0, 3)],
            {1: [times(10, 4, 6, 11, 8, [20]), times(3, 1, 1, 7, 2, [5])]},
        )
    },
    {
        "step_ns": 92,
        "spans": spans("a", "0F0 0-10, 0F1 10-20, 0B0 65-75, 0B1 75-85")
        + spans("b", "1F0 35-38, 1F1 60-63, 1B0 63-65, 1B1 65-67"),
        "transfers": [("a", "b", "F", 0, 0, 10, 35), ("a", "b", "F", 0, 1, 35, 60)],
        "syncs": [],
        "updates": [("a", 0, 85, 92), ("b", 1, 67, 70)],
        "peak_bytes": {"a": 280, "b": 76},
    },
)


# -- 17. Two sums of tied weights, shares of unequal sizes ------------------------------------------------------------
# Stage 0 on a has x (100 bytes, optimizer 50, update 7) and v, which shares 80 of them; stage 3 on d has w, which shares
# 60. Stage 1 on b has p (40 bytes, update 3), and stage 2 on c has q, which shares all of them. Tensors have 0 bytes.
# Each layer F 1, B 1 + 1. 0F0 0-2, 1F0 2-3, 2F0 3-4, 3F0 4-5, 3B0 5-7, 2B0 7-9, 1B0 9-11, 0B0 11-15.
# The sum of x comes first, as its stage does: of 80 bytes, the larger share, 2 messages of 40: 15-95. That of p, ready
#   since 11 on devices of its own, comes after it: 2 messages of 20: 95-135.
# Updates: a 7: 95-102. d 7×80÷100 = 5: 95-100. b and c 3: 135-138. Step 138.
# Memory a: 2×100 + 50 = 250. b and c: 2×40 = 80. d: a copy of 80, its gradient, and 50×80÷100 = 40: 200.
CASES["two sums of tied weights"] = (
    plan(
        [device("a"), device("b"), device("c"), device("d")],
        [(["x", "v"], ["a"], False), (["p"], ["b"], False), (["q"], ["c"], False), (["w"], ["d"], False)],
        ["0F0 0B0", "1F0 1B0", "2F0 2B0", "3F0 3B0"],
        1,
    ),
    {
        "k": profile(
            [
                layer("x", ["input"], ["x"], 100, 50, 7) | {"shares": ["v", "w"]},
                layer("v", ["x"], ["v"]) | {"shares": ["x", "w"], "shared_bytes": 80},
                layer("p", ["v"], ["p"], 40, 0, 3) | {"shares": ["q"]},
                layer("q", ["p"], ["q"]) | {"shares": ["p"], "shared_bytes": 40},
                layer("w", ["q"], ["w"]) | {"shares": ["x", "v"], "shared_bytes": 60},
            ],
            {1: [times(1, 1, 1)] * 5},
        )
    },
    {
        "step_ns": 138,
        "spans": spans("a", "0F0 0-2, 0B0 11-15") + spans("b", "1F0 2-3, 1B0 9-11")
        + spans("c", "2F0 3-4, 2B0 7-9") + spans("d", "3F0 4-5, 3B0 5-7"),
        "transfers": [],
        "syncs": [(0, 80, 15, 95), (1, 40, 95, 135)],
        "updates": [("a", 0, 95, 102), ("b", 1, 135, 138), ("c", 2, 135, 138), ("d", 3, 95, 100)],
        "peak_bytes": {"a": 250, "b": 80, "c": 80, "d": 200},
    },
)  # fmt: skip


# -- 18. What the earlier stage sends goes first ----------------------------------------------------------------------
# Stage 0 on a (micro-batch 0) and d (micro-batch 1, speed 0.25): F 10, B 4 + 2 = 6, on d F 40, B 16 + 8 = 24.
# Stage 1 on b, which does not overlap: F 3, B 2 + 2 = 4. Stage 2 on c: F 3, B 4. Tensors 10 bytes: 10 ns.
# a: 0F0 0-10; a→b m0 10-20; b: 1F0 20-23; b→c m0 23-33; c: 2F0 33-36, 2B0 36-40. d: 0F1 0-40.
# At 40 an activation from stage 0 and a gradient from stage 2 both need b: stage 0 first, d→b m1 40-50, c→b m0 50-60.
# b: 1F1 60-63; b→c m1 63-73; 1B0 73-77; b→a m0 77-87. c: 2F1 73-76, 2B1 76-80; c→b m1 waits for b: 87-97. b: 1B1
#   97-101; b→d m1 101-111. a: 0B0 87-93. d: 0B1 111-135. Step 135. Memory: buffers 10 on a and d, 2×10 on c, 4×10 on b.
CASES["the earlier stage first at one instant"] = (
    plan(
        [device("a"), device("b", overlaps=False), device("c"), device("d", speed=0.25)],
        [(["p"], ["a", "d"], False), (["q"], ["b"], False), (["r"], ["c"], False)],
        ["0F0 0B0", "1F0 1F1 1B0 1B1", "2F0 2B0 2F1 2B1", "0F1 0B1"],
        2,
    ),
    {
        "k": profile(
            [layer("p", ["input"], ["p"]), layer("q", ["p"], ["q"]), layer("r", ["q"], ["r"])],
            {1: [times(10, 4, 2, 0, 0, [10]), times(3, 2, 2, 0, 0, [10]), times(3, 2, 2)]},
        )
    },
    {
        "step_ns": 135,
        "spans": spans("a", "0F0 0-10, 0B0 87-93") + spans("b", "1F0 20-23, 1F1 60-63, 1B0 73-77, 1B1 97-101")
        + spans("c", "2F0 33-36, 2B0 36-40, 2F1 73-76, 2B1 76-80") + spans("d", "0F1 0-40, 0B1 111-135"),
        "transfers": [
            ("a", "b", "F", 0, 0, 10, 20), ("b", "c", "F", 1, 0, 23, 33), ("d", "b", "F", 0, 1, 40, 50),
            ("c", "b", "B", 2, 0, 50, 60), ("b", "c", "F", 1, 1, 63, 73), ("b", "a", "B", 1, 0, 77, 87),
            ("c", "b", "B", 2, 1, 87, 97), ("b", "d", "B", 1, 1, 101, 111),
        ],
        "syncs": [],
        "updates": [("a", 0, 93, 93), ("b", 1, 101, 101), ("c", 2, 80, 80), ("d", 0, 135, 135)],
        "peak_bytes": {"a": 10, "b": 40, "c": 20, "d": 10},
    },
)  # fmt: skip


def check(simulate):
    """Assert that a simulator returns for every case what was worked out by hand."""
    for name, (case_plan, case_profiles, expected) in CASES.items():
        timeline = simulate(case_plan, case_profiles)
        for key, value in expected.items():
            got = timeline[key]
            if isinstance(value, list):
                got, value = sorted(map(tuple, got)), sorted(value)
            assert got == value, f"{name}: {key}\n  simulated {got}\n  by hand   {value}"


if __name__ == "__main__":
    from tests.oracles.reference_simulator import simulate

    check(simulate)
    print(f"{len(CASES)} cases as worked out by hand")
