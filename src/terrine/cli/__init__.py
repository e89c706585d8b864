"""The `terrine` command: thin doors onto the library."""

from terrine.cli.app import main

__all__ = ["main"]
