"""Threads of our own, for long works that are not torch's; as many as torch itself uses. Inside, torch is serial."""

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
