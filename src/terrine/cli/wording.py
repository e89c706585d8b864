"""What the library says of its arguments, in the words of the command line."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from terrine.errors import TerrineError

_NAME = r"""(['"])(?P<name>.*?)\1"""
_OPTIONS = (
    (rf"bounds=\{{{_NAME}: \(lower, upper\)\}}", r"--bounds \g<name>=LOW:HIGH"),
    (rf"keys=\{{{_NAME}: \[values\]\}}", r"--keys \g<name>=A,B"),
    (rf"bins=\{{{_NAME}: \[edges\]\}}", r"--bins \g<name>=0,10,20"),
    (r"bins=\{\.\.\.\}", "--bins"),
    (r'keys="private"', "--keys private"),
    (r"delta=\.\.\.", "--delta"),
    (rf"\b(?P<option>bounds|keys|bins)\[{_NAME.replace('1', '2')}\]", r"--\g<option> \g<name>"),
    (r"\(lower, upper\)", "LOW:HIGH"),
)


@contextlib.contextmanager
def as_options() -> Iterator[None]:
    """Turn `bounds={'age': (lower, upper)}` in a refusal into `--bounds age=LOW:HIGH`, and so on."""
    try:
        yield
    except TerrineError as error:
        error.args = (in_options(str(error)), *error.args[1:])
        raise


def in_options(said: str) -> str:
    """The same with options for arguments."""
    for argument, option in _OPTIONS:
        said = re.sub(argument, option, said)
    return said
