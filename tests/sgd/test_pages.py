"""Malloc's settings: told once, left alone where the user has set them, and put back after a trial."""

from __future__ import annotations

import pytest
import torch

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


@pytest.mark.parametrize("shape", [(), (3,), (200, 100), (7, 0, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_block_is_an_ordinary_tensor(shape, dtype):
    """It may be changed in place, by whoever gets it, and has a little more memory than it needs."""
    made = pages.block(shape, dtype)
    assert (made.shape, made.dtype, made.is_contiguous(), made._is_view()) == (shape, dtype, True, False)
    assert made.untyped_storage().nbytes() >= made.numel() * made.element_size()
    torch.testing.assert_close(made.fill_(2.0).sum(), torch.tensor(2.0 * made.numel(), dtype=dtype))


def test_a_large_block_leaves_room_for_another():
    assert pages.block((200, 100), torch.float32).untyped_storage().nbytes() == 4 * (200 * 100 + pages.SPARE)
