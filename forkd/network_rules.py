"""The packet filters, as text for nft: what every guest may not do, and what its mode lets it do."""

from __future__ import annotations

from collections.abc import Sequence

TAP = "tap0"
UPLINK = "up0"
GUEST = "10.42.0.2"
GATEWAY = "10.42.0.1"
GATEWAY_MAC = "02:f0:4b:d0:00:01"
"""The same everywhere: a guest that is restored elsewhere remembers it."""
PREFIX_LENGTH = 24
LINK_PREFIX = "fkd"
HOST_TABLE = "forkd"
NEVER = "169.254.0.0/16, 127.0.0.0/8, 0.0.0.0/8, 224.0.0.0/4, 240.0.0.0/4"
"""Destinations no guest reaches in any mode: link-local (cloud metadata), loopback, multicast, reserved."""

HOST_RULES = """
table inet forkd {{}}
flush table inet forkd
table inet forkd {{
  chain input {{
    type filter hook input priority -10; policy accept;
    iifname "fkd*" reject with icmp type admin-prohibited
    iifname "fkd*" drop
  }}
  chain forward {{
    type filter hook forward priority -10; policy accept;
    iifname "fkd*" oifname "fkd*" drop
    iifname "fkd*" ip saddr != {pool} drop
    iifname "fkd*" ip daddr 169.254.0.0/16 drop
    iifname "fkd*" meta nfproto ipv6 drop
    oifname "fkd*" ct state != {{ established, related }} drop
  }}
  chain postrouting {{
    type nat hook postrouting priority 100; policy accept;
    ip saddr {pool} oifname != "fkd*" masquerade
  }}
}}
"""
"""The host's part: nothing from a guest is for the host itself or for another guest, nothing new goes to a guest."""


MAX_FLOWS = 4096
"""Connections a guest may have at once: the kernel's table of them is one for the host and all its guests."""
MAX_QUESTIONS = 200
"""Questions a second a guest may ask our resolver, which is part of the daemon."""


def child_rules(mode: str, networks: Sequence[str], pool: str) -> str:
    """The rules inside one namespace, which go when it goes. Everything is refused but what is named, and at once.

    A frame that says it is from anybody but the guest goes before all of them: what answers it, be it the resolver or
    a refusal, would carry the guest's words to whom it named.
    """
    elements = f"elements = {{ {', '.join(networks)} }}" if networks else ""
    verdict = "goto out" if mode == "nat" else "ip daddr @networks goto out\n    ip daddr @names goto out"
    question = f'iifname "{TAP}" ip daddr {GATEWAY} udp dport 53'
    return f"""
table inet forkd {{
  set networks {{ type ipv4_addr; flags interval; {elements} }}
  set names {{ type ipv4_addr; flags timeout; size 4096; }}
  chain prerouting {{
    type filter hook prerouting priority -300; policy accept;
    iifname "{TAP}" ip saddr != {GUEST} drop
  }}
  chain forward {{
    type filter hook forward priority 0; policy drop;
    ct state established,related accept
    iifname != "{TAP}" drop
    meta nfproto ipv6 drop
    ip daddr {{ {NEVER}, {pool} }} reject with icmp type admin-prohibited
    {verdict}
    reject with icmp type admin-prohibited
  }}
  chain out {{
    ct count over {MAX_FLOWS} reject with icmp type admin-prohibited
    accept
  }}
  chain input {{
    type filter hook input priority 0; policy drop;
    iifname "lo" accept
    {question} limit rate over {MAX_QUESTIONS}/second burst {MAX_QUESTIONS} packets drop
    {question} accept
    iifname "{TAP}" reject with icmp type admin-prohibited
  }}
  chain postrouting {{
    type nat hook postrouting priority 100; policy accept;
    oifname "{UPLINK}" masquerade
  }}
}}
"""
