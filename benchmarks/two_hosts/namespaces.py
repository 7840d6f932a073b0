"""Two network namespaces with one limited link between them: for torch they are two hosts."""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOSTS = ("a", "b")
PORT = 29_517
_CLONE_NEWNET = 0x40000000
_NOTHING: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class TwoHosts:
    """Two namespaces, each with one end of a link; names are of this process, so several can be there at once."""

    key: str

    def limit(self, rate: str, burst: str) -> None:
        """Limits both directions of the link, as `tc` writes rates: 100mbit, 1gbit; a burst goes through unlimited."""
        for host in HOSTS:
            _do("ip", "netns", "exec", self._space(host), "tc", "qdisc", "replace", "dev", self._end(host), "root",
                "tbf", "rate", rate, "burst", burst, "latency", "50ms")  # fmt: skip

    def cut(self) -> None:
        """Takes the link down for good. Connections over it get no error, and wait."""
        for host in HOSTS:
            _do("ip", "-n", self._space(host), "link", "set", self._end(host), "down")

    def enter(self, host: int) -> None:
        """Moves this process to a host, and sets the address of the rendezvous to the first host."""
        with open(f"/var/run/netns/{self._space(HOSTS[host])}") as space:
            if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        os.environ |= {"MASTER_ADDR": _address(0), "GLOO_SOCKET_IFNAME": self._end(HOSTS[host])}

    def start(self, host: int, command: Sequence[str], env: Mapping[str, str], **more: Any) -> "subprocess.Popen[str]":
        """Starts a command on a host as its only process of a job, with the environment that torchrun would set."""
        name = HOSTS[host]
        whole = os.environ | {
            "RANK": str(host), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(host),
            "MASTER_ADDR": _address(0), "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": self._end(name),
            "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR",
        } | dict(env)  # fmt: skip
        inside = ["ip", "netns", "exec", self._space(name), *command]
        return subprocess.Popen(inside, env=whole, text=True, **more)

    def run(self, arguments: Sequence[str], timeout_s: float, env: Mapping[str, str] = _NOTHING) -> str:
        """Runs Python with these arguments on both hosts; returns what the first one printed."""
        return self._both([[sys.executable, *arguments]] * 2, timeout_s, env)

    def torchrun(self, command: Sequence[str], timeout_s: float) -> str:
        """Runs a command on both hosts under torchrun; returns what the first host printed."""
        job = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--no-python"]
        rendezvous = ["--master-addr", _address(0), "--master-port", str(PORT)]
        return self._both(
            [[*job, *rendezvous, "--node-rank", str(host), *command] for host in range(2)], timeout_s, _NOTHING
        )

    def _both(self, commands: Sequence[Sequence[str]], timeout_s: float, env: Mapping[str, str]) -> str:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        both = [self.start(host, command, env, **pipes) for host, command in enumerate(commands)]
        try:
            outputs = [process.communicate(timeout=timeout_s) for process in both]
        finally:
            for process in both:
                process.kill()
        for process, command, (_, errors) in zip(both, commands, outputs, strict=True):
            if process.returncode:
                raise RuntimeError(f"{' '.join(command)} failed: {errors[-2000:]}")
        return outputs[0][0]

    def _space(self, host: str) -> str:
        return f"bapipe-{self.key}-{host}"

    def _end(self, host: str) -> str:
        return f"bp{self.key}{host}"


def why_not() -> str | None:
    """Returns why namespaces cannot be made here, None if they can."""
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"there is no program '{program}' here; it comes with iproute2"
    try:
        with two_hosts() as hosts:
            hosts.limit("1gbit", "128kb")
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not permitted here: {str(error.stderr).strip().splitlines()[0]}"
    return None


@contextmanager
def two_hosts(delay_ms: float = 0, loss_percent: float = 0) -> Iterator[TwoHosts]:
    """Makes the namespaces, and removes them at the end, with all processes in them.

    With a delay, of each direction, or a loss of packets, their link is one that `poor_link` passes on.
    """
    hosts = TwoHosts(str(os.getpid()))
    spaces, ends = [hosts._space(host) for host in HOSTS], [hosts._end(host) for host in HOSTS]
    made: list[str] = []
    try:
        for space in spaces:
            _do("ip", "netns", "add", space)
            made.append(space)
            with suppress(subprocess.CalledProcessError):  # it fills a link both ways; bbr keeps 5 to 9 % free
                _do("ip", "netns", "exec", space, "sysctl", "-qw", "net.ipv4.tcp_congestion_control=reno")
        with _link(spaces, ends, delay_ms, loss_percent):
            for place, (space, end) in enumerate(zip(spaces, ends, strict=True)):
                _do("ip", "-n", space, "address", "add", f"{_address(place)}/24", "dev", end)
                for link in ("lo", end):
                    _do("ip", "-n", space, "link", "set", link, "up")
            yield hosts
    finally:
        for space in made:
            for pid in _do("ip", "netns", "pids", space).split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            _do("ip", "netns", "delete", space)


@contextmanager
def _link(spaces: Sequence[str], ends: Sequence[str], delay_ms: float, loss_percent: float) -> Iterator[None]:
    """Connects the namespaces; the link is there until the context is left, or the namespaces are removed."""
    if not delay_ms and not loss_percent:
        peer = ("peer", "name", ends[1], "netns", spaces[1])
        _do("ip", "link", "add", ends[0], "netns", spaces[0], "type", "veth", *peer)
        yield
        return
    link = [str(delay_ms), str(loss_percent), spaces[0], ends[0], spaces[1], ends[1]]
    command = [sys.executable, "-m", "benchmarks.two_hosts.poor_link", *link]
    root = str(Path(__file__).parents[2])
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, start_new_session=True) as forwarder:
        try:
            assert forwarder.stdout is not None
            if forwarder.stdout.readline() != b"ready\n":
                raise RuntimeError("the link's process cannot make its interfaces")
            yield
        finally:
            forwarder.kill()


def _address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def _do(*command: str) -> str:
    # In a separate session, so that a signal that ends this program does not end the clean-up.
    done = subprocess.run(command, check=True, capture_output=True, text=True, start_new_session=True)
    return done.stdout
