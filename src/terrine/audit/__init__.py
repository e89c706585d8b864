"""Attack what claims to be private: samples or scores in, a confidence bound on epsilon out."""

from terrine.audit.tester import Finding, test_mechanism

__all__ = ["Finding", "test_mechanism"]
