"""What importing costs, and what the package promises to export."""

import subprocess
import sys

import terrine
from terrine import accounting, events


def modules_after(code):
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; import sys; print(*sys.modules)"], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_import_terrine_is_light():
    loaded = modules_after("import terrine")
    assert not loaded & {"torch", "scipy", "matplotlib", "sklearn", "numpy"}


def test_accounting_and_its_commands_do_not_need_torch():
    loaded = modules_after("import terrine.cli.app, terrine.accounting")
    assert not loaded & {"torch", "matplotlib", "sklearn", "sqlalchemy", "transformers", "pandas"}


def test_exported_names_exist():
    for name in terrine.__all__:
        package = getattr(terrine, name)
        assert all(hasattr(package, exported) for exported in getattr(package, "__all__", []))


def test_the_docstring_example_is_right():
    step = events.PoissonSampled(events.Gaussian(noise=4.0), rate=0.01)
    assert round(accounting.epsilon(events.Repeated(step, times=10_000), delta=1e-5), 4) == 0.9469
