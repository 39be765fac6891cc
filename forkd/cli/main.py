"""The `forkd` command: finds a verb's module when the verb is used, so that help costs no heavy import."""

from __future__ import annotations

import functools
import importlib
import sys

import click

from forkd import __version__, frozen
from forkd.cli.common import daemon_options

VERBS = {
    "quickstart": ("forkd.cli.quickstart", "Set up, build a parent, fork children, show figures."),
    "doctor": ("forkd.cli.doctor", "Check the host, with a hint for what is missing."),
    "setup": ("forkd.cli.setup", "Fetch the guest kernel; with --host, prepare the host."),
    "from-image": ("forkd.cli.from_image", "Image reference to warmed snapshot in one step."),
    "build": ("forkd.cli.build", "Recipe or Dockerfile to warmed snapshot, every step cached."),
    "parent": ("forkd.cli.parent", "Build root file systems."),
    "mcp": ("forkd.cli.mcp", "Serve forkd as tools to an agent (Model Context Protocol)."),
    "snapshot": ("forkd.cli.snapshot", "Boot a rootfs, warm it, capture it."),
    "fork": ("forkd.cli.fork", "Fork N children from a snapshot."),
    "run": ("forkd.cli.run", "Run one command in a fresh child of an image."),
    "exec": ("forkd.cli.exec", "Run a command in a sandbox."),
    "shell": ("forkd.cli.shell", "Open a terminal in a sandbox."),
    "ps": ("forkd.cli.ps", "List the processes of a sandbox."),
    "cp": ("forkd.cli.cp", "Copy files and directories to and from a sandbox."),
    "port-forward": ("forkd.cli.port_forward", "Reach a server in a sandbox at a port of this host."),
    "eval": ("forkd.cli.eval", "Evaluate code in a sandbox's warm interpreter."),
    "ping": ("forkd.cli.ping", "Ask a sandbox's agent whether it is there."),
    "spawn": ("forkd.cli.spawn", "Fork children that stay; needs a daemon."),
    "ls": ("forkd.cli.ls", "List running sandboxes."),
    "kill": ("forkd.cli.kill", "End sandboxes."),
    "fanout": ("forkd.cli.fanout", "Run a command in many forks and keep the best."),
    "diff": ("forkd.cli.diff", "How a sandbox differs from another or from a snapshot."),
    "logs": ("forkd.cli.logs", "Print what a sandbox's console or VMM said."),
    "pause": ("forkd.cli.pause", "Stop the CPUs of sandboxes."),
    "resume": ("forkd.cli.resume", "Let paused sandboxes run on."),
    "label": ("forkd.cli.label", "Give a sandbox labels and a name."),
    "renew": ("forkd.cli.renew", "Change how long a sandbox may live."),
    "rollback": ("forkd.cli.rollback", "Put a sandbox back to one of its snapshots."),
    "promote": ("forkd.cli.promote", "Let a fork take over from its source."),
    "images": ("forkd.cli.images", "List local snapshots."),
    "rmi": ("forkd.cli.rmi", "Remove snapshots."),
    "prune": ("forkd.cli.prune", "Remove the snapshots that rules let go."),
    "pin": ("forkd.cli.pin", "Keep snapshots from being removed."),
    "unpin": ("forkd.cli.unpin", "Let pinned snapshots be removed again."),
    "pack": ("forkd.cli.pack", "Write a snapshot as one portable file."),
    "unpack": ("forkd.cli.unpack", "Take in a pack file."),
    "push": ("forkd.cli.push", "Send a snapshot to a registry."),
    "pull": ("forkd.cli.pull", "Fetch a snapshot from a registry."),
    "hub": ("forkd.cli.hub", "Look into registries; keys, logins and trust."),
    "snapshot-diff": ("forkd.cli.snapshot_diff", "Run a command in a child; keep what it changed as a layer."),
    "snapshot-info": ("forkd.cli.snapshot_info", "Lineage and sizes of a snapshot."),
    "snapshot-compact": ("forkd.cli.snapshot_compact", "Flatten a chain of layers."),
    "bench": ("forkd.cli.bench", "How quick is forkd here: spawn, exec, branch, fan-out."),
    "wp-bench": ("forkd.cli.wp_bench", "Measure userfaultfd write protection."),
    "where": ("forkd.cli.where", "Print the data directory."),
    "plugin": ("forkd.cli.plugin", "List plugins; check one; start a new one."),
    "workspace": ("forkd.cli.workspace", "Named sandboxes that are suspended and resumed."),
    "daemon": ("forkd.cli.daemon", "Serve the REST API; sandboxes outlive commands."),
    "completion": ("forkd.cli.completion", "Completion for bash, zsh or fish."),
    "cleanup": ("forkd.cli.cleanup", "Find and remove what killed commands left behind."),
}
WITHOUT_DAEMON = {"completion", "daemon", "where", "wp-bench"}


class LazyGroup(click.Group):
    """A group whose verbs are imported when they are run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The verbs, in the order a newcomer meets them, then those of foreign plugins."""
        return [*VERBS, *foreign_verbs()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one verb."""
        if cmd_name in VERBS:
            command: click.Command = importlib.import_module(VERBS[cmd_name][0]).command
            return command if cmd_name in WITHOUT_DAEMON else daemon_options(command)
        if verb := foreign_verbs().get(cmd_name):
            module, _, name = verb[0].partition(":")
            found: click.Command = getattr(importlib.import_module(module), name)
            return found
        return None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the verbs without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, about) for name, (_, about) in VERBS.items()])
        if foreign := foreign_verbs():
            with formatter.section("Commands of plugins"):
                formatter.write_dl([(name, about) for name, (_, about) in foreign.items()])


@functools.cache
def foreign_verbs() -> dict[str, tuple[str, str]]:
    """Verbs of foreign plugins: where each is, and its help. The bundled plugins, which bring none, are not loaded."""
    from forkd.config import load_settings
    from forkd.pluginmanager import load_plugins

    commands = load_plugins(load_settings(), bundled=()).commands
    return {name: verb for name, verb in commands.items() if name not in VERBS}


def print_version(context: click.Context, option: click.Parameter, wanted: bool) -> None:
    """Version and commit; the binary also says what is inside."""
    if not wanted or context.resilient_parsing:
        return
    info = frozen.build_info()
    click.echo(f"forkd {__version__} (commit {info['commit']}, Python {info['python']})")
    if info["packages"]:
        click.echo("with " + ", ".join(f"{name} {version}" for name, version in info["packages"].items()))
        click.echo("plugins " + ", ".join(info["plugins"]))
    context.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=print_version, help="Version.")
def cli() -> None:
    """Boot a microVM once, warm it, fork children that share its memory.

    Start with: forkd quickstart
    """


def main() -> None:
    """Entry point: broken pipes and Ctrl-C end quietly, as people expect."""
    helper = sys.argv[1:2] == [frozen.RUN_MODULE]
    frozen.start(helper=helper)
    if helper:
        frozen.run_module(sys.argv[2], sys.argv[3:])
        return
    try:
        cli(prog_name="forkd")
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(141)


if __name__ == "__main__":
    main()
