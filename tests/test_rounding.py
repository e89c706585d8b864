"""What is printed of a bound is still a bound."""

import math

from hypothesis import given
from hypothesis import strategies as st

from terrine.rounding import down, up


@given(st.floats(1e-9, 1e9), st.integers(2, 8))
def test_printed_digits_stay_on_the_safe_side(value, digits):
    assert float(down(value, digits)) <= value <= float(up(value, digits))
    assert float(up(value, digits)) <= value * (1 + 11 * 10.0**-digits)


def test_zero_and_infinity_are_themselves():
    assert (up(0.0), down(0.0), up(math.inf)) == ("0", "0", "inf")
