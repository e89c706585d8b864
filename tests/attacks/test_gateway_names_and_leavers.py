"""Names that differ in case alone, requests that end half-way, and two interrupts of the server."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from tests.gateway import clinic as made


@pytest.fixture
def clinic(tmp_path):
    found = made.opened(tmp_path)
    yield found
    found.close()


def test_names_that_differ_in_case_alone_are_one(clinic):
    clinic.lend("ann")
    officer = {"role": "officer"}
    refused = clinic.owner.put("/datasets/visits/members/Ann", json=officer)
    assert refused.status_code == 409
    assert "known as ann" in refused.json()["error"]
    made.done(clinic.owner.delete("/datasets/visits/members/ann"))
    again = clinic.owner.put("/datasets/visits/members/ANN", json={"role": "analyst", "allowance": 1})
    assert again.status_code == 409  # what ann has spent stays counted
    made.done(clinic.owner.put("/datasets/visits/members/ann", json=officer))


@pytest.mark.parametrize(("path", "kind"), [("/login", "x-www-form-urlencoded"), ("/datasets/visits/ask", "json")])
def test_half_a_body_and_goodbye_leaves_no_word_in_the_log(clinic, caplog, capfd, path, kind):
    ann = clinic.lend("ann")
    headers = {"host": "testserver", "content-type": f"application/{kind}", "content-length": "100"}
    headers |= {"authorization": ann.headers["authorization"]} if kind == "json" else {}
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "http_version": "1.1",
        "server": ("testserver", 80),
        "client": ("127.0.0.1", 1),
        "headers": [(name.encode(), one.encode()) for name, one in headers.items()],
    }
    arriving = [{"type": "http.request", "body": b"tok", "more_body": True}, {"type": "http.disconnect"}]
    sent = []

    async def receive():
        return arriving.pop(0)

    async def send(message):
        sent.append(message)

    asyncio.run(clinic.app(scope, receive, send))
    assert not arriving
    assert not sent
    assert not caplog.records
    assert "Traceback" not in capfd.readouterr().err
    assert clinic.spent() == 0


def test_two_interrupts_end_the_server_with_one_line(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "gateway.toml").write_text('ledger = "l.db"\ndata = "data"\n')
    code = (
        "import os, signal, threading, time\n"
        "from pathlib import Path\n"
        "from terrine.gateway import configuration, create_app, serve\n"
        "found = configuration.load(Path('gateway.toml'))\n"
        "app = create_app(found, create=True)\n"
        "def stop():\n"
        "    while signal.getsignal(signal.SIGINT) is signal.default_int_handler: time.sleep(0.01)\n"
        "    time.sleep(0.3)\n"
        "    os.kill(os.getpid(), signal.SIGINT); time.sleep(0.02); os.kill(os.getpid(), signal.SIGINT)\n"
        "threading.Thread(target=stop, daemon=True).start()\n"
        "serve(found, app=app, port=0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60,
                          env=os.environ | {"PYTHONWARNINGS": "ignore"}, check=False)  # fmt: skip
    assert done.returncode in (0, 130, -signal.SIGINT)
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 1
