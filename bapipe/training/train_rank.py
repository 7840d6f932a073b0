"""Training by a plan, in one rank: feeds its stages, keeps checkpoints, evaluates, and gathers what was measured."""

import time
from array import array
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from bapipe.errors import Stopped
from bapipe.job.groups import gathered
from bapipe.module_state.modes import enter_training_mode
from bapipe.printable import counted
from bapipe.runtime.peak_memory import check_free_memory
from bapipe.runtime.pipeline import Pipeline
from bapipe.runtime.rng import seed_step
from bapipe.torch_settings import autocast_dtype
from bapipe.training.checkpoint.folder import Checkpoint, newest_checkpoint, set_damaged_aside
from bapipe.training.checkpoint.manifest import Position
from bapipe.training.checkpoint.read_together import read_together
from bapipe.training.checkpoint.state_outside import StateOutside
from bapipe.training.checkpoint.weights import load_weights
from bapipe.training.checkpoint.writer import AGAIN_S, CheckpointWriter, load_tensors
from bapipe.training.data.buckets import bucket_examples
from bapipe.training.data.loader import Batch, RankParts, batches
from bapipe.training.data.workers import num_data_workers
from bapipe.training.evaluate.evaluate import EvaluationData, evaluate
from bapipe.training.launch.worker import Rank
from bapipe.training.not_finite import check_parameters
from bapipe.training.step_reports import StepReports
from bapipe.training.train_job import TrainJob, check_resumable
from bapipe.training.train_result import Evaluation, StepReport, TrainResult
from bapipe.zoo.data.dataset import PipelineDataset
from bapipe.zoo.example import Example


@dataclass(frozen=True, slots=True)
class EvaluationProgress:
    """What rank 0 reports during an evaluation."""

    done: int
    total: int
    evaluation: Evaluation | None = None


class _AskedToStop(Exception):
    """Raised in all ranks during an evaluation if signal `number` has asked one of them to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankRun:
    """A run of training, in one rank.

    Attributes:
        writer: writes checkpoints; None without a folder for them.
        validation: what to evaluate on; None without evaluations.
    """

    rank: Rank
    job: TrainJob
    pipeline: Pipeline
    writer: CheckpointWriter | None
    validation: EvaluationData | None


class _History:
    """What the result holds of each step, in 25 bytes a step: a run may have millions."""

    def __init__(self) -> None:
        self.losses, self.step_ns, self.data_ns, self.as_planned = array("d"), array("q"), array("q"), bytearray()

    def add(self, report: StepReport) -> None:
        self.losses.append(report.loss)
        self.step_ns.append(report.step_ns)
        self.data_ns.append(report.data_ns)
        self.as_planned.append(report.as_planned)


def train_rank(rank: Rank, job: TrainJob) -> TrainResult:
    """Trains this rank's stages; every rank of the job calls it, and all return the same."""
    plan = job.plan
    settings = plan.compute_settings
    if rank.device.type == "cpu":
        torch.set_num_threads(settings.threads)
    check_free_memory(rank.device, rank.name, plan.prediction.peaks_bytes.get(rank.name, 0))
    example = job.build()
    job = _verified(rank, job, example)
    enter_training_mode(example.module)
    if settings.channels_last:
        example.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with _pipeline(rank, job, example) as pipeline:
        return _train(rank, job, example, pipeline)


def _verified(rank: Rank, job: TrainJob, example: Example) -> TrainJob:
    """Returns the job with a checkpoint to continue from that is whole; all ranks of a job verify it together."""
    if job.resume_from is None or not job.verifies_together:
        return job
    found = newest_checkpoint(job.resume_from.path.parent, read=read_together, tell=rank.index == 0)
    assert found is not None
    check_resumable(job, found, example)
    return replace(job, resume_from=found)


def _train(rank: Rank, job: TrainJob, example: Example, pipeline: Pipeline) -> TrainResult:
    config = job.config
    validation = None if job.validation is None else evaluation_data(example, job.validation, config.seed)
    start = _resume(pipeline, job.resume_from)
    writer = _checkpoint_writer(rank, job, start)
    if config.weights is not None and job.resume_from is None:
        load_weights(config.weights, pipeline.state_dict())
    pipeline.start_at(start.step)
    seed_step(config.seed, rank.index, start.step)
    outside = None if writer is None else StateOutside([example.module, *pipeline.modules.values()], example.loss)
    run = _RankRun(rank=rank, job=job, pipeline=pipeline, writer=writer, validation=validation)
    with closing(_loader(run, example, start)) as loader:
        history, evaluations = _train_steps(run, loader, start, outside)
    if writer is not None:
        writer.wait()
    return replace(_gather(run, history), evaluations=tuple(evaluations))


