"""Sums of which nobody sees a part: pairwise masks that cancel, shares for those who drop out, noise inside.

    noisy = secure.sum(vectors, plan, drop=[3, 7])

Model. The server follows the protocol and may try to learn from all it sees (semi-honest); so may up to `colluding`
clients together with it. docs/federated.md says what a server that does not follow it could still do.
"""

from terrine.federated.secure.client import Client
from terrine.federated.secure.keys import Identity
from terrine.federated.secure.opening import OpenedSum, opened, sum
from terrine.federated.secure.rounds import Round
from terrine.federated.secure.server import Server, TooFewSurvivors

__all__ = ["Client", "Identity", "OpenedSum", "Round", "Server", "TooFewSurvivors", "opened", "sum"]
