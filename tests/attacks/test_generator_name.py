"""Attack: believe privacy.json's word for the generator that made the noise, and look at what did."""

import json
import os

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from terrine import pipeline, rng
from terrine.common.keys import Key, Purpose
from tests.pipeline.conftest import SCHEMA, write_table


@pytest.fixture
def table(tmp_path):
    (tmp_path / "people.schema.toml").write_text(SCHEMA)
    return write_table(tmp_path / "people.csv")


def generator(settings, out):
    pipeline.train(settings, out)
    return json.loads((out / "privacy.json").read_text())["generator"]


def settings(table, **more):
    return pipeline.Settings(
        epsilon=4, table=str(table), label="ill", epochs=2, lot=100, **({"accuracy_within": 30} | more)
    )


def test_lots_and_noise_of_training_are_the_cipher_that_is_named():
    """The bits of an address are AES-256's, in counter mode, from block (purpose, step, segment, 0) on."""
    key = Key.fresh()
    found = key.draw(Purpose.NOISE, 5).words(64)
    nonce = bytes([Purpose.NOISE]) + (5).to_bytes(6, "big") + (0).to_bytes(4, "big")
    cipher = Cipher(algorithms.AES(key.secret), modes.CTR(nonce.ljust(16, b"\0"))).encryptor()
    assert len(key.secret) == 32
    assert np.array_equal(found, np.frombuffer(cipher.update(bytes(256)), dtype=np.uint32))


def test_keys_and_counts_come_from_the_operating_system(monkeypatch):
    asked = []
    original = os.urandom
    monkeypatch.setattr(os, "urandom", lambda size: asked.append(size) or original(size))
    Key.fresh()
    rng.SYSTEM.words(4)
    assert asked == [32, 32]


def test_a_run_by_dp_sgd_names_both(table, tmp_path):
    found = generator(settings(table), tmp_path / "run")
    assert found.startswith("AES-256 in counter mode under a key from the operating system's generator")
    assert found.endswith("the operating system's generator (noise on bounds and counts)")
    assert "ChaCha" not in found


def test_a_run_that_counts_nothing_names_the_cipher_alone(table, tmp_path):
    assert "counts" not in generator(settings(table, audit=0, accuracy_within=0), tmp_path / "run")


def test_a_seeded_run_names_what_the_seed_made(table, tmp_path):
    found = generator(settings(table, seed=3), tmp_path / "run")
    assert found.startswith("SEEDED, FOR TESTS ONLY, NOT PRIVATE: AES-256 in counter mode under a key made from a seed")
    assert "Philox from a seed" in found
    assert "operating system" not in found


def test_pate_names_the_operating_system(tmp_path):
    asked = pipeline.Settings(epsilon=8, data="digits", method="pate", teachers=12, queries=15)
    assert generator(asked, tmp_path / "run") == "the operating system's generator (noise on the votes)"
