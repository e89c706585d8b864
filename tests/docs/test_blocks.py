"""Every python block of every page of the documentation runs, in order, in one namespace for each page."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_the_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text, module = page.read_text(encoding="utf-8"), types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)  # dataclasses look their module up
    for found in BLOCK.finditer(text):
        line = text[: found.start(1)].count("\n")
        exec(compile("\n" * line + found.group(1), str(page), "exec", dont_inherit=True), module.__dict__)
