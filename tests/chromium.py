"""The browser that pages are looked at in, where there is one, and how it starts without asking anybody's network."""

import shutil

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
wanted = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
