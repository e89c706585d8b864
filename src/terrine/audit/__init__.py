"""Attack what claims to be private: samples or scores in, a confidence bound on epsilon out."""

from terrine.audit.tester import Finding, lower_bound

__all__ = ["Finding", "lower_bound"]
