"""The command that says what this machine has, and what will not work on it: doctor."""

from dataclasses import asdict

from bapipe.cli.options import AsJson
from bapipe.cli.printing import show_json, show_line
from bapipe.diagnosis import Finding, diagnose
from bapipe.planner.inputs.clusters import ASSUMED_LINK


def doctor(as_json: AsJson = False) -> None:
    """Say what this machine has for planning and training, and what will not work here."""
    findings = [*diagnose(), _links()]
    if as_json:
        show_json([asdict(finding) for finding in findings])
        return
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        show_line(f"{finding.name:<{width}}  {finding.value}")
    advised = [finding for finding in findings if finding.advice]
    show_line("")
    show_line("what to know:" if advised else "nothing is missing")
    for finding in advised:
        show_line(f"- {finding.name}: {finding.advice}")


def _links() -> Finding:
    """What plans reckon with as long as no link was measured."""
    rate, latency = ASSUMED_LINK.bytes_per_s / 1e9, ASSUMED_LINK.latency_ns / 1e3
    value = f"--devices assumes {rate:g} GB/s and {latency:g} us between ranks on CPUs, a GPU's own link between GPUs"
    return Finding(name="links", value=value, advice="`bapipe cluster` measures them; give its file to --cluster")
