"""Ctrl-C while CP-SAT solves, and after it."""

import os
import subprocess
import sys

from tests import ROOT

SCRIPT = """
import os, signal, threading, time
from random import Random
from bapipe.planner.action_order.cp_sat import solve
from bapipe.planner.action_order.problem import order_problem, orders_of, sequential_schedule
from bapipe.planner.compute.deadline import UNLIMITED, Deadline
from tests.random_pipelines import random_pipeline

p = random_pipeline(Random(1), (0, 1, 2, 3, 0, 1, 2, 3), 8)
problem = order_problem(p.stages, p.devices, p.cluster, p.num_microbatches, p.memory_bytes)
hint = orders_of(sequential_schedule(p.devices, 8, 4))
deadline = Deadline(None)

def seconds(deadline):
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    start_s = time.monotonic()
    try:
        found = solve(problem, hint, below_ns=10**12, effort=1000.0, seed=0, deadline=deadline)
        print("stopped", found.orders is not None, 0 < found.lower_bound_ns < 10**12)
    except KeyboardInterrupt:
        print("interrupted")
    assert 1.0 <= time.monotonic() - start_s < 20.0  # else it takes minutes

solve(problem, hint, below_ns=10**12, effort=0.01, seed=0)
usual = signal.signal(signal.SIGINT, lambda *_: deadline.stop())
seconds(deadline)
signal.signal(signal.SIGINT, usual)
seconds(UNLIMITED)
"""


def test_ctrl_c_is_this_programs_own_while_it_solves_and_afterwards() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "stopped True True\ninterrupted\n"), done.stderr
