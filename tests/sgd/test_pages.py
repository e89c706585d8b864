"""Malloc's settings: told once, left alone where the user has set them, and put back after a trial."""

from __future__ import annotations

import pytest

from terrine.sgd import pages


@pytest.fixture
def told(monkeypatch):
    """What malloc is told, in order."""
    seen = []
    monkeypatch.setattr(pages, "_told", lambda setting, value: seen.append((setting, value)) is None)
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    pages.keep.cache_clear()
    yield seen
    pages.keep.cache_clear()


def test_it_is_told_once(told):
    assert pages.keep()
    assert pages.keep()
    assert told == [(pages.TRIM, pages.FREE), (pages.MMAP, pages.BLOCK)]


def test_what_is_set_aside_is_put_back(told):
    def fail():
        with pages.aside():
            assert told[-1] == (pages.MMAP, pages.SMALL)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert told[-1] == (pages.MMAP, pages.BLOCK)


def test_whoever_has_set_it_keeps_it(told, monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert not pages.keep()
    with pages.aside():
        pass
    assert told == []
