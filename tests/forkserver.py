"""A process that has imported what tests run in processes of their own, and done nothing else: those are copies of it."""

import multiprocessing

SERVER = multiprocessing.get_context("forkserver")
# Not `bapipe.cli.printing`, which looks at the environment when it is imported.
SERVER.set_forkserver_preload(
    [
        *("tests.cli.forked", "bapipe.cli", "bapipe.planner.plan", "bapipe.planner.action_order.search"),
        *("bapipe.profiler.profile", "bapipe.report", "bapipe.zoo", "rich.progress"),
        *("tests.forked_ranks", "bapipe.runtime.pipeline", "bapipe.training.train_rank"),
    ]
)
