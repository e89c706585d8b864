"""ChaCha20 against the test vectors of RFC 8439, and the noise made from it."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from terrine.common import keys as noise
from terrine.common import random_words
from terrine.common.keys import Key, Purpose
from terrine.common.random_words import ChaCha20, _quarter_rounds, keystream_blocks

CPU = torch.device("cpu")
KEY = bytes(range(32))
ALARM = 1e-6


def signed(*words):
    return [torch.tensor([word - (1 << 32) if word >> 31 else word], dtype=torch.int32) for word in words]


def test_a_quarter_round():
    """Section 2.1.1."""
    found = _quarter_rounds(*signed(0x11111111, 0x01020304, 0x9B8D6F43, 0x01234567))
    wanted = signed(0xEA2A92F4, 0xCB1CF8CE, 0x4581472E, 0x5881C4BB)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    ("key", "nonce", "counter", "block"),
    [
        (  # section 2.3.2
            KEY,
            "000000090000004a00000000",
            1,
            "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
            "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e",
        ),
        (  # appendix A.1, test vectors 1, 2 and 3
            bytes(32),
            "00" * 12,
            0,
            "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
            "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586",
        ),
        (
            bytes(32),
            "00" * 12,
            1,
            "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
            "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f",
        ),
        (
            bytes(31) + b"\x01",
            "00" * 12,
            1,
            "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
            "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0",
        ),
    ],
)
def test_blocks_are_those_of_the_standard(key, nonce, counter, block):
    found = keystream_blocks(key, bytes.fromhex(nonce), counter, 1, CPU)
    assert found.numpy().tobytes().hex() == block


def test_many_blocks_are_one_after_the_other():
    many = keystream_blocks(KEY, bytes(12), 5, 7, CPU)
    alone = [keystream_blocks(KEY, bytes(12), 5 + i, 1, CPU) for i in range(7)]
    assert torch.equal(many, torch.cat(alone))


def test_the_counter_goes_on_beyond_half_of_its_range_and_never_begins_again():
    both = keystream_blocks(KEY, bytes(12), (1 << 31) - 1, 2, CPU)
    assert torch.equal(both[1:], keystream_blocks(KEY, bytes(12), 1 << 31, 1, CPU))
    with pytest.raises(OverflowError, match="2\\^32"):
        keystream_blocks(KEY, bytes(12), (1 << 32) - 1, 2, CPU)


def test_no_word_is_given_twice():
    stream = ChaCha20(KEY, b"nonce", CPU)
    words = torch.cat([stream.words(count) for count in (5, 16, 1, 40, 100)])
    assert len(words.unique()) == len(words) == 162
    assert torch.equal(words[:5], ChaCha20(KEY, b"nonce", CPU).words(5))
    assert not torch.equal(words[:5], ChaCha20(KEY, b"other", CPU).words(5))
    assert not torch.equal(words[:5], ChaCha20(bytes(32), b"nonce", CPU).words(5))


def test_noise_made_from_it_is_normal(monkeypatch):
    """As on a device that is no processor."""
    monkeypatch.setattr(noise, "keystream", lambda secret, nonce, device: ChaCha20(secret, nonce, device))
    values = Key.seeded(7).draw(Purpose.NOISE, 0).normal(400_001, deviation=2.5).numpy()
    assert stats.kstest(values, "norm", args=(0, 2.5)).pvalue > ALARM
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 5 / math.sqrt(len(values))


def test_the_fused_kernel_mixes_the_same_words():
    """What a GPU compiles is this function; traced without a code generator, it gives the same words."""
    state, counter = torch.randint(-(2**31), 2**31, (16,), dtype=torch.int64).to(torch.int32), torch.arange(7).int()
    fused = torch.compile(random_words.mix_blocks, dynamic=True, backend="aot_eager", fullgraph=True)
    assert torch.equal(fused(state, counter), random_words.mix_blocks(state, counter))
