"""Every command that a page tells one to type is one that Terrine has, with options that it takes."""

import re
import shlex

import pytest

from tests.cli.test_help import EVERY
from tests.docs.test_blocks import DOCS, PAGES

TYPED = re.compile(r"^ *(?:\$ )?terrine ([a-z].*)$", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS.parent)))
def test_the_commands_on_a_page_parse(page):
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in TYPED.findall(text):
        words = shlex.split(line, comments=True)
        name = next((name for name in (" ".join(words[:2]), words[0]) if name in EVERY), None)
        assert name is not None, line
        EVERY[name].make_context(name, words[len(name.split()) :])  # does not run it
