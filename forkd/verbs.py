"""The verbs of the command line that are forkd's own, as its help groups them: each one's module and line there."""

from __future__ import annotations

SECTIONS = {
    "Start here": {
        "quickstart": ("forkd.cli.quickstart", "Set up, build a parent, fork children, show figures."),
        "doctor": ("forkd.cli.doctor", "Check the host, with a hint for what is missing."),
        "setup": ("forkd.cli.setup", "Fetch the guest kernel; with --host, prepare the host."),
    },
    "Parents and snapshots": {
        "from-image": ("forkd.cli.from_image", "Image reference to warmed snapshot in one step."),
        "build": ("forkd.cli.build", "Recipe or Dockerfile to warmed snapshot, every step cached."),
        "parent": ("forkd.cli.parent", "Build root file systems."),
        "snapshot": ("forkd.cli.snapshot", "Boot a rootfs, warm it, capture it."),
        "images": ("forkd.cli.images", "List local snapshots."),
        "snapshot-info": ("forkd.cli.snapshot_info", "Lineage and sizes of a snapshot."),
        "snapshot-diff": ("forkd.cli.snapshot_diff", "Run a command in a child; keep what it changed as a layer."),
        "snapshot-compact": ("forkd.cli.snapshot_compact", "Flatten a chain of layers."),
        "rmi": ("forkd.cli.rmi", "Remove snapshots."),
        "prune": ("forkd.cli.prune", "Remove the snapshots that rules let go."),
        "pin": ("forkd.cli.pin", "Keep snapshots from being removed."),
        "unpin": ("forkd.cli.unpin", "Let pinned snapshots be removed again."),
    },
    "Children": {
        "fork": ("forkd.cli.fork", "Fork N children from a snapshot."),
        "run": ("forkd.cli.run", "Run one command in a fresh child of an image."),
        "spawn": ("forkd.cli.spawn", "Fork children that stay; needs a daemon."),
        "ls": ("forkd.cli.ls", "List running sandboxes."),
        "kill": ("forkd.cli.kill", "End sandboxes."),
        "fanout": ("forkd.cli.fanout", "Run a command in many forks and keep the best."),
        "diff": ("forkd.cli.diff", "How a sandbox differs from another or from a snapshot."),
        "rollback": ("forkd.cli.rollback", "Put a sandbox back to one of its snapshots."),
        "promote": ("forkd.cli.promote", "Let a fork take over from its source."),
        "pause": ("forkd.cli.pause", "Stop the CPUs of sandboxes."),
        "resume": ("forkd.cli.resume", "Let paused sandboxes run on."),
        "label": ("forkd.cli.label", "Give a sandbox labels and a name."),
        "renew": ("forkd.cli.renew", "Change how long a sandbox may live."),
        "workspace": ("forkd.cli.workspace", "Named sandboxes that are suspended and resumed."),
    },
    "In a child": {
        "exec": ("forkd.cli.exec", "Run a command in a sandbox."),
        "eval": ("forkd.cli.eval", "Evaluate code in a sandbox's warm interpreter."),
        "shell": ("forkd.cli.shell", "Open a terminal in a sandbox."),
        "ps": ("forkd.cli.ps", "List the processes of a sandbox."),
        "cp": ("forkd.cli.cp", "Copy files and directories to and from a sandbox."),
        "port-forward": ("forkd.cli.port_forward", "Reach a server in a sandbox at a port of this host."),
        "logs": ("forkd.cli.logs", "Print what a sandbox's console or VMM said."),
        "ping": ("forkd.cli.ping", "Ask a sandbox's agent whether it is there."),
    },
    "Share": {
        "pack": ("forkd.cli.pack", "Write a snapshot as one portable file."),
        "unpack": ("forkd.cli.unpack", "Take in a pack file."),
        "push": ("forkd.cli.push", "Send a snapshot to a registry."),
        "pull": ("forkd.cli.pull", "Fetch a snapshot from a registry."),
        "hub": ("forkd.cli.hub", "Look into registries; keys, logins and trust."),
    },
    "Serve": {
        "daemon": ("forkd.cli.daemon", "Serve the REST API; sandboxes outlive commands."),
        "mcp": ("forkd.cli.mcp", "Serve forkd as tools to an agent (Model Context Protocol)."),
    },
    "forkd itself": {
        "plugin": ("forkd.cli.plugin", "List plugins; check one; start a new one."),
        "cleanup": ("forkd.cli.cleanup", "Find and remove what killed commands left behind."),
        "where": ("forkd.cli.where", "Print the data directory."),
        "bench": ("forkd.cli.bench", "How quick is forkd here: spawn, exec, branch, fan-out."),
        "wp-bench": ("forkd.cli.wp_bench", "Measure userfaultfd write protection."),
        "completion": ("forkd.cli.completion", "Completion for bash, zsh or fish."),
    },
}
VERBS = {name: verb for section in SECTIONS.values() for name, verb in section.items()}
