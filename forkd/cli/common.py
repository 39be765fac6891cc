"""What verbs share: a controller to talk to, progress on a terminal, errors as sentences with the right exit code."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

if TYPE_CHECKING:
    import trio

    from forkd.sdk.async_controller import AsyncController, OnProgress

T = TypeVar("T")

URL = "daemon_url"
TOKEN = "daemon_token"
cache_option = click.option(
    "--cache",
    envvar="FORKD_RUN_CACHE",
    expose_value=False,
    help="Accepted for compatibility: root file systems are cached by content, in the data directory.",
)
tap_option = click.option(
    "--tap", envvar="FORKD_TAP", help="A tap device of the host for its network while it boots and warms up."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")


def daemon_options(command: click.Command) -> click.Command:
    """Give a verb, and the verbs of a group, ``--daemon-url`` and ``--daemon-token``."""
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            daemon_options(inner)
    elif not any(param.name == URL for param in command.params):
        about = "The daemon: http://…, unix:///PATH; `local` for none. Found by itself if not given. [env: FORKD_URL]"
        command.params += [
            click.Option(["--daemon-url", URL], help=about, callback=_keep, expose_value=False),
            click.Option(
                ["--daemon-token", TOKEN], help="Its token. [env: FORKD_TOKEN]", callback=_keep, expose_value=False
            ),
        ]
    return command


def _keep(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    ctx.meta[str(param.name)] = value


def with_controller(work: Callable[[AsyncController], Awaitable[T]]) -> T:
    """Run ``work`` with a controller: over a daemon if there is one, else over the app hosted in this process."""
    import trio

    from forkd.sdk.connect import find_controller
    from forkd.sdk.errors import ControllerError
    from forkd.specs.errors import ForkdError

    context = click.get_current_context(silent=True)
    meta = context.meta if context is not None else {}

    async def main() -> T:
        done: list[T] = []
        async with trio.open_nursery() as watch:
            with trio.CancelScope() as scope:
                await watch.start(_cancel_on_interrupt, scope)
                async with find_controller(meta.get(URL), meta.get(TOKEN)) as controller:
                    done.append(await work(controller))
            watch.cancel_scope.cancel()
        if not done:
            raise KeyboardInterrupt
        return done[0]

    try:
        return trio.run(main, restrict_keyboard_interrupt_to_checkpoints=True)
    except* KeyboardInterrupt:
        sys.exit(130)
    except* BrokenPipeError:
        hang_up()
    except* (ControllerError, ForkdError) as group:
        fail(first_of(group))
    raise AssertionError("unreachable")


def hang_up() -> NoReturn:
    """Whoever read our output (``head``) has enough: end as a program does that SIGPIPE ends, without a word."""
    # What is still buffered would fail again, loudly, when Python ends.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(128 + signal.SIGPIPE)


async def _cancel_on_interrupt(scope: trio.CancelScope, task_status: trio.TaskStatus[None]) -> None:
    """Ctrl-C ends the work as a cancellation, so that it tidies up; another one, a second later or more, ends us hard.

    Not sooner: the one-file binary gets every Ctrl-C twice, from the terminal and from its launcher. Whoever started us
    without Ctrl-C (``&`` in a script) is not for us to overrule.
    """
    import trio

    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        task_status.started()
        return
    with trio.open_signal_receiver(signal.SIGINT) as signals:
        task_status.started()
        async for _ in signals:
            if not scope.cancel_called:
                scope.cancel()
                patience = trio.current_time() + 1
            elif trio.current_time() > patience:
                os._exit(130)


def local_reference(reference: str) -> str:
    """An image reference for a daemon, whose working directory is another: relative paths made absolute."""
    scheme, colon, path = reference.rpartition(":")
    if colon and scheme in ("dir", "tar"):
        return f"{scheme}:{os.path.abspath(path)}"
    return os.path.abspath(reference) if reference.startswith(("./", "../")) else reference


def first_of(group: BaseExceptionGroup[Any]) -> BaseException:
    """The first plain exception inside a group."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def fail(error: BaseException) -> NoReturn:
    """Print an error as a sentence with its hint, and exit with its code."""
    from forkd.specs.errors import all_errors

    code = getattr(error, "code", None)
    statuses = {kind.code: kind.exit_status for kind in all_errors()}
    statuses["unprocessable"] = 2
    click.echo(f"forkd: error: {error}", err=True)
    if hint := getattr(error, "hint", None):
        click.echo(f"  hint: {hint}", err=True)
    sys.exit(statuses.get(str(code), 1))


def print_json(value: Any) -> None:
    """Data for programs, on stdout."""
    click.echo(json.dumps(value, indent=2))


@contextmanager
def progress_bar() -> Iterator[OnProgress]:
    """Progress on stderr: a live bar on a terminal, one plain line a step elsewhere."""
    if not sys.stderr.isatty():
        seen: set[str] = set()

        def plain(step: str, fraction: float | None) -> None:
            if step not in seen:
                seen.add(step)
                click.echo(f"==> {step}", err=True)

        yield plain
        return

    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=False) as bars:
        tasks: dict[str, Any] = {}

        def live(step: str, fraction: float | None) -> None:
            if step not in tasks:
                for task in tasks.values():
                    bars.update(task, total=1.0, completed=1.0)
                tasks[step] = bars.add_task(step, total=None if fraction is None else 1.0)
            bars.update(tasks[step], total=None if fraction is None else 1.0, completed=fraction or 0.0)

        yield live
        for task in tasks.values():
            bars.update(task, total=1.0, completed=1.0)


def table(columns: list[str], rows: list[list[str]], title: str | None = None) -> None:
    """A table for people, on stdout."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(title=title, box=None, pad_edge=False, title_justify="left")
    for index, name in enumerate(columns):
        grid.add_column(name, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        # As Text: in a plain str rich would take what a guest or a registry calls things for markup.
        grid.add_row(*(Text(plain(cell.replace("\n", " "))) for cell in row))
    Console(width=None if sys.stdout.isatty() else 160).print(grid)


def plain(text: str) -> str:
    """What others (a guest, a registry) call things, without what a terminal would obey."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def mib(count: float | None) -> str:
    """Bytes as MiB with one decimal."""
    return "-" if count is None else f"{count / (1 << 20):.1f} MiB"


def ms(seconds: float) -> str:
    """Seconds as whole milliseconds, or as seconds where that reads better."""
    return f"{seconds * 1000:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"
