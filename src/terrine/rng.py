"""Randomness: from the operating system by default; from a seed for tests only, and then it says so."""
