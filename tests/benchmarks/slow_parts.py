"""Parts of work that do not end well, in a module that is imported at once."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path


def work(
    index: int, send: Callable[[object], None], folder: Path, device: str, is_small: bool, names: list[str]
) -> None:
    for name in names:
        send(name)
        if name == "sleeps":
            time.sleep(60)
        if name == "dies":
            os._exit(3)
        (folder / "results").mkdir(exist_ok=True)
        (folder / "results" / f"{name}.json").write_text(json.dumps([{}]))
