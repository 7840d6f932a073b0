"""Training by a plan: starts the ranks, feeds them, keeps checkpoints, and gathers what was measured."""

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from math import isfinite
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from bapipe.errors import BapipeError, RunFailed
from bapipe.formats.plan import Plan
from bapipe.runtime.checkpoint.config import CheckpointConfig
from bapipe.runtime.checkpoint.manifest import Manifest, Position, check_model, list_checkpoints, read_manifest
from bapipe.runtime.checkpoint.writer import CheckpointWriter, load_tensors, tensor_specs
from bapipe.runtime.data.buckets import bucket_examples
from bapipe.runtime.data.loader import Batch, batches, check_enough
from bapipe.runtime.data.validation_split import hold_out
from bapipe.runtime.evaluate.evaluate import EvaluationData, Metric, check_scores, evaluate
from bapipe.runtime.executor import Loss
from bapipe.runtime.launch.processes import launch
from bapipe.runtime.launch.worker import Rank
from bapipe.runtime.lowering import check_runnable, ranks_with_stage
from bapipe.runtime.materialize import layer_seed
from bapipe.runtime.optimizer import optimizer_factory
from bapipe.runtime.pipeline import Pipeline
from bapipe.runtime.train_config import Training
from bapipe.runtime.train_result import Evaluation, StepReport, TrainResult
from bapipe.schedules.table import Action
from bapipe.zoo.data.dataset import PipelineDataset, as_pipeline_dataset
from bapipe.zoo.example import GenerationConfig


class Trainable(Protocol):
    """A model and how to train it; what `build` returns."""

    @property
    def module(self) -> nn.Module: ...
    @property
    def inputs(self) -> tuple[Tensor, ...]: ...
    @property
    def loss(self) -> Loss: ...
    @property
    def initialize(self) -> Callable[[nn.Module], None] | None: ...
    @property
    def metrics(self) -> Mapping[str, Metric]: ...
    @property
    def generation(self) -> GenerationConfig | None: ...


@dataclass(frozen=True, slots=True)
class _Job:
    """What every rank gets; `held_out` is what to evaluate on, `resumed` the checkpoint to go on from."""

    plan: Plan
    build: Callable[[], Trainable]
    dataset: PipelineDataset[Any]
    held_out: PipelineDataset[Any] | None
    training: Training
    keeping: CheckpointConfig | None
    resumed: Path | None
    timeout_s: float

    def manifest(self, position: Position) -> Manifest:
        return Manifest(
            model=self.plan.model,
            optimizer=self.training.optimizer.lower(),
            seed=self.training.seed,
            num_samples=len(self.dataset),
            position=position,
            tensors={},
            optimizer_tensors={},
            files={},
        )


OnEvaluation = Callable[[int, int, Evaluation | None], None]
"""(held-out samples done, all of them, what was found when all are)"""


@dataclass(frozen=True, slots=True)
class _Evaluating:
    """What rank 0 says of an evaluation."""

    done: int
    total: int
    evaluation: Evaluation | None = None


def train(
    plan: Plan,
    build: Callable[[], Trainable],
    data: Dataset[Any],
    training: Training,
    *,
    keeping: CheckpointConfig | None = None,
    timeout_s: float = 600.0,
    on_step: Callable[[StepReport], None] | None = None,
    on_evaluation: OnEvaluation | None = None,
) -> TrainResult:
    """Trains a model by a plan, in processes of its own or as part of a job of torchrun.

    `build` is called in every process and should give the module on the meta device, so that no process holds more
    than its stages. Items of `data` are (input, target), or ((input, ...), target) for several inputs; each epoch
    is another permutation, drawn from the seed, and what does not fill a mini-batch is left out. `build` and `data`
    must be picklable. `on_step` and `on_evaluation` are called in this process; under torchrun in rank 0's. What is
    held out of the data, where the model is evaluated, is not trained on.

    All random numbers of a step are drawn from the seed and the step, so a run that goes on from a
    checkpoint does what one that never stopped would have done.

    Raises:
        BapipeError: the plan cannot run, is not for this model or job, the data does not fill a mini-batch, or a
            checkpoint is damaged or of another model, optimizer, seed or data.
        RunFailed: a rank failed, was killed, or waited longer than `timeout_s`; the loss is not finite; or a
            checkpoint cannot be written.
    """
    ranks = check_runnable(plan)
    dataset, held_out = as_pipeline_dataset(data), None
    if training.evaluate_every is not None:
        dataset, held_out = hold_out(dataset, training.seed, training.evaluate_samples)
        check_scores(_held_out(build(), held_out))
    check_enough(plan, dataset)
    optimizer_factory(training.optimizer, training.learning_rate, training.optimizer_arguments)
    devices = [plan.cluster.devices[rank] for rank in ranks]
    kinds = sorted({device.kind for device in devices})
    if len(kinds) != 1 or kinds[0] not in ("cpu", "cuda"):
        raise BapipeError(
            f"the plan's devices are of kind {', '.join(kinds)}; torch can run a plan of cpu or of cuda devices"
        )
    job = _Job(plan, build, dataset, held_out, training, keeping, _newest(keeping), timeout_s)
    if job.resumed is not None:
        _check_resumed(job, job.resumed)

    def receive(_: int, report: StepReport | _Evaluating) -> None:
        if isinstance(report, _Evaluating):
            if on_evaluation is not None:
                on_evaluation(report.done, report.total, report.evaluation)
        elif on_step is not None:
            on_step(report)

    names = tuple(device.name for device in devices)
    return launch(_train_rank, names, job, kind=kinds[0], timeout_s=timeout_s, on_message=receive)[0]


