"""`make test-lowest` and `make test-highest`: the suite against other versions of what Terrine stands on.

lowest: the oldest versions that pyproject.toml allows; highest: the newest there are. torch stays the one of
constraints.txt, whose wheel is small; everything else moves. The environment is made anew in build/, beside .venv.
"""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXTRAS = "all"
TOOLS = ["pytest", "pytest-xdist", "hypothesis", "mpmath"]


def main(which: str) -> int:
    place = ROOT / "build" / which
    shutil.rmtree(place, ignore_errors=True)
    python, uv = str(place / "bin" / "python"), str(Path(sys.executable).parent / "uv")
    only_torch = ROOT / "build" / "torch.txt"
    only_torch.parent.mkdir(exist_ok=True)
    pinned = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")]
    only_torch.write_text("\n".join(pinned) + "\n")
    run(sys.executable, "-m", "venv", str(place))
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *pinned)
    resolution = "lowest-direct" if which == "lowest" else "highest"
    run(
        uv, "pip", "install", "--quiet", "--python", python, "--constraint", str(only_torch),
        "--resolution", resolution, "--editable", f"{ROOT}[{EXTRAS}]",
    )  # fmt: skip
    run(uv, "pip", "install", "--quiet", "--python", python, "--constraint", str(only_torch), *TOOLS)
    run(uv, "pip", "list", "--python", python)
    tests = sys.argv[2:] or [str(ROOT / "tests")]
    quick = [python, "-m", "pytest", "-n", "2", "--dist", "worksteal", "-m", "not slow"]
    return subprocess.run([*quick, *tests], check=False).returncode


def run(*words: str) -> None:
    print("$", *words, flush=True)
    subprocess.run(words, check=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
