"""How many examples a property is tried on: few in `make test`, $TERRINE_EXAMPLES times as many in `make test-all`."""

import os

MORE = int(os.environ.get("TERRINE_EXAMPLES", "1"))


def examples(usual: int) -> int:
    return usual * MORE
