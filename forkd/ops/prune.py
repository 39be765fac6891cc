"""Prune: remove the snapshots that retention rules let go, and never one that is pinned, in use or built on."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import trio

from forkd.ops.remove import in_use, remove_snapshot
from forkd.runtime import Runtime
from forkd.specs.errors import BadInput, ForkdError, SnapshotInUse, SnapshotNotFound
from forkd.specs.models import Pruned, PruneRow
from forkd.specs.requests import RetentionPolicy, RetentionRule
from forkd.store.files import tree_bytes
from forkd.store.snapshots import Broken

log = logging.getLogger("forkd")
MAX_RULES = 100
SHORTEST = 1.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A snapshot as rules see it; ``held`` says why it stays whatever they say."""

    tag: str
    created: int
    bytes: int
    labels: Mapping[str, str]
    parent: str | None = None
    pinned: bool = False
    held: str | None = None


def check_rules(rules: Sequence[RetentionRule]) -> None:
    """Raise BadInput for rules that say nothing or nonsense."""
    if not 0 < len(rules) <= MAX_RULES:
        raise BadInput(f"there are {len(rules)} rules", hint="give one at least: keep_last, older_than_secs, max_bytes")
    for rule in rules:
        given = {"keep_last": rule.keep_last, "older_than_secs": rule.older_than_secs, "max_bytes": rule.max_bytes}
        if all(value is None for value in given.values()):
            raise BadInput("a rule says nothing", hint="give keep_last, older_than_secs or max_bytes")
        for name, value in given.items():
            if value is not None and not value >= 0:
                raise BadInput(f"{name} is {value}", hint="give 0 or more")


async def prune(runtime: Runtime, rules: Sequence[RetentionRule], *, dry_run: bool) -> Pruned:
    """What the rules let go, removed unless ``dry_run``: what builds on others first. Raises BadInput."""
    check_rules(rules)
    used = in_use(runtime)
    found = await trio.to_thread.run_sync(_candidates, runtime, used)
    rows = choose(found, rules, time.time())
    if not dry_run:
        for row in rows:
            if row.action == "remove":
                await _remove(runtime, row)
    freed = sum(row.bytes for row in rows if row.action == "remove")
    if freed and not dry_run:
        runtime.observe("prune", tags=[row.tag for row in rows if row.action == "remove"], freed_bytes=freed)
    return Pruned(dry_run=dry_run, freed_bytes=freed, rows=rows)


async def keep_pruned(runtime: Runtime, policy: RetentionPolicy) -> None:
    """Apply a policy now and then, for as long as the daemon runs; what fails is told and tried again."""
    while True:
        try:
            done = await prune(runtime, policy.rules, dry_run=False)
            gone = [row.tag for row in done.rows if row.action == "remove"]
            if gone:
                log.info("retention removed %s: %d MiB", ", ".join(gone), done.freed_bytes >> 20)
        except (ForkdError, OSError) as error:
            log.warning("retention failed, and is tried again later: %s", error)
        await trio.sleep(policy.every_secs)


def check_policy(policy: RetentionPolicy) -> None:
    """Raise BadInput for a policy that cannot be applied."""
    check_rules(policy.rules)
    if not policy.every_secs >= SHORTEST:
        raise BadInput(f"every_secs is {policy.every_secs:g}", hint=f"give {SHORTEST:g} or more")


async def _remove(runtime: Runtime, row: PruneRow) -> None:
    """Remove one, unless somebody has begun to use it since it was chosen."""
    try:
        await remove_snapshot(runtime, row.tag, unused=True)
    except (SnapshotInUse, SnapshotNotFound) as error:
        row.action, row.reason = "keep", error.message


def _candidates(runtime: Runtime, used: Mapping[str, str]) -> list[Candidate]:
    found = []
    for entry in runtime.snapshots.entries():
        size = tree_bytes(entry.directory)
        if isinstance(entry, Broken):
            why = f"it is broken; forkd rmi {entry.tag} removes it"
            try:
                found.append(Candidate(entry.tag, int(entry.directory.stat().st_mtime), size, {}, held=why))
            except FileNotFoundError:
                pass  # removed while we looked
            continue
        manifest = entry.manifest
        found.append(
            Candidate(
                manifest.tag,
                manifest.created_at_unix,
                size + runtime.images.cached_bytes(manifest.content),
                manifest.labels,
                manifest.parent.tag if manifest.parent else None,
                entry.pinned,
                "pinned" if entry.pinned else used.get(manifest.tag),
            )
        )
    return found