def _pipeline(rank: Rank, job: TrainJob, example: Example) -> Pipeline:
    return Pipeline(
        example.module,
        job.plan,
        loss=example.loss,
        inputs=example.inputs,
        optimizer=job.optimizer_factory(),
        clip_norm=job.config.clip_norm,
        autocast=autocast_dtype(job.plan.compute_settings),
        device=rank.device,
        seed=job.config.seed,
        initialize=example.initialize,
        buckets=[bucket_examples(example.tensors, shapes) for shapes in job.dataset.bucket_shapes[:-1]],
        evaluates=job.validation is not None,
    )


def _checkpoint_writer(rank: Rank, job: TrainJob, start: Position) -> CheckpointWriter | None:
    """Returns the writer of checkpoints, None without a folder for them; sets damaged newer checkpoints aside."""
    config = job.config
    if config.checkpoint is None:
        return None
    if rank.index == 0:
        set_damaged_aside(config.checkpoint, start.step)
    # A rank that pauses before the second try must not be taken for one that hangs: the pause is below the timeout.
    again_s = min(AGAIN_S, config.timeout_s / 4)
    return CheckpointWriter(
        config.checkpoint,
        config.num_kept,
        rank.group_timeout,
        job.devices,
        rank.device,
        again_s,
        on_meeting=rank.note_meeting,
    )


