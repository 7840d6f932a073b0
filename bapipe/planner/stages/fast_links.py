"""Paths through the devices along their fastest links, for naive plans where some links are slow."""

from itertools import pairwise

from bapipe.formats.cluster import Cluster

MAX_DEVICES = 16
"""Clusters with more devices have no such paths here."""

FALL = 2
"""A device is left out where the slowest link of the others takes at most one part in so many of the time."""

WORDS = "along the fastest links, of all devices or without those with the slowest"
"""Which devices plans take on these paths; part of plan files."""

Path = tuple[int, ...]
"""Ranks in the order in which stages take them."""


def paths_along_fast_links(cluster: Cluster, num_bytes: int) -> list[Path]:
    """Returns a path through all devices, and one without those whose slowest links are much slower; the longest first.

    Devices are left out one at a time, that with the slowest link to the others first. In the reverse order each is put
    where the links between neighbours stay fastest, so the links of a path are not the slowest of its devices. None if
    links do not differ. O(devices**3).

    Args:
        num_bytes: of the messages by whose time links are compared.
    """
    num_devices = len(cluster.devices)
    if num_devices > MAX_DEVICES:
        return []
    ranks = range(num_devices)
    pairs = [(a, b) for a in ranks for b in ranks if a != b]
    one_way = {pair: cluster.link(*pair).transfer_ns(num_bytes) for pair in pairs}
    times_ns = {(a, b): max(one_way[a, b], one_way[b, a]) for a, b in pairs}
    if len(set(times_ns.values())) < 2:
        return []
    remaining, left_out, slowest_ns = list(ranks), [], []
    # Leave out the device with the slowest link to those that remain; of several, the one whose next links are slower.
    while len(remaining) > 1:
        times_of = {a: sorted((times_ns[a, b] for b in remaining if a != b), reverse=True) for a in remaining}
        worst = max(remaining, key=times_of.__getitem__)
        remaining.remove(worst)
        left_out.append(worst)
        slowest_ns.append(times_of[worst][0])  # of all links among those that remained
    path, paths = tuple(remaining), []
    # Put them back, the one that was left out last first, where the slowest links between neighbours are fastest.
    for number in reversed(range(len(left_out))):
        places = range(len(path) + 1)
        longer = [(*path[:place], left_out[number], *path[place:]) for place in places]
        path = min(longer, key=lambda each: sorted((times_ns[pair] for pair in pairwise(each)), reverse=True))
        # All devices, and those without the one that makes the slowest link so much slower.
        if number == 0 or FALL * slowest_ns[number] <= slowest_ns[number - 1]:
            paths.append(path)
    return paths[::-1]
