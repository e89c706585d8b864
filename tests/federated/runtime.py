"""Flower's own runtimes on this machine: what the slow tests start and stop."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]


def free_ports(count):
    """Ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


class Runtime:
    """Processes of one SuperLink and its nodes, in a folder of their own; all are ended at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.started = folder, []
        self.bin = Path(sys.executable).parent
        source = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        self.environment = os.environ | {
            "FLWR_HOME": str(folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": source.rstrip(os.pathsep),
            "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
        }
        (folder / "home").mkdir()
        shutil.copytree(ROOT / "examples" / "flower_app", folder / "app")

    def start(self, name, *arguments):
        """A process in a session of its own."""
        log = (self.folder / f"{len(self.started)}-{name}.log").open("w")
        command = [str(self.bin / name), *arguments]
        process = subprocess.Popen(
            command, env=self.environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        self.started.append(process)

    def connect(self, port, options=""):
        """Name the SuperLink that `flwr run` talks to, once it answers."""
        text = f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
        (self.folder / "home" / "config.toml").write_text(text + options)
        until = time.monotonic() + 120
        while time.monotonic() < until:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                return
            time.sleep(0.5)

    def run(self, seconds, **config):
        """`flwr run`, and what the server wrote at the end."""
        out = self.folder / "out.json"
        asked = " ".join(f"{name.replace('_', '-')}={value}" for name, value in config.items())
        command = [str(self.bin / "flwr"), "run", str(self.folder / "app"), "--run-config", f'{asked} out="{out}"']
        subprocess.run(command, env=self.environment, check=True, timeout=seconds, capture_output=True)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if out.exists() and (text := out.read_text()):
                return json.loads(text)
            time.sleep(1)
        logs = "\n".join(path.read_text()[-3000:] for path in sorted(self.folder.glob("*.log")))
        raise TimeoutError(f"no result within {seconds} s\n{logs}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in reversed(self.started):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in self.started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
