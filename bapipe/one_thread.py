"""Threads of a process take turns at what replaces functions of torch for all of them: tracing, checking, measuring."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

_turn = RLock()


@contextmanager
def one_thread_at_a_time() -> Iterator[None]:
    """In this context, or in a function that has it as a decorator, no other thread is; a thread may enter it again."""
    with _turn:
        yield
