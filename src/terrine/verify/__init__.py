"""Check a release without its data: `verify("run").ok`, or `terrine verify run`."""

from terrine.verify.verification import Check, Verification, refuse_lies, verify

__all__ = ["Check", "Verification", "refuse_lies", "verify"]