def _newest(keeping: CheckpointConfig | None) -> Path | None:
    if keeping is None:
        return None
    try:
        keeping.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BapipeError(f"{keeping.folder}: cannot hold checkpoints: {error.strerror}") from None
    found = list_checkpoints(keeping.folder)
    if found and not keeping.resume:
        raise BapipeError(f"{keeping.folder} holds a checkpoint, {found[-1].name}: resume it, or name another folder")
    return found[-1] if found else None


def _check_resumed(job: _Job, path: Path) -> None:
    found, own = read_manifest(path), job.manifest(Position())
    check_model(found, path, tensor_specs(job.build().module.state_dict()))
    for what, there, here in (
        ("optimizer", found.optimizer, own.optimizer),
        ("seed", found.seed, own.seed),
        ("number of samples", found.num_samples, own.num_samples),
    ):
        if there != here:
            raise BapipeError(f"{path} was trained with another {what}: {there} there and {here} here")
    if found.position.step >= job.training.steps:
        raise BapipeError(f"{path} has done {found.position.step} steps; training to {job.training.steps} asks no more")


def _train_rank(rank: Rank, job: _Job) -> TrainResult:
    plan, training = job.plan, job.training
    if rank.device.type == "cpu":
        torch.set_num_threads(training.threads)
    example = job.build()
    pipeline = Pipeline(
        example.module,
        plan,
        loss=example.loss,
        inputs=example.inputs,
        optimizer=optimizer_factory(training.optimizer, training.learning_rate, training.optimizer_arguments),
        clip_norm=training.clip_norm,
        autocast=getattr(torch, training.autocast) if training.autocast else None,
        device=rank.device,
        seed=training.seed,
        initialize=example.initialize,
        buckets=[bucket_examples(example.inputs, shapes) for shapes in job.dataset.bucket_shapes[:-1]],
        evaluates=job.held_out is not None,
    )
    held_out = _held_out(example, job.held_out) if job.held_out is not None else None
    names = tuple(plan.cluster.devices[r].name for r in ranks_with_stage(plan.table))
    writer = CheckpointWriter(job.keeping, timedelta(seconds=job.timeout_s), names) if job.keeping is not None else None
    start = _resume(pipeline, job.resumed)
    pipeline.start_at(start.step)
    _seed(training.seed, rank.index, start.step)
    feed = batches(pipeline, plan, job.dataset, training.seed, start)
    reports, evaluations = [], []
    for step in range(start.step, training.steps):
        rank.enter_step(step)
        _seed(training.seed, rank.index, step)
        rate = training.learning_rate_at(step)
        pipeline.set_learning_rate(rate)
        batch = next(feed)
        reports.append(_step(pipeline, rank, names, step, rate, batch))
        if rank.index == 0:
            rank.report(reports[-1])
        if writer is not None and job.keeping is not None:
            last = step + 1 == training.steps
            if last or (step + 1) % job.keeping.every == 0:
                manifest = msgspec.structs.replace(job.manifest(batch.after), grad_scaler=pipeline.grad_scaler)
                writer.save(manifest, pipeline.state_dict(), pipeline.optimizer_tensors())
        if held_out is not None and training.evaluates_after(step + 1):
            evaluations.append(_evaluate(pipeline, plan, held_out, rank, step + 1))
    if writer is not None:
        writer.wait()
    return replace(_gather(pipeline, rank, names, reports), evaluations=tuple(evaluations))


