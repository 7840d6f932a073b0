"""Verifying a checkpoint by all ranks of a job together: on each host every file is read once."""

from pathlib import Path

import torch.distributed as dist

from bapipe.errors import BapipeError
from bapipe.job.groups import gathered
from bapipe.runtime.clock import this_host
from bapipe.training.checkpoint.manifest import Manifest, check_digests, read_unhashed


def read_together(path: Path) -> Manifest:
    """Returns the manifest of a checkpoint as `read_manifest` does, or raises its error, on all ranks alike.

    All ranks of the default group call it together. Those of a host share the files among them, as evenly by bytes as
    the files allow: hosts may read different disks, and one rank alone would take several times as long.

    Raises:
        BapipeError: ranks find different checkpoints there.
    """
    hosts, rank = gathered(this_host()), dist.get_rank()
    on_host = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    manifest: Manifest | None = None
    fault: BapipeError | None = None
    try:
        manifest = read_unhashed(path)
        check_digests(path, manifest, _share(manifest, on_host.index(rank), len(on_host)))
    except BapipeError as error:
        fault = error
    found = gathered((fault, path.name, "" if manifest is None else manifest.digest))
    for other, _, _ in found:
        if other is not None:
            raise other
    unlike = next((other for other, (_, *which) in enumerate(found) if which != list(found[0][1:])), None)
    if unlike is not None:
        raise BapipeError(
            f"`checkpoint` {path.parent}: rank {unlike} finds another checkpoint there than rank 0: name a folder on a "
            "disk that all hosts share"
        )
    assert manifest is not None
    return manifest


def _share(manifest: Manifest, index: int, num_ranks: int) -> list[str]:
    """Returns the files that one of the ranks of a host reads: the largest first, each to the rank with the least."""
    shares: list[list[str]] = [[] for _ in range(num_ranks)]
    num_bytes = [0] * num_ranks
    for name in sorted(manifest.files, key=lambda name: (-manifest.files[name].num_bytes, name)):
        least = num_bytes.index(min(num_bytes))
        shares[least].append(name)
        num_bytes[least] += manifest.files[name].num_bytes
    return shares[index]
