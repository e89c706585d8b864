"""Builds the pretend device of `pretend.cpp` and registers it as `torch.device("pretend")`, once per process.

The compiled library is kept in the user's cache folder, under a name made of the source and of torch's version, and a
lock is held while it is built: test workers that start together compile it once. Where there is no C++ compiler,
`start()` says so.

Backward passes run in the calling thread, inside `used()`: torch starts the threads of devices at the first backward
pass of a process or never, and a process that has them must not fork. `start(own_thread=True)`, before that first
pass, gives the device a thread of its own, as cuda has one.
"""

import hashlib
import os
import shutil
import sys
import tempfile
import types
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from unittest import mock

import torch

NAME = "pretend"
SOURCE = Path(__file__).with_name("pretend.cpp")


@cache
def start(own_thread: bool = False) -> str | None:
    """Registers the device; returns None, or why there is none here."""
    if sys.platform == "win32":
        return "the pretend device is not built on Windows"
    compiler = os.environ.get("CXX", "c++").split()[0]
    if shutil.which(compiler) is None or shutil.which("ninja", path=_path()) is None:
        return "the pretend device needs a C++ compiler and ninja"
    if torch._C._get_privateuse1_backend_name() != "privateuseone":
        return "another device is registered in this process"
    _build()
    if not own_thread:  # the first backward pass of the process counts no device, and starts no thread
        torch.ones(1, requires_grad=True).sum().backward()
    torch.ops.terrine_pretend.count()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return None


def _path() -> str:
    """Where programs are looked for: ninja may be installed next to Python."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def _build() -> None:
    """Compiles the library, or finds it compiled, and loads it."""
    import fcntl

    from torch.utils import cpp_extension

    about = f"{torch.__version__} {torch.version.git_version} {sys.version} {sys.platform}"
    version = hashlib.sha256(SOURCE.read_bytes() + about.encode()).hexdigest()[:16]
    folder = _cache() / version
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "held", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)  # torch's own lock, left by a build that was killed
        with mock.patch.dict(os.environ, PATH=_path()):
            cpp_extension.load(
                f"terrine_{NAME}",
                [str(SOURCE)],
                extra_cflags=["-O0"],
                build_directory=str(folder),
                is_python_module=False,
            )


def _cache() -> Path:
    """A folder that outlives the process, or else a temporary one."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    found = Path(given) / f"terrine_{NAME}"
    try:
        found.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.mkdtemp())
    return found if os.access(found, os.W_OK) else Path(tempfile.mkdtemp())


def _module() -> types.ModuleType:
    """What torch looks for under `torch.pretend`."""
    ops = torch.ops.terrine_pretend

    def set_rng_state(state: torch.Tensor, device: object = NAME) -> None:
        ops.set_rng_state(state.cpu())

    def seed(number: int) -> None:
        ops.seed((int(number) + 2**63) % 2**64 - 2**63)  # an op takes signed numbers only

    made = types.ModuleType(f"torch.{NAME}")
    made.is_available = made.is_initialized = lambda: True
    made.device_count = lambda: 1
    made.current_device = lambda: 0
    made.device = lambda device: nullcontext()
    made.set_device = made.synchronize = lambda device=None: None
    made.get_rng_state = lambda device=NAME: ops.rng_state()
    made.set_rng_state = set_rng_state
    made.manual_seed = made.manual_seed_all = seed
    made.initial_seed = lambda: ops.initial_seed() % 2**64
    made._is_in_bad_fork = lambda: False
    made._lazy_init = lambda: None
    made.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    made.refuse_float64 = refuse_float64
    return made


@contextmanager
def used() -> Iterator[torch.device]:
    """The device, for use in this thread; inside, modules that move to it keep their parameters, tied ones too."""
    swapped = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # what torch does by itself for cuda and mps
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield torch.device(NAME)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swapped)


def refuse_float64(refuse: bool) -> bool:
    """From now on, whatever would make a float64 tensor on the device raises TypeError; returns what held before."""
    return torch.ops.terrine_pretend.refuse_float64(refuse)


@contextmanager
def without_float64() -> Iterator[None]:
    """The device has no float64 inside, as Apple's mps has none."""
    before = refuse_float64(True)
    try:
        yield
    finally:
        refuse_float64(before)
