"""Imports torch on first use, with a hint on how to install it; planning works without torch."""

from typing import Any

from bapipe.errors import BapipeError


def require_torch() -> Any:
    """Returns torch; raises BapipeError if it is not installed."""
    try:
        import torch
    except ImportError as error:
        raise BapipeError(f"profiling and running need torch ({error}): pip install torch safetensors pillow") from None
    return torch
