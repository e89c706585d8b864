"""`make release`: wheel and sdist in dist/, checked as a user would meet them.

Both are described well enough for an index (twine), the wheel installs into an empty environment in less than a minute,
the command there prints an epsilon without torch, and verifies a run made by the environment that built it; a forged
copy is refused.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
INSTALL_SECONDS = 60.0
"""Of processor time: a busy machine is not the wheel's fault."""
BARE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def main() -> None:
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    run(BIN / "uv", "build", "--quiet", "--out-dir", dist, ROOT)
    run(BIN / "twine", "check", "--strict", *sorted(dist.glob("terrine-*")))
    (wheel,) = dist.glob("*.whl")
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder) / "empty"
        run(sys.executable, "-m", "venv", empty)
        begun, used = time.monotonic(), processor()
        run(empty / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel)
        wall, took = time.monotonic() - begun, processor() - used
        print(f"pip install {wheel.name}: {wall:.0f} s, {took:.0f} s of processor time")
        if took > INSTALL_SECONDS:
            raise SystemExit(f"installing took {took:.0f} s: want at most {INSTALL_SECONDS:.0f}")
        terrine = empty / "bin" / "terrine"
        version = run(terrine, "--version").strip()
        if f"-{version}-" not in wheel.name:
            raise SystemExit(f"the wheel is {wheel.name}, and the command says {version}")
        run(terrine, "epsilon", "--noise", "4", "--rate", "0.01", "--steps", "10000", "--delta", "1e-5")
        release = bundled(Path(folder) / "run")
        run(terrine, "verify", release)
        claim = json.loads((release / "privacy.json").read_text())
        (release / "privacy.json").write_text(json.dumps(claim | {"epsilon": claim["epsilon"] / 10}))
        if subprocess.run([terrine, "verify", release], check=False, capture_output=True, env=BARE).returncode != 1:
            raise SystemExit("a forged claim was verified")
        print("a forged claim is refused")
    print(f"ready: {', '.join(path.name for path in sorted(dist.glob('terrine*')))}")


def bundled(folder: Path) -> Path:
    """What is handed on of a run that this environment makes."""
    run(
        BIN / "terrine",
        "train",
        "--data",
        "digits",
        "--model",
        "linear",
        "--epochs",
        "5",
        "--epsilon",
        "3",
        "--out",
        folder,
    )
    shutil.rmtree(folder / "owner")
    return folder


def processor() -> float:
    """Seconds that finished child processes have used."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(*words: object) -> str:
    print("$", *words, flush=True)
    done = subprocess.run(
        [str(word) for word in words], check=False, capture_output=True, text=True, cwd=tempfile.gettempdir(), env=BARE
    )
    if done.returncode:
        raise SystemExit(f"{words[0]} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
