"""Sailor's runs as plans, and which of them cannot be predicted and why."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.clusters.sailor_files import PublishedRun, SailorFiles

MODELS = {"GPT-NEO": "GPT-Neo-2.7", "OPT-350": "OPT-350", "mit": "OPT-350"}
"""The model of a run, by a folder in its path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A published run.

    Attributes:
        stages: the layers of each stage.
        replicas: the GPU and the number of members of each replica of each stage, each on a host of its own.
        notes: what was corrected in its file.
    """

    name: str
    model: str
    stages: tuple[tuple[int, ...], ...]
    replicas: tuple[tuple[tuple[str, int], ...], ...]
    microbatch_size: int
    minibatch_size: int
    measured_s: float
    notes: tuple[str, ...] = ()

    @property
    def num_gpus(self) -> int:
        return sum(members for stage in self.replicas for _, members in stage)

    @property
    def is_mixed(self) -> bool:
        """Whether its GPUs are of several kinds."""
        return len({gpu for stage in self.replicas for gpu, _ in stage}) > 1

    @property
    def devices(self) -> tuple[tuple[tuple[str, int], int], ...]:
        """How many groups of each kind it uses."""
        return tuple(sorted(Counter(group for stage in self.replicas for group in stage).items()))


def read_runs(files: SailorFiles) -> tuple[Run, ...]:
    """Returns all published runs."""
    return tuple(as_run(name, published, files) for name, published in files.runs().items())


def as_run(name: str, published: PublishedRun, files: SailorFiles) -> Run:
    """Returns a published run; a layer that is named twice in the place of one that is missing is put right."""
    model = next(model for folder, model in MODELS.items() if folder in name.split("/"))
    pipeline = published.pipeline_list[0]
    num_layers = len(files.models[model][1])
    stages, notes = with_missing_layer(pipeline.layers_per_stage, num_layers)
    return Run(
        name=name,
        model=model,
        stages=stages,
        replicas=tuple(
            tuple((hosts[0][0], members) for hosts, members in replicas) for replicas in pipeline.tmp_per_stage
        ),
        microbatch_size=published.mbs,
        minibatch_size=published.gbs,
        measured_s=published.real,
        notes=notes,
    )


def with_missing_layer(
    stages: Sequence[Sequence[int]], num_layers: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
    """Returns the layers of each stage, and what was put right: one layer named twice and another one not at all.

    A layer stands in the place of the missing one if all of them are then in order.
    """
    given = [layer for stage in stages for layer in stage]
    wrong = [index for index, layer in enumerate(given) if layer != index]
    if len(given) != num_layers or len(wrong) != 1:
        return tuple(tuple(stage) for stage in stages), ()
    ordered = iter(range(num_layers))
    right = tuple(tuple(next(ordered) for _ in stage) for stage in stages)
    return right, (f"layer {given[wrong[0]]} stands in the place of layer {wrong[0]}",)


def left_out(runs: Sequence[Run], files: SailorFiles) -> Mapping[str, str]:
    """Returns the runs that are not compared, and why (docs/clusters.md)."""
    reasons = {run.name: _reason(run, runs, files) for run in runs}
    return {name: reason for name, reason in reasons.items() if reason}


def _reason(run: Run, runs: Sequence[Run], files: SailorFiles) -> str:
    num_layers = len(files.models[run.model][1])
    named = [layer for stage in run.stages for layer in stage]
    if named != list(range(num_layers)):
        others = [m for m in MODELS.values() if m != run.model and named == list(range(len(files.models[m][1])))]
        whose = f", as {others[0]} has" if others else ""
        return f"its plan has layers 0 to {max(named)}{whose}; {run.model} has {num_layers}"
    for other in runs:
        if other is not run and other.measured_s == run.measured_s and other.devices != run.devices:
            return f"{run.measured_s} s is also what {other.name} has, on other devices"
    num_microbatches = run.minibatch_size // (run.microbatch_size * len(run.replicas[0]))
    if num_microbatches == 1 and len(run.stages) > 1:
        return "one micro-batch on several stages"
    return _disturbed(run, files)


def _disturbed(run: Run, files: SailorFiles) -> str:
    """Returns which profile of a run is slower at its micro-batch size than at twice the size."""
    for gpu, members in sorted({group for stage in run.replicas for group in stage}):
        times, size = files.times(run.model, gpu)[0], run.microbatch_size
        at, twice = (times.get((samples, members)) for samples in (size, 2 * size))
        if at and twice and sum(at.forward_ns + at.backward_ns) > sum(twice.forward_ns + twice.backward_ns):
            return f"the profile of {members} {gpu} is slower at micro-batches of {size} than of {2 * size}"
    return ""
