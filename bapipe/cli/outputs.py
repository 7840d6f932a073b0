"""Writing the file that a command makes, without losing another one of the same name."""

import shutil
from pathlib import Path

from bapipe.cli.progress import note
from bapipe.formats.cluster import Cluster
from bapipe.formats.codec import encode, write
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile


def write_output(path: Path, value: ModelProfile | Cluster | Plan) -> None:
    """Writes a file; one with another content that was there is kept, as `NAME~`, and a remark says so."""
    if path.is_file() and not path.is_symlink() and path.read_bytes() != encode(value):
        kept = path.with_name(f"{path.name}~")
        shutil.copyfile(path, kept)
        note(f"{path} was there already, with another content: it is kept as {kept}")
    write(path, value)
