"""Which snapshots rules let go: never one that is held, spared, or built on by one that stays."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forkd.ops.prune import Candidate, check_rules, choose
from forkd.specs.errors import BadInput
from forkd.specs.models import PruneRow
from forkd.specs.requests import RetentionRule

NOW = 1000.0


def one(tag: str, created: int, parent: str | None = None, held: str | None = None, **labels: str) -> Candidate:
    return Candidate(tag, created, 10, labels, parent, held == "pinned", held)


def gone(found: list[Candidate], *rules: RetentionRule) -> list[str]:
    return [row.tag for row in choose(found, rules, NOW) if row.action == "remove"]


def reasons(rows: list[PruneRow]) -> dict[str, str]:
    return {row.tag: row.reason for row in rows}


def test_the_newest_stay_and_pinned_ones_are_not_counted() -> None:
    found = [one("a", 1), one("b", 2), one("c", 3), one("d", 4, held="pinned")]
    assert gone(found, RetentionRule(keep_last=1)) == ["b", "a"]
    assert gone(found, RetentionRule(keep_last=0)) == ["c", "b", "a"]
    rows = reasons(choose(found, [RetentionRule(keep_last=1)], NOW))
    assert rows == {
        "a": "not one of the newest 1",
        "b": "not one of the newest 1",
        "c": "one of the newest 1",
        "d": "pinned",
    }


def test_age_and_size_spare_the_newest() -> None:
    found = [one("a", 100), one("b", 200), one("c", 990)]
    assert gone(found, RetentionRule(older_than_secs=500)) == ["b", "a"]
    assert gone(found, RetentionRule(older_than_secs=500, keep_last=2)) == ["a"]
    assert gone(found, RetentionRule(max_bytes=20)) == ["a"]
    assert gone(found, RetentionRule(max_bytes=0, keep_last=1)) == ["b", "a"]
    assert gone(found, RetentionRule(max_bytes=30)) == []
    assert gone(found, RetentionRule(max_bytes=10, older_than_secs=850)) == ["b", "a"]


def test_what_stays_is_never_built_on_air() -> None:
    chain = [one("root", 1), one("middle", 2, "root"), one("head", 3, "middle")]
    assert gone(chain, RetentionRule(keep_last=1)) == []
    assert gone(chain, RetentionRule(keep_last=0)) == ["head", "middle", "root"]
    held = [*chain[:2], one("head", 3, "middle", held="sandbox sb-1 runs from it")]
    rows = reasons(choose(held, [RetentionRule(older_than_secs=0)], NOW))
    assert rows == {"head": "sandbox sb-1 runs from it", "middle": "head builds on it", "root": "middle builds on it"}
    # By size the head goes first, although it is the newest: nothing else can.
    assert gone(chain, RetentionRule(max_bytes=20)) == ["head"]
    # With the head gone by size, the middle may go by age.
    assert gone(chain, RetentionRule(max_bytes=20, older_than_secs=997.5)) == ["head", "middle", "root"]


def test_the_first_rule_whose_labels_fit_decides_and_a_bare_label_counts_each_value_apart() -> None:
    found = [one(f"{team}{age}", age, team=team) for team in ("red", "blue") for age in (1, 2)] + [one("other", 3)]
    assert gone(found, RetentionRule(labels=["team"], keep_last=1)) == ["red1", "blue1"]
    assert gone(found, RetentionRule(labels=["team=red"], keep_last=0)) == ["red2", "red1"]
    rules = (RetentionRule(labels=["team=red"], keep_last=5), RetentionRule(keep_last=0))
    assert gone(found, *rules) == ["other", "blue2", "blue1"]
    assert reasons(choose(found, rules[:1], NOW))["other"] == "no rule is about it"


def test_a_circle_of_parents_ends() -> None:
    circle = [one("a", 1, "b"), one("b", 2, "a")]
    assert sorted(gone(circle, RetentionRule(keep_last=0))) == ["a", "b"]


@pytest.mark.parametrize("rule", [{}, {"labels": ["a"]}, {"keep_last": -1}, {"older_than_secs": float("nan")}])
def test_rules_that_say_nothing_are_refused(rule: dict[str, object]) -> None:
    with pytest.raises(BadInput):
        check_rules([RetentionRule(**rule)])  # type: ignore[arg-type]
    with pytest.raises(BadInput):
        check_rules([])


def store_of(rows: list[tuple[int, int, str | None, dict[str, str]]]) -> list[Candidate]:
    """Snapshots each of which builds on nothing or on one before it."""
    return [
        Candidate(f"s{number}", created, 10, labels, f"s{below}" if below < number else None, held == "pinned", held)
        for number, (created, below, held, labels) in enumerate(rows)
    ]


stores = st.lists(
    st.tuples(
        st.integers(0, 900),
        st.integers(0, 15),
        st.sampled_from([None, None, None, "pinned", "used"]),
        st.sampled_from([{}, {"k": "1"}, {"k": "2"}]),
    ),
    max_size=9,
).map(store_of)
limits = st.one_of(st.none(), st.integers(0, 60))
rule = st.builds(
    RetentionRule,
    labels=st.sampled_from([[], ["k"], ["k=1"]]),
    keep_last=st.one_of(st.none(), st.integers(0, 4)),
    older_than_secs=st.one_of(st.none(), st.floats(0, 1000)),
    max_bytes=limits,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # other tests may take the CPUs
@given(stores, st.lists(rule, min_size=1, max_size=3))
def test_whatever_the_rules_nothing_held_spared_or_needed_goes(
    found: list[Candidate], rules: list[RetentionRule]
) -> None:
    rows = choose(found, rules, NOW)
    assert sorted(row.tag for row in rows) == sorted(each.tag for each in found)
    going = [row.tag for row in rows if row.action == "remove"]
    by_tag = {each.tag: each for each in found}
    for place, tag in enumerate(going):
        assert by_tag[tag].held is None
        assert all(each.tag in going[:place] for each in found if each.parent == tag)
    if rules[0].labels == [] and rules[0].keep_last:
        newest = sorted((each for each in found if not each.pinned), key=lambda each: (each.created, each.tag))
        assert not {each.tag for each in newest[-rules[0].keep_last :]} & set(going)
