"""What a check raises that cannot be made."""

from __future__ import annotations


class Unchecked(Exception):
    """A check could not be made with what was given; says what is wanted."""
