"""The broadcast of events: in order, bounded, and honest about what was lost."""

from __future__ import annotations

from forkd.events import BEHIND, Events


async def test_subscribers_get_events_in_order_and_late_ones_get_what_is_kept() -> None:
    events = Events()
    events.publish("first", id=1)
    with events.subscribe() as now, events.subscribe(since=0) as late:
        events.publish("second", id=2)
        assert (await anext(now))["event"] == "second"
        assert [(await anext(late))["event"] for _ in range(2)] == ["first", "second"]


async def test_a_subscriber_that_falls_behind_is_told_how_much_it_lost() -> None:
    events = Events()
    with events.subscribe() as slow:
        for number in range(BEHIND + 3):
            events.publish("tick", number=number)
        lost = await anext(slow)
        assert (lost["event"], lost["count"]) == ("lost", 3)
        assert (await anext(slow))["number"] == 3


def test_listeners_are_called_at_once_and_numbers_rise() -> None:
    events, seen = Events(), []
    events.listen(lambda event: seen.append((event["seq"], event["event"])))
    events.publish("a")
    events.publish("b")
    assert seen == [(1, "a"), (2, "b")]
