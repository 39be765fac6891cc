"""Chains: from a snapshot to all it builds on, root first."""

from __future__ import annotations

from forkd.specs.errors import ChainBroken, SnapshotNotFound
from forkd.store.snapshots import SnapshotStore, Stored

MAX_DEPTH = 32


def resolve(store: SnapshotStore, tag: str) -> list[Stored]:
    """The layers of ``tag``, root first. Raises ChainBroken naming the link that is missing, altered or cyclic."""
    layers = [store.load(tag)]
    seen = {tag}
    while (parent := layers[0].manifest.parent) is not None:
        child = layers[0].manifest.tag
        if parent.tag in seen:
            raise ChainBroken(f"the chain of {tag!r} is a circle: {child!r} builds on {parent.tag!r} again")
        if len(layers) > MAX_DEPTH:
            raise ChainBroken(
                f"the chain of {tag!r} is deeper than {MAX_DEPTH}",
                hint="flatten it: forkd snapshot-compact --from … --to …",
            )
        try:
            layer = store.load(parent.tag)
        except SnapshotNotFound as error:
            raise ChainBroken(f"snapshot {child!r} builds on {parent.tag!r}, which is not here") from error
        if layer.manifest.content != parent.content:
            raise ChainBroken(
                f"snapshot {child!r} builds on a {parent.tag!r} with content {parent.content[:19]}…, "
                f"but the one here is {layer.manifest.content[:19]}…",
                hint=f"rebuild {child!r}, or bring back the {parent.tag!r} it was made from",
            )
        seen.add(parent.tag)
        layers.insert(0, layer)
    return layers