def _loader(run: _RankRun, example: Example, start: Position) -> Generator[Batch, None, None]:
    """Returns the mini-batches of the run from a position on, loaded ahead by worker processes where that helps."""
    job, plan, config, on_gpu = run.job, run.job.plan, run.job.config, run.rank.device.type == "cuda"
    num_workers = num_data_workers(
        config.data_workers,
        job.dataset,
        on_gpu=on_gpu,
        num_ranks=run.rank.size,
        num_threads=plan.compute_settings.threads,
        batch_bytes=plan.minibatch_size * sum(x.nbytes // x.shape[0] for x in example.tensors),
    )
    return batches(
        RankParts.of(run.pipeline, plan, config.seed),
        job.dataset,
        start,
        num_workers=num_workers,
        pin_memory=on_gpu,
    )


def _train_steps(
    run: _RankRun, loader: Iterator[Batch], start: Position, outside: StateOutside | None
) -> tuple[_History, list[Evaluation]]:
    """Runs the steps from a position to the last one, with the checkpoints and evaluations between them.

    An evaluation that is due at the position comes first: the earlier run may have been stopped in it, after its
    checkpoint. A signal ends an evaluation, which may take longer than there is time after a signal, and leaves it to
    the run that resumes; but the one after the last step is completed.

    Raises:
        Stopped: a signal has asked for it; the step is done, and its checkpoint written.
        RunFailed: a loss, or a parameter that a checkpoint would hold, is not finite, or a checkpoint is not written.
    """
    rank, job, pipeline, config = run.rank, run.job, run.pipeline, run.job.config

    def load_again(before: Position) -> Batch:
        with closing(batches(RankParts.of(pipeline, job.plan, config.seed), job.dataset, before)) as again:
            return next(again)

    reports = StepReports(pipeline, rank, job.devices, config.report_every, load_again)
    history, evaluations, position = _History(), list[Evaluation](), start
    ahead: Batch | None = None
    if start.step > 0:
        evaluations += _evaluations(run, start.step, unsaved=None)
    for step in range(start.step, config.steps):
        rank.enter_step(step)
        seed_step(config.seed, rank.index, step)
        learning_rate = config.learning_rate_at(step, job.learning_rate)
        pipeline.set_learning_rate(learning_rate)
        before_ns = time.perf_counter_ns()
        batch = next(loader) if ahead is None else ahead
        reports.start(step, learning_rate, batch, position, time.perf_counter_ns() - before_ns)
        position, ahead, ahead_ns = batch.after, None, 0
        if outside is not None and step == start.step:
            outside.warn_if_changed()
        if not (reports.are_due or config.pauses_after(step + 1)):
            continue
        if rank.device.type == "cuda" and not config.pauses_after(step + 1):
            # A report waits for the GPU, which can copy the next mini-batch meanwhile.
            before_ns = time.perf_counter_ns()
            ahead = _copied_ahead(pipeline, next(loader))
            ahead_ns = time.perf_counter_ns() - before_ns
        finished, stop_signal = reports.collect(ahead_ns)
        for report in finished:
            history.add(report)
            if rank.index == 0:
                rank.report(report)
        if run.writer is not None:
            run.writer.check()
        is_saved = bool(stop_signal) or config.checkpoint_after(step + 1)
        if is_saved:
            _save(run, position)
        if stop_signal and step + 1 < config.steps:
            raise _stopped(run, stop_signal, step + 1)
        evaluations += _evaluations(run, step + 1, unsaved=None if is_saved else position)
    return history, evaluations


def _copied_ahead(pipeline: Pipeline, batch: Batch) -> Batch:
    """Returns a mini-batch whose tensors are being copied to the device."""
    inputs, target = pipeline.copied_ahead(batch.inputs, batch.target)
    return replace(batch, inputs=inputs, target=target)


def _save(run: _RankRun, position: Position) -> None:
    """Starts to write a checkpoint, if there are to be any; the next update waits until the state has been copied."""
    if run.writer is None:
        return
    pipeline = run.pipeline
    check_parameters(pipeline, run.job.devices, position.step - 1)
    manifest = msgspec.structs.replace(run.job.manifest(position), grad_scaler=pipeline.grad_scaler)
    copied = run.writer.save(
        manifest,
        pipeline.state_dict(),
        pipeline.non_persistent_buffers(),
        pipeline.optimizer_state(),
        pipeline.changed_by_forwards(),
    )
    pipeline.keep_state_until(copied)


def _stopped(run: _RankRun, number: int, steps: int) -> Stopped:
    if run.writer is None:
        return Stopped(number, f" after {counted(steps, 'step')}, without a checkpoint")
    run.writer.wait()
    return Stopped(number, f" after {counted(steps, 'step')}, of which there is a checkpoint: continue with `resume`")


def evaluation_data(example: Example, dataset: PipelineDataset[Any], seed: int) -> EvaluationData:
    """Returns the data set with what else is needed to evaluate the example's model on it."""
    generation = example.generation
    length = 0 if generation is None else example.tensors[generation.input_index].shape[1]
    return EvaluationData(dataset=dataset, metrics=example.metrics, generation=generation, max_length=length, seed=seed)


def _evaluations(run: _RankRun, steps: int, *, unsaved: Position | None) -> list[Evaluation]:
    """Returns the evaluation that is due after some steps, if one is; `unsaved` is the position without a checkpoint.

    Raises:
        Stopped: a signal has asked for it, before the last step; there is a checkpoint.
    """
    if run.validation is None or not run.job.config.evaluates_after(steps):
        return []
    try:
        return [_evaluate(run, run.validation, steps, may_stop=steps < run.job.config.steps)]
    except _AskedToStop as asked:
        if unsaved is not None:
            _save(run, unsaved)
        raise _stopped(run, asked.number, steps) from None


def _evaluate(run: _RankRun, data: EvaluationData, steps: int, *, may_stop: bool) -> Evaluation:
    """Returns the evaluation after some steps.

    Raises:
        _AskedToStop: if it `may_stop`, on all ranks.
    """
    rank, total = run.rank, len(data.dataset)

    def on_progress(done: int) -> None:
        rank.enter_step(steps - 1)  # shows the launcher that this rank makes progress
        if rank.index == 0:
            rank.report(EvaluationProgress(done, total))
        if may_stop and (number := _stop_signal_of_any(rank)):
            raise _AskedToStop(number)

    on_progress(0)
    evaluation = evaluate(run.pipeline, run.job.plan, data, rank.device, steps, on_progress)
    if rank.index == 0:
        rank.report(EvaluationProgress(total, total, evaluation))
    return evaluation


def _stop_signal_of_any(rank: Rank) -> int:
    asked = torch.tensor(rank.stop_signal, device=rank.device)
    dist.all_reduce(asked, dist.ReduceOp.MAX)
    return int(asked)


def _resume(pipeline: Pipeline, checkpoint: Checkpoint | None) -> Position:
    if checkpoint is None:
        return Position()
    path, manifest = checkpoint.path, checkpoint.manifest
    optimizers = load_tensors(path, manifest, pipeline.state_dict(), pipeline.non_persistent_buffers())
    if manifest.grad_scaler is not None:
        optimizers["grad_scaler"] = msgspec.structs.asdict(manifest.grad_scaler)
    pipeline.load_optimizer_state(optimizers)
    return manifest.position


def _gather(run: _RankRun, history: _History) -> TrainResult:
    pipeline = run.pipeline
    return TrainResult(
        losses=tuple(history.losses),
        step_ns=tuple(history.step_ns),
        data_ns=tuple(history.data_ns),
        as_planned=tuple(map(bool, history.as_planned)),
        devices=run.job.devices,
        peak_bytes=tuple(gathered(pipeline.peak_bytes())),
        timeline=pipeline.timeline(),
        order=tuple(gathered(pipeline.order)),
    )
