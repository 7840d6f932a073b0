"""The command that says what this machine has, and what will not work on it: doctor."""

from dataclasses import asdict

from bapipe.cli.options import AsJson
from bapipe.cli.progress import show_json, show_line
from bapipe.profiler.diagnosis import diagnose


def doctor(as_json: AsJson = False) -> None:
    """Say what this machine has for planning and training, and what will not work here."""
    findings = list(diagnose())
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
