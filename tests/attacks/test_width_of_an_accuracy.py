"""Attack: a run whose accuracy is said to be surer than its rows and its noise allow."""

import pytest

from terrine.errors import InvalidArgument
from terrine.events import Composed, DiscreteLaplace, Gaussian
from terrine.verify.claims import _check_width

EVENT = Composed((Gaussian(noise=4.0), DiscreteLaplace(noise=10.0, sensitivity=1)))


def test_a_width_below_what_rows_and_noise_allow_is_refused():
    _check_width(0.1761008268025137, 187, EVENT)
    for off in (0.08, -1, 0.1760, "0.2", float("nan"), True):
        with pytest.raises(InvalidArgument):
            _check_width(off, 187, EVENT)
