"""The door to the command line, and a small private table."""

from tests.pipeline.conftest import run, table

__all__ = ["run", "table"]
