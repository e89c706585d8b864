"""Threads of our own, for long stretches of short operations.

torch spreads every operation over its threads and waits for all of them before the next; where operations are short,
the waiting is most of what they cost. Here a thread takes a stretch of rows, or of noise, and does everything to it
while it lies in the thread's cache; inside, torch is serial. As many threads as torch itself uses.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import torch


def spread(works: Sequence[Callable[[], None]]) -> None:
    """Do all works, each on a thread of its own; one alone is done here. Raises what the first that failed raised."""
    if len(works) == 1:
        works[0]()
        return
    pool = _pool(torch.get_num_threads())
    under_way = [pool.submit(work) for work in works]
    failed = [one.exception() for one in under_way]  # waits for all of them
    for error in filter(None, failed):
        raise error


def stretches(rows: int, least: int = 1) -> list[tuple[int, int]]:
    """`rows` as consecutive (start, stop), one for each thread, none shorter than `least`; together they cover all."""
    count = max(1, min(torch.get_num_threads(), rows // least))
    return [(rows * place // count, rows * (place + 1) // count) for place in range(count)]


@lru_cache(maxsize=1)
def _pool(threads: int) -> ThreadPoolExecutor:
    """Threads that live on, and with them whatever buffers they keep."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="terrine")
    ready = threading.Barrier(threads + 1)

    def begin() -> None:
        torch.set_num_threads(1)  # of this thread alone ...
        torch.get_num_threads()  # a thread takes up the number when it is first asked: now
        ready.wait()

    for _ in range(threads):
        pool.submit(begin)
    ready.wait()
    torch.set_num_threads(threads)  # ... but torch gives new threads the number that was set last
    return pool


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a forked process has none of its parent's threads
