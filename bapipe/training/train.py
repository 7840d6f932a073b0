"""Training by a plan: checks model, data and configuration, starts the ranks and passes on their reports."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from torch.utils.data import Dataset

from bapipe.device_types import type_of_kind
from bapipe.errors import BapipeError
from bapipe.formats.cluster import Device
from bapipe.formats.plan import Plan
from bapipe.runtime.runnable import check_runnable, type_to_run
from bapipe.torchrun import current_job, is_first_rank
from bapipe.training.checkpoint.folder import Checkpoint, list_checkpoints, newest_checkpoint, only_writer
from bapipe.training.checkpoint.manifest import read_manifest, read_unhashed
from bapipe.training.checkpoint.state_outside import check_no_extra_state
from bapipe.training.data.loader import check_enough, warn_if_items_change
from bapipe.training.data.samples_digest import samples_digest
from bapipe.training.data.training_data import check_items
from bapipe.training.data.validation_split import hold_out
from bapipe.training.evaluate.evaluate import check_scores
from bapipe.training.job_facts import job_facts
from bapipe.training.launch.processes import launch
from bapipe.training.train_config import TrainConfig
from bapipe.training.train_job import TrainJob, check_resumable
from bapipe.training.train_rank import EvaluationProgress, evaluation_data, train_rank
from bapipe.training.train_result import OnEvaluation, OnStep, StepReport, TrainResult
from bapipe.zoo.data.dataset import as_pipeline_dataset
from bapipe.zoo.example import Example


def train(
    plan: Plan,
    build: Callable[[], Example],
    data: Dataset[Any],
    config: TrainConfig,
    *,
    example: Example | None = None,
    on_step: OnStep | None = None,
    on_evaluation: OnEvaluation | None = None,
) -> TrainResult:
    """Trains a model by a plan, in processes of its own or as part of a torchrun job.

    Args:
        build: called once in every rank; it should give the module on the meta device, so that no process holds more
            than its stages. Must be picklable.
        data: see `PipelineDataset`; each epoch is another permutation, drawn from the seed, and items that do not
            fill a mini-batch are left out. What is held out of it for evaluation is not trained on. Must be picklable.
        config: its `factory`, `arguments`, `data`, `buckets` and `augment` are in `build` and `data` already.
        example: what `build` returns, if the caller has it.
        on_step, on_evaluation: called in this process; under torchrun in rank 0's.

    All random numbers of a step are drawn from the seed and the step, so a run that resumes from a checkpoint
    continues as if it had never stopped.

    Raises:
        BapipeError: the plan cannot run, or is not for this model or job; the data does not fill a mini-batch; there
            are to be checkpoints, but the model has extra state; a checkpoint is of another model, optimizer, seed or
            data; all checkpoints are damaged; or another run writes to their folder.
        RunFailed: a rank failed, was killed, or waited longer than `timeout_s`; the loss is not finite; or a
            checkpoint cannot be written.
    """
    ranks = check_runnable(plan)
    example = example or build()
    dataset, validation = as_pipeline_dataset(data), None
    if config.evaluate_every is not None:
        dataset, validation = hold_out(dataset, config.seed, config.evaluate_samples)
        check_items(validation, example.tensors, f"{config.data}, held out")
        check_scores(evaluation_data(example, validation, config.seed))
    check_enough(plan, dataset)
    if len(ranks) > 1 and is_first_rank():
        warn_if_items_change(dataset, len(example.tensors), config.seed)
    if config.checkpoint is not None:
        check_no_extra_state(example.module)
    compares_samples = config.checkpoint is not None or current_job() is not None
    samples = samples_digest(dataset) if compares_samples else None
    devices, kind = [plan.cluster.devices[rank] for rank in ranks], type_to_run(plan)
    job = TrainJob(
        plan=plan,
        build=build,
        dataset=dataset,
        samples=samples,
        validation=validation,
        config=config,
        learning_rate=example.learning_rate if config.learning_rate is None else config.learning_rate,
        optimizer=config.optimizer_for(plan.compute_settings),
        devices=tuple(device.name for device in devices),
        resume_from=None,
        verifies_together=(joined := current_job()) is not None and joined.size > 1,
    )
    job.optimizer_factory()  # wrong arguments fail here, before the ranks start

    def receive(_: int, report: StepReport | EvaluationProgress) -> None:
        if isinstance(report, EvaluationProgress):
            if on_evaluation is not None:
                on_evaluation(report.done, report.total, report.evaluation)
        elif on_step is not None:
            on_step(report)

    # In a job of torchrun every rank calls this function; rank 0 holds the lock for all.
    is_first = is_first_rank()
    with only_writer(config.checkpoint) if config.checkpoint is not None and is_first else nullcontext():
        newest = _newest_checkpoint(job, example, tell=is_first)
        results = launch(
            train_rank,
            job.devices,
            replace(job, resume_from=newest),
            kind=kind,
            places=[_place(device, plan.cluster.devices) for device in devices],
            devices=devices,
            timeout_s=config.timeout_s,
            on_message=receive,
            stops_between_steps=config.checkpoint is not None,
            memory_advice=[_memory_advice(plan, name) for name in job.devices],
            facts=job_facts(plan, config, dataset, samples, newest) if current_job() is not None else {},
        )
    return results[0]


def _place(device: Device, devices: Sequence[Device]) -> int:
    """Returns the index of a device among those of its host and type."""
    own = device.host, type_of_kind(device.kind)
    return [other for other in devices if (other.host, type_of_kind(other.kind)) == own].index(device)


def _memory_advice(plan: Plan, name: str) -> str:
    """Returns, for a rank that runs out of memory, what it was predicted to need, and how to plan for less."""
    peaks = plan.prediction.peaks_bytes
    peak = peaks.get(name)
    if peak is None:
        return "plan again with less memory"
    hosts = {device.name: device.host for device in plan.cluster.devices}
    on_host = sum(other for device, other in peaks.items() if hosts.get(device) == hosts[name])
    return (
        f"its predicted peak is {peak} bytes, that of all ranks of its host {on_host}: plan again with a "
        f"`memory_limit_bytes` below {peak}, so that stages recompute, or with a smaller `microbatch_size`"
    )


def _newest_checkpoint(job: TrainJob, example: Example, *, tell: bool) -> Checkpoint | None:
    """Returns the checkpoint to continue from; `tell` logs a line if newer ones are damaged.

    In a job the ranks verify what its files hold when they have joined.
    """
    folder = job.config.checkpoint
    if folder is None:
        return None
    existing = list_checkpoints(folder)
    if existing and not job.config.resume:
        raise BapipeError(f"{folder} holds a checkpoint, {existing[-1].name}: resume it, or name another folder")
    newest = newest_checkpoint(folder, read=read_unhashed if job.verifies_together else read_manifest, tell=tell)
    if newest is not None:
        check_resumable(job, newest, example)
    return newest
