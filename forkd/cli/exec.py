"""`forkd exec`: run a command in a sandbox."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from forkd.cli.common import json_option, print_json, with_controller
from forkd.cli.target import check_target, target, target_options

if TYPE_CHECKING:
    from forkd.sdk.async_controller import AsyncController


DEFAULT_TIMEOUT = 30.0


@click.command("exec", context_settings={"allow_interspersed_args": False})
@target_options
@click.option("-i", "--interactive", is_flag=True, help="Pass standard input on.")
@click.option("-t", "--tty", is_flag=True, help="Give it a terminal.")
@click.option("-d", "--detach", is_flag=True, help="Let it run in the background and print its pid.")
@click.option("--timeout-secs", type=click.FloatRange(0, min_open=True), help="Default: 30, or none with -i, -t, -d.")
@click.option("-e", "--env", "env", multiple=True, help="NAME=VALUE; repeatable.")
@click.option("--cwd", help="Directory to run in.")
@click.option("--user", help="User to run as.")
@json_option
@click.argument("args", nargs=-1, required=True, type=click.UNPROCESSED)
def command(
    sandbox_id: str | None,
    tag: str | None,
    interactive: bool,
    tty: bool,
    detach: bool,
    timeout_secs: float | None,
    env: tuple[str, ...],
    cwd: str | None,
    user: str | None,
    as_json: bool,
    args: tuple[str, ...],
) -> None:
    """Run a command in a sandbox and exit with its code.

    127 if there is no such program, 124 if it took too long, 128+N if signal N ended it.

    \b
    forkd exec --tag python-numpy -- uname -a
    forkd exec --sandbox sb-1234 -it -- python3
    """
    check_target(sandbox_id, tag)
    if tty and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError("-t needs a terminal on standard input and output")
    if detach and (interactive or tty or tag is not None):
        raise click.UsageError("-d goes with --sandbox, and not with -i or -t")
    fields = {"env": parse_env(env), "cwd": cwd, "user": user}

    async def work(controller: AsyncController) -> dict[str, Any]:
        async with target(controller, sandbox_id, tag) as chosen:
            if interactive or tty or detach:
                return await start_in(controller, chosen, list(args), timeout_secs, fields, interactive, tty, detach)
            return await run_in(controller, chosen, list(args), timeout_secs or DEFAULT_TIMEOUT, fields, as_json)

    result = with_controller(work)
    if detach:
        if as_json:
            print_json(result)
        else:
            click.echo(str(result["pid"]))
        sys.exit(0)
    sys.exit(finish(result, as_json))


async def start_in(
    controller: AsyncController,
    sandbox_id: str,
    args: list[str],
    timeout: float | None,
    fields: dict[str, Any],
    interactive: bool,
    tty: bool,
    detach: bool,
) -> dict[str, Any]:
    """Start a process and, unless it is to run in the background, join this terminal to it.

    One that was started and could not be joined, as Ctrl-C came first, is not left behind.
    """
    import trio

    from forkd.cli.terminal import join, terminal_size
    from forkd.sdk.errors import ControllerError

    size = terminal_size() if tty else None
    with trio.CancelScope(shield=not detach):
        process = await controller.start_process(
            sandbox_id, args, stdin=interactive, pty=size, timeout_secs=timeout, attach=not detach, **fields
        )
    if detach:
        return process
    try:
        return await join(controller, sandbox_id, process["pid"], tty=tty, stdin=interactive, hangup=True)
    except BaseException:
        with trio.CancelScope(shield=True), suppress(ControllerError):  # it may have ended meanwhile
            await controller.signal_process(sandbox_id, process["pid"], "HUP")
        raise


async def run_in(
    controller: AsyncController, sandbox_id: str, args: list[str], timeout: float, fields: dict[str, Any], as_json: bool
) -> dict[str, Any]:
    """Run, passing output on byte for byte as it comes, or collecting it for JSON."""
    if as_json:
        return await controller.exec_command(sandbox_id, args, timeout, **fields)

    def on_output(stream: str, data: bytes) -> None:
        out = sys.stdout if stream == "stdout" else sys.stderr
        out.buffer.write(data)
        out.buffer.flush()

    return await controller.exec_stream(sandbox_id, args, on_output, timeout, **fields)


def finish(result: dict[str, Any], as_json: bool) -> int:
    """Say how a command ended if its own output does not; the exit code."""
    if as_json:
        print_json(result)
    elif result.get("error"):
        click.echo(f"forkd: {result['error']}", err=True)
    return int(255 if result["exit_code"] is None else result["exit_code"]) & 0xFF


def parse_env(pairs: tuple[str, ...]) -> dict[str, str]:
    """NAME=VALUE pairs as a dict."""
    env = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{pair!r} is not NAME=VALUE", param_hint="--env")
        env[name] = value
    return env
