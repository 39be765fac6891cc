"""The one rule for names: snapshot tags, sandbox names and workspace names."""

from __future__ import annotations

import re

from forkd.specs.errors import BadTag

TAG_RULE = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}"
_TAG = re.compile(TAG_RULE)


def check_tag(tag: str, what: str = "tag") -> str:
    """Return ``tag`` if it follows the rule, else raise BadTag. Such a name is always a safe single path component."""
    if not _TAG.fullmatch(tag):
        raise BadTag(
            f"{what} {tag[:80]!r} is not allowed",
            hint="use 1 to 64 of A-Z a-z 0-9 . _ - and start with a letter, a digit or _",
        )
    return tag