def choose(found: Sequence[Candidate], rules: Sequence[RetentionRule], now: float) -> list[PruneRow]:
    """What goes, each before what it builds on, then what stays, newest first, and why."""
    plan = _Plan(found)
    groups = list(_groups(found, rules))
    for rule, group in groups:
        for place, each in enumerate(group):
            plan.judge(rule, each, place, now)
    plan.settle()
    for rule, group in groups:
        plan.fit(rule, group)
    newest = sorted(found, key=lambda each: (each.created, each.tag), reverse=True)
    going = sorted((each for each in newest if each.tag in plan.going), key=lambda each: -plan.depth(each))
    return [plan.row(each) for each in (*going, *(each for each in newest if each.tag not in plan.going))]


class _Plan:
    """Who goes: ``wanted`` by a rule, unless ``spared``; ``going`` is what of it nothing that stays builds on."""

    def __init__(self, found: Sequence[Candidate]) -> None:
        self._by_tag = {each.tag: each for each in found}
        self._children: dict[str, list[str]] = {}
        for each in found:
            if each.parent is not None:
                self._children.setdefault(each.parent, []).append(each.tag)
        self._spared = {each.tag: each.held for each in found if each.held is not None}
        self._within: dict[str, str] = {}
        self._wanted: dict[str, str] = {}
        self.going: dict[str, str] = {}

    def judge(self, rule: RetentionRule, each: Candidate, place: int, now: float) -> None:
        """What a rule says of a snapshot that ``place`` newer ones are before."""
        if place < (rule.keep_last or 0):
            self._spared.setdefault(each.tag, f"one of the newest {rule.keep_last}")
        elif rule.older_than_secs is not None and now - each.created > rule.older_than_secs:
            self._wanted[each.tag] = f"older than {rule.older_than_secs:g} s"
        elif rule.older_than_secs is None and rule.max_bytes is None:
            self._wanted[each.tag] = f"not one of the newest {rule.keep_last}"
        else:
            self._within[each.tag] = "not old enough" if rule.max_bytes is None else "there is room for it"

    def settle(self) -> None:
        """Let go what is wanted to go, but for what is spared and what that builds on."""
        going = {tag: why for tag, why in self._wanted.items() if tag not in self._spared}
        while stuck := [tag for tag in going if any(child not in going for child in self._children.get(tag, ()))]:
            for tag in stuck:
                del going[tag]
        self.going = going

    def fit(self, rule: RetentionRule, group: Sequence[Candidate]) -> None:
        """Let the oldest go that can, until the rest of the group fits."""
        while rule.max_bytes is not None:
            left = [each for each in group if each.tag not in self.going]
            oldest = next((each for each in reversed(left) if self._may_go(each.tag)), None)
            if oldest is None or sum(each.bytes for each in left) <= rule.max_bytes:
                return
            self._wanted[oldest.tag] = f"more than {rule.max_bytes} bytes"
            self.settle()  # what it builds on may have been waiting for it

    def _may_go(self, tag: str) -> bool:
        return tag not in self._spared and all(child in self.going for child in self._children.get(tag, ()))

    def depth(self, each: Candidate) -> int:
        """How many snapshots it builds on; one that builds on itself counts each once."""
        seen = {each.tag}
        while (parent := self._by_tag.get(each.parent or "")) is not None and parent.tag not in seen:
            seen.add(parent.tag)
            each = parent
        return len(seen)

    def row(self, each: Candidate) -> PruneRow:
        """What becomes of one."""
        above = sorted(child for child in self._children.get(each.tag, ()) if child not in self.going)
        built_on = f"{', '.join(above[:3])}{' …' if above[3:] else ''} builds on it" if above else None
        stays = self._spared.get(each.tag) or built_on or self._within.get(each.tag) or "no rule is about it"
        goes = self.going.get(each.tag)
        return PruneRow(
            tag=each.tag,
            action="remove" if goes else "keep",
            reason=goes or stays,
            bytes=each.bytes,
            created_at_unix=each.created,
            labels=dict(each.labels),
        )


def _groups(
    found: Sequence[Candidate], rules: Sequence[RetentionRule]
) -> Iterator[tuple[RetentionRule, list[Candidate]]]:
    """Each rule with those it is about, newest first, and apart for each value of a label without one.

    What is pinned is outside all rules: it is neither counted nor removed.
    """
    left = sorted((each for each in found if not each.pinned), key=lambda each: (each.created, each.tag), reverse=True)
    for rule in rules:
        wanted = [label.partition("=") for label in rule.labels]
        apart: dict[tuple[str, ...], list[Candidate]] = {}
        for each in left:
            if all(key in each.labels and (not equals or each.labels[key] == value) for key, equals, value in wanted):
                apart.setdefault(tuple(each.labels[key] for key, _, _ in wanted), []).append(each)
        taken = {each.tag for group in apart.values() for each in group}
        left = [each for each in left if each.tag not in taken]
        for group in apart.values():
            yield rule, group
