"""The files of Sailor's repository, or of a folder with its data only."""

from collections.abc import Mapping
from functools import cache, cached_property
from pathlib import Path

import msgspec

from bapipe.errors import BapipeError
from bapipe.formats.files import naming_file, read_limited
from bapipe.formats.strict_json import decode_json
from bapipe.importers.sailor import Models, Times, read_models, read_times


class PublishedPipeline(msgspec.Struct, frozen=True):
    """A pipeline of a plan; `tmp_per_stage` has for each replica of each stage its hosts, and its number of members."""

    num_stages: int
    layers_per_stage: tuple[tuple[int, ...], ...]
    tmp_per_stage: tuple[tuple[tuple[tuple[tuple[str, int, str], ...], int], ...], ...]


class PublishedRun(msgspec.Struct, frozen=True):
    """A plan with its micro-batch size, mini-batch size, and measured seconds a step."""

    pipeline_list: tuple[PublishedPipeline]
    mbs: int
    gbs: int
    real: float


_Bandwidths = dict[str, dict[str, tuple[tuple[float, ...], float]]]


class SailorFiles:
    """Where a folder has what; the folder is a checkout, or holds the same data without the code around it.

    Raises:
        BapipeError: the folder holds neither.
    """

    def __init__(self, folder: Path) -> None:
        planner = folder / "sailor" / "Planner"
        is_checkout = planner.is_dir()
        self._layers = (planner if is_checkout else folder) / "llm_info.json"
        self._times = (planner / "sailor_planner" if is_checkout else folder) / "profiles"
        self._metis = (planner / "baselines" if is_checkout else folder) / "Metis" / "profiles"
        self._runs = (planner / "simulations" if is_checkout else folder) / "validation"
        self._links = (folder / "sailor" if is_checkout else folder) / "providers" / "intra_node_bandwidths.json"
        for path in (self._layers, self._times, self._metis, self._runs, self._links):
            if not path.exists():
                raise BapipeError(f"{path}: no such file; want a checkout of github.com/eth-easl/sailor, or its data")

    @cached_property
    def models(self) -> Models:
        """The layers of each model."""
        return read_models(self._layers)

    def runs(self) -> Mapping[str, PublishedRun]:
        """Returns the published runs by their paths in the folder of runs, without endings."""
        found: dict[str, PublishedRun] = {}
        for path in sorted(self._runs.rglob("plan_config_*.json"), key=_natural):
            with naming_file(path):
                name = path.relative_to(self._runs).with_suffix("").as_posix().replace("plan_config_", "")
                found[name] = decode_json(read_limited(path), PublishedRun)
        return found

    def ring_bytes_per_s(self, gpu: str, members: int) -> int:
        """Returns what a member sends to the next one in a ring within a host."""
        with naming_file(self._links):
            found: _Bandwidths = decode_json(read_limited(self._links), _Bandwidths)
        return round(found[gpu][str(members)][1] / (members // 2))

    @cache  # noqa: B019 (one object for each run of the program)
    def times(self, model: str, gpu: str) -> tuple[Times, str]:
        """Returns the times of a model, and what is to be said about them: from which file, and why not another."""
        own = self._times / model / gpu / "profile.json"
        why_not = self._why_not(own, model)
        if not why_not:
            return read_times(own), ""
        return read_times(self._metis / model / gpu), f"{model} on {gpu}: table for Metis; {why_not}"

    def _why_not(self, path: Path, model: str) -> str:
        """Returns why a file of times is not a model's; empty if it is.

        Of two equal files, the one is a copy whose model has another number of layers; if both models have as many,
        neither is used.
        """
        if not path.exists():
            return "no file of its own"
        times = read_times(path)
        wanted, found = self._num_layers(model), max(len(at.forward_ns) for at in times.values())
        for other in sorted(self._times.glob(f"*/{path.parent.name}/profile.json")):
            name = other.parent.parent.name
            is_copy = found != wanted or self._num_layers(name) == found
            if other != path and is_copy and read_times(other) == times:
                return f"its own file is a copy of that of {name}"
        return "" if found == wanted else f"its own file has {found} layers, the model {wanted}"

    def _num_layers(self, model: str) -> int:
        """Returns how many layers a model has, 0 for an unknown one."""
        return max(map(len, self.models.get(model, {}).values()), default=0)


def _natural(path: Path) -> tuple[tuple[int, str], ...]:
    """Returns what sorts N2 before N16."""
    return tuple((len(part), part) for part in path.parts)
