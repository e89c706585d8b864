"""Examples are kept apart by construction: what every tensor of a lot holds of them, followed call by call."""

from terrine.sgd.isolation import totals
from terrine.sgd.isolation.status import Mixed, Rows, Total
from terrine.sgd.isolation.watch import Isolation, aside, own_function

__all__ = ["Isolation", "Mixed", "Rows", "Total", "aside", "own_function", "totals"]
