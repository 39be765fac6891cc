"""The `forkd` command: finds a verb's module when the verb is used, so that help costs no heavy import."""

from __future__ import annotations

import functools
import importlib
import sys

import click

from forkd import __version__, frozen
from forkd.cli.common import daemon_options
from forkd.verbs import SECTIONS, VERBS

WITHOUT_DAEMON = {"completion", "daemon", "where", "wp-bench"}


class LazyGroup(click.Group):
    """A group whose verbs are imported when they are run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The verbs as the help groups them, then those of foreign plugins."""
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
        width = max(map(len, VERBS))
        for title, verbs in {**SECTIONS, "Of plugins": foreign_verbs()}.items():
            if verbs:
                with formatter.section(title):
                    formatter.write_dl([(name.ljust(width), about) for name, (_, about) in verbs.items()])


@functools.cache
def foreign_verbs() -> dict[str, tuple[str, str]]:
    """Verbs of foreign plugins: where each is, and its help. The bundled plugins, which bring none, are not loaded."""
    from forkd.config import load_settings
    from forkd.pluginmanager import load_plugins

    return load_plugins(load_settings(), bundled=()).commands


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