def _held_out(example: Trainable, dataset: PipelineDataset[Any]) -> EvaluationData:
    generation = example.generation
    length = 0 if generation is None else example.inputs[generation.input_index].shape[1]
    return EvaluationData(dataset=dataset, metrics=example.metrics, generation=generation, max_length=length)


def _evaluate(pipeline: Pipeline, plan: Plan, held_out: EvaluationData, rank: Rank, steps: int) -> Evaluation:
    total = len(held_out.dataset)

    def tell(done: int) -> None:
        rank.enter_step(steps - 1)  # this rank is alive
        if rank.index == 0:
            rank.report(_Evaluating(done, total))

    tell(0)
    found = evaluate(pipeline, plan, held_out, rank.device, steps, tell)
    if rank.index == 0:
        rank.report(_Evaluating(total, total, found))
    return found


def _resume(pipeline: Pipeline, path: Path | None) -> Position:
    if path is None:
        return Position()
    manifest = read_manifest(path)
    if pipeline.grad_scaler is not None and manifest.grad_scaler is not None:
        pipeline.grad_scaler = manifest.grad_scaler
    pipeline.load_optimizer_tensors(load_tensors(path, manifest, pipeline.state_dict()))
    return manifest.position


def _seed(seed: int, rank: int, step: int) -> None:
    """Makes what a step draws depend on nothing before it."""
    value = layer_seed(seed, f"rank {rank} step {step}")
    torch.manual_seed(value)
    random.seed(value)


def _step(
    pipeline: Pipeline, rank: Rank, names: tuple[str, ...], step: int, learning_rate: float, batch: Batch
) -> StepReport:
    dist.barrier()
    start_ns = time.perf_counter_ns()
    loss = pipeline.step(*batch.inputs, target=batch.target, bucket=batch.bucket)
    if rank.device.type == "cuda":
        torch.cuda.synchronize(rank.device)
    elapsed_ns = time.perf_counter_ns() - start_ns
    peak = pipeline.peak_bytes()
    row = [elapsed_ns, loss or 0.0, loss is not None, pipeline.busy_ns(), -1 if peak is None else peak]
    own = torch.tensor(row, dtype=torch.float64, device=rank.device)
    everyone = [torch.empty_like(own) for _ in range(rank.size)]
    dist.all_gather(everyone, own)
    rows = [values.tolist() for values in everyone]
    step_ns = int(max(row[0] for row in rows))
    bubble = 1 - sum(row[3] for row in rows) / (len(rows) * step_ns)
    mean = next(row[1] for row in rows if row[2])
    report = StepReport(
        step=step,
        loss=mean,
        step_ns=step_ns,
        bubble=bubble,
        learning_rate=learning_rate,
        as_planned=batch.bucket is None,
        devices=names,
        peak_bytes=tuple(None if row[4] < 0 else int(row[4]) for row in rows),
    )
    if not isfinite(report.loss):
        raise RunFailed(_why_not_finite(pipeline, names, report))
    return report


def _why_not_finite(pipeline: Pipeline, names: tuple[str, ...], report: StepReport) -> str:
    """Says on which rank weights are no numbers any more; every rank calls it together."""
    broken = [name for name, p in pipeline.named_parameters().items() if not bool(torch.isfinite(p).all())]
    everyone: list[list[str]] = [[] for _ in names]
    dist.all_gather_object(everyone, broken)
    where = [f"rank {r} ({names[r]}) has {len(b)}, '{b[0]}' first" for r, b in enumerate(everyone) if b]
    weights = f"; parameters that are not finite after it: {', '.join(where)}" if where else ""
    return f"the loss is {report.loss} at step {report.step}{weights}: lower the learning rate or look at the data"


def _gather(pipeline: Pipeline, rank: Rank, names: tuple[str, ...], reports: list[StepReport]) -> TrainResult:
    peaks: list[int | None] = [None] * rank.size
    dist.all_gather_object(peaks, pipeline.peak_bytes())
    orders: list[tuple[Action, ...]] = [()] * rank.size
    dist.all_gather_object(orders, pipeline.order)
    return TrainResult(
        losses=tuple(report.loss for report in reports),
        step_ns=tuple(report.step_ns for report in reports),
        as_planned=tuple(report.as_planned for report in reports),
        devices=names,
        peak_bytes=tuple(peaks),
        timeline=pipeline.timeline(),
        order=tuple(orders),
    )
