"""Attack what claims to be private: samples or scores in, a confidence bound on epsilon out.

    bound(members, non_members, delta=1e-5)     scores of an attack -> evidence
    one_run.guess(scores, included)             canaries of a single training run -> evidence
    lower_bound(mechanism, first, second)       a black box, run on two neighbours -> evidence
    verdict(claim, evidence)                    consistent, or VIOLATED with the confidence

An attack that finds less than is claimed proves nothing: another may find more.
"""

from typing import TYPE_CHECKING, Any

from terrine.audit.bounds import Corrected, Rates, Split, bound
from terrine.audit.guesses import Guesses
from terrine.audit.metrics import Summary, roc, summary
from terrine.audit.one_run import OneRun
from terrine.audit.scores import Scores
from terrine.audit.tester import LowerBound, lower_bound
from terrine.audit.verdicts import Evidence, Verdict, verdict

if TYPE_CHECKING:
    from terrine.audit.canaries import Canaries

__all__ = [
    "Canaries",
    "Corrected",
    "Evidence",
    "Guesses",
    "LowerBound",
    "OneRun",
    "Rates",
    "Scores",
    "Split",
    "Summary",
    "Verdict",
    "bound",
    "lower_bound",
    "roc",
    "summary",
    "verdict",
]


def __getattr__(name: str) -> Any:
    if name == "Canaries":  # the only part of this list that needs torch
        from terrine.audit.canaries import Canaries

        return Canaries
    raise AttributeError(f"module 'terrine.audit' has no attribute {name!r}")
