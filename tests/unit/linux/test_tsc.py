"""The rate of the time stamp counter is right on a busy host too: guests keep time by it."""

from __future__ import annotations

import itertools

from forkd.linux.tsc import measure_tsc_khz, read_together


def test_of_several_readings_the_one_that_nothing_interrupted_counts() -> None:
    clock = itertools.chain([0, 9_000_000, 9_000_100, 9_000_300], itertools.count(20_000_000, 5_000))
    counter = itertools.count(1_000_000, 7)
    assert next(counter) == 1_000_000
    assert read_together(lambda: next(clock), lambda: next(counter)) == (9_000_200, 1_000_014)


def test_it_is_the_same_twice() -> None:
    first, second = measure_tsc_khz(), measure_tsc_khz()
    assert abs(first - second) < 0.002 * first
