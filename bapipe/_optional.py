"""The door between planning and torch: it opens when it is used."""

from typing import Any

from bapipe.errors import BapipeError


def require_torch() -> Any:
    """Returns torch, which planning does without."""
    try:
        import torch
    except ImportError as error:
        raise BapipeError(f"profiling and running need torch ({error}): pip install 'bapipe[run]'") from None
    return torch
