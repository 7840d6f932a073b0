"""Names of library arguments and the command-line flags that set them, to translate the library's errors."""

import re

FLAGS = {
    "arguments": "--arg",
    "augment": "--augment",
    "autocast": "--autocast",
    "buckets": "--buckets",
    "checkpoint": "--checkpoint",
    "checkpoint_every": "--checkpoint-every",
    "clip_norm": "--clip-norm",
    "cluster": "--cluster",
    "constraints": "--constraint",
    "cuts": "--cut",
    "data": "--data",
    "data_workers": "--data-workers",
    "device": "--device",
    "evaluate_every": "--eval-every",
    "evaluate_samples": "--eval-samples",
    "html": "--html",
    "keep": "--keep",
    "kind": "--kind",
    "largest": "--largest",
    "layer_by_layer": "--layer-by-layer",
    "group": "--group",
    "leaf_modules": "--leaf-module",
    "least": "--least",
    "learning_rate": "--lr",
    "learning_rate_schedule": "--lr-schedule",
    "memory_limit_bytes": "--memory-limit",
    "memory_margin": "--memory-margin",
    "microbatch_size": "--microbatch-size",
    "microbatch_sizes": "--microbatch-size",
    "minibatch_size": "--minibatch-size",
    "min_throughput": "--min-throughput",
    "num_devices": "--devices",
    "num_stages": "--stages",
    "objective": "--objective",
    "optimizer": "--optimizer",
    "optimizer_arguments": "--optimizer-arg",
    "pin": "--pin",
    "port": "--port",
    "profiles": "--profile",
    "recompute": "--recompute",
    "recompute_layers": "--recompute-layer",
    "replan": "--replan",
    "replicas": "--no-replicas",
    "report_every": "--report-every",
    "resume": "--resume",
    "schedules": "--schedule",
    "seed": "--seed",
    "skip_unreadable": "--skip-unreadable",
    "steps": "--steps",
    "swap": "--swap",
    "tensorboard": "--tensorboard",
    "threads": "--threads",
    "time_limit_s": "--time-limit",
    "timeout_s": "--timeout",
    "trace": "--trace",
    "trust_factory": "--trust-factory",
    "vary": "--vary",
    "warmup_steps": "--warmup",
    "weights": "--weights",
    "whole": "--whole",
    "within": "--within",
    "without": "--without",
}
"""The flag of each argument that an error text of the library may name."""


_ARGUMENT = re.compile(r"`(?:settings=bapipe\.Settings\()?(\w+)(?:=\.\.\.\))?`")
"""An argument as texts name it, or one of the settings that are given as an argument."""


def with_flags(text: str) -> str:
    """Returns an error text of the library with each argument in backticks replaced by its command-line flag."""
    return _ARGUMENT.sub(lambda match: FLAGS.get(match[1], match[0]), text)
