"""Randomness: strong, never shared between processes or threads, and marked where it is not."""

import multiprocessing
import os
import threading

import numpy as np
import pytest
from scipy import stats

from terrine import events
from terrine.errors import InvalidArgument
from terrine.mechanisms import Laplace
from terrine.rng import SYSTEM, Seeded, System


def draw_into(queue):
    queue.put([SYSTEM.word() for _ in range(20)])


def test_a_forked_child_does_not_repeat_its_parent():
    SYSTEM.word()  # the pool is full now, and a fork copies it
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    children = [context.Process(target=draw_into, args=(queue,)) for _ in range(2)]
    for child in children:
        child.start()
    seen = [word for _ in children for word in queue.get()]
    for child in children:
        child.join()
    seen += [SYSTEM.word() for _ in range(600)]
    assert len(set(seen)) == len(seen)


def test_threads_do_not_share_words():
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.extend([SYSTEM.word() for _ in range(3000)])) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == len(found) == 24_000


def test_the_system_source_reads_the_operating_system(monkeypatch):
    asked = []
    real = os.urandom
    monkeypatch.setattr(os, "urandom", lambda count: asked.append(count) or real(count))
    fresh = System()
    fresh.word()
    fresh.words(1000)
    assert asked == [4096, 8000]


@pytest.mark.parametrize("source", [SYSTEM, Seeded(5)], ids=repr)
def test_bits_are_even(source):
    # false-alarm rate 1e-9 for SYSTEM, none for the seed
    words = np.concatenate([source.words(20_000), np.array([source.word() for _ in range(20_000)], dtype=np.uint64)])
    ones = np.unpackbits(words.view(np.uint8)).sum()
    assert stats.binomtest(int(ones), 64 * words.size).pvalue > 1e-9


def test_a_seed_repeats_and_says_so():
    once, twice = (Laplace(sensitivity=1, epsilon=1).release(5.0, rng=Seeded(3)) for _ in range(2))
    assert once == twice
    assert events.is_reproducible(once.event)
    assert not events.is_reproducible(Laplace(sensitivity=1, epsilon=1).release(5.0).event)


@pytest.mark.parametrize("seed", [-1, 1.5, "x", None])
def test_a_seed_that_is_none_is_refused(seed):
    with pytest.raises(InvalidArgument, match="seed"):
        Seeded(seed)
