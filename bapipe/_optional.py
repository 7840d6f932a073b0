"""Imports torch on first use, with a hint on how to install it; planning works without torch."""

from typing import Any

from bapipe.errors import BapipeError


def require_torch() -> Any:
    """Returns torch; raises BapipeError if it is not installed."""
    try:
        import torch
    except ModuleNotFoundError as error:
        raise BapipeError(f"profiling and running need torch ({error}): pip install torch safetensors pillow") from None
    except ImportError as error:  # it is there, but not whole, or there is not enough memory for its libraries
        raise BapipeError(
            f"profiling and running need torch, which cannot be loaded ({error}): allow more memory (ulimit -v), or "
            "install torch anew"
        ) from None
    return torch
