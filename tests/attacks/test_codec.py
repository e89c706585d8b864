"""Texts that mean two things at once, or that no event can have written: one of our errors, never another event."""

from __future__ import annotations

import pytest

from terrine import events as e
from terrine.errors import InvalidArgument, MalformedEvents

LONG = "9" * 5000


@pytest.mark.parametrize(
    "text",
    [
        '{"kind": "Gaussian", "noise": 0.1, "noise": 1000.0}',
        '{"kind": "NonPrivate", "kind": "PureDP", "epsilon": 0.001}',
        '{"terrine-events": 1, "event": {"kind": "NonPrivate"}, "event": {"kind": "PureDP", "epsilon": 0.0}}',
        '[{"kind": "Repeated", "times": 1000, "times": 1, "event": {"kind": "PureDP", "epsilon": 1.0}}]',
    ],
)
def test_a_name_that_stands_twice_is_not_read_as_the_cheaper_one(text):
    with pytest.raises(MalformedEvents, match="twice"):
        e.from_json(text)


@pytest.mark.parametrize("version", ["true", "1.0", '"1"', "null", "[1]", "0", "2"])
def test_a_version_that_only_equals_1_is_refused(version):
    with pytest.raises(MalformedEvents, match="version"):
        e.from_json(f'{{"terrine-events": {version}, "event": {{"kind": "PureDP", "epsilon": 1.0}}}}')


def test_an_envelope_with_a_second_event_beside_it_is_refused():
    with pytest.raises(MalformedEvents, match="kind"):
        e.from_json('{"terrine-events": 1, "event": {"kind": "PureDP", "epsilon": 0.1}, "kind": "NonPrivate"}')


@pytest.mark.parametrize(
    "text",
    [
        f'{{"kind": "Repeated", "times": {LONG}, "event": {{"kind": "PureDP", "epsilon": 1.0}}}}',
        f'{{"kind": "Gaussian", "noise": {LONG}}}',
        f'{{"kind": "PureDP", "epsilon": -{LONG}}}',
        f'{{"terrine-events": {LONG}, "event": {{}}}}',
        LONG,
        f"[{LONG}]",
    ],
)
def test_a_whole_number_of_5000_digits_is_refused_in_one_short_line(text):
    with pytest.raises(MalformedEvents) as refusal:
        e.from_json(text)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 300


@pytest.mark.parametrize(
    ("field", "number"),
    [("epsilon", "1e-400"), ("epsilon", "0.0000001e-320"), ("epsilon", "1e400"), ("epsilon", "-1e400")],
)
def test_a_number_too_small_or_too_large_for_a_double_is_not_read_as_0_or_infinity(field, number):
    with pytest.raises(MalformedEvents, match="double"):
        e.from_json(f'{{"kind": "PureDP", "{field}": {number}}}')


@pytest.mark.parametrize("zero", ["0", "0.0", "0e9", "0.000e-400"])
def test_a_zero_is_still_a_zero(zero):
    assert e.from_json(f'{{"kind": "PureDP", "epsilon": {zero}}}') == e.PureDP(epsilon=0.0)


@pytest.mark.parametrize("digits", [600, 5000, 100_000])
def test_an_event_too_large_to_be_read_back_is_not_written(digits):
    with pytest.raises(InvalidArgument, match="digits"):
        e.to_json(e.Repeated(e.PureDP(epsilon=1.0), times=10**digits))
    whole = e.Repeated(e.PureDP(epsilon=1.0), times=10**599)
    assert e.from_json(e.to_json(whole)) == whole


@pytest.mark.parametrize("value", [10**5000, -(10**5000), [10**5000]], ids=["above", "below", "listed"])
def test_a_huge_argument_gives_our_error_in_one_short_line(value):
    with pytest.raises(InvalidArgument) as refusal:
        e.Gaussian(noise=value)
    assert len(str(refusal.value)) < 300


@pytest.mark.parametrize("value", [None, 7, b"{}", ["{}"]])
def test_what_is_not_text_is_refused(value):
    with pytest.raises(MalformedEvents, match="want text"):
        e.from_json(value)


def test_a_kind_as_long_as_a_book_gives_a_short_line():
    with pytest.raises(MalformedEvents) as refusal:
        e.from_json('{"kind": "' + "x" * 100_000 + '"}')
    assert len(str(refusal.value)) < 600


@pytest.mark.parametrize("text", ["[" * 100_000, '{"event":' * 100_000, "[" * 5000 + "]" * 5000])
def test_deep_nesting_is_refused(text):
    with pytest.raises(MalformedEvents):
        e.from_json(text)
