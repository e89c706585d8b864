"""Nobody pays for a library that they do not use."""

import subprocess
import sys


def test_terrine_and_its_integrations_import_no_other_library():
    program = (
        "import sys, terrine, terrine.integrations; "
        "print([name for name in ('torch', 'transformers', 'lightning', 'accelerate', 'peft') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_missing_library_is_named_with_its_extra():
    for name, extra in (("huggingface", "huggingface"), ("lightning", "lightning"), ("accelerate", "huggingface")):
        hidden = "import sys; sys.modules.update(transformers=None, lightning=None, accelerate=None); "
        program = f"{hidden}import terrine.integrations.{name}"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert f"pip install 'terrine[{extra}]'" in done.stderr
