"""Absent files are fetched, checked and kept whole; offline, one line says what to put where."""

import gzip
import hashlib
import http.server
import io
import tarfile
import threading
import zipfile

import pytest

from terrine.datasets import download, files
from terrine.errors import InvalidArgument


@pytest.fixture
def mirror(tmp_path, monkeypatch):
    """A publisher on this machine: what is put into its folder is served, and each request is written down."""
    served, asked = tmp_path / "served", []
    served.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, directory=str(served), **kwargs)

        def log_message(self, text, *args):
            asked.append(self.path)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("TERRINE_MIRROR", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("TERRINE_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(download, "_LAST", {})
    yield served, asked
    server.shutdown()
    server.server_close()


def md5(content):
    return hashlib.md5(content).hexdigest()


def test_an_absent_file_is_fetched_once(mirror):
    served, asked = mirror
    (served / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(b"pixels"))
    for _ in range(2):
        assert files.read("mnist/train-images-idx3-ubyte", md5(b"pixels")) == b"pixels"
    assert len(asked) == 1
    assert (files.folder() / "mnist/train-images-idx3-ubyte").read_bytes() == b"pixels"


def test_files_come_out_of_their_publishers_archives(mirror):
    served, asked = mirror
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name in ("data_batch_1.bin", "test_batch.bin"):
            entry = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            entry.size = len(name)
            archive.addfile(entry, io.BytesIO(name.encode()))
    (served / "cifar-10-binary.tar.gz").write_bytes(buffer.getvalue())
    with zipfile.ZipFile(served / "adult.zip", "w") as archive:
        archive.writestr("adult.data", "rows")
    for name in ("data_batch_1.bin", "test_batch.bin"):
        assert files.read(f"cifar-10/{name}", md5(name.encode())) == name.encode()
    assert files.read("adult/adult.data", md5(b"rows")) == b"rows"
    assert len(asked) == 2  # the archive of two files was sent once


def test_a_changed_file_is_not_kept(mirror):
    served, _ = mirror
    (served / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(b"other"))
    with pytest.raises(InvalidArgument, match="nothing was kept"):
        files.read("mnist/train-images-idx3-ubyte", md5(b"pixels"))
    assert not list(files.folder().rglob("*ubyte*"))


def test_a_broken_archive_or_a_missing_file_is_one_clear_line(mirror):
    served, _ = mirror
    (served / "train-images-idx3-ubyte.gz").write_bytes(b"not gzip")
    for name in ("mnist/train-images-idx3-ubyte", "fashion-mnist/t10k-labels-idx1-ubyte"):
        with pytest.raises(InvalidArgument, match="put the published file there") as caught:
            files.read(name, md5(b""))
        assert "\n" not in str(caught.value)


def test_offline_says_what_to_put_where(tmp_path, monkeypatch):
    monkeypatch.setenv("TERRINE_DATA", str(tmp_path))
    monkeypatch.setenv("TERRINE_MIRROR", "http://127.0.0.1:9")
    with pytest.raises(InvalidArgument) as caught:
        files.read("adult/adult.data", md5(b""))
    assert f"{tmp_path / 'adult/adult.data'} is missing" in str(caught.value)
    assert "\n" not in str(caught.value)
