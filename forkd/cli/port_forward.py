"""`forkd port-forward`: a port of this host that leads into a sandbox."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from forkd.cli.common import with_controller

if TYPE_CHECKING:
    import trio

    from forkd.sdk.async_controller import AsyncController

CHUNK = 64 * 1024


@click.command("port-forward")
@click.argument("sandbox_id", metavar="SANDBOX")
@click.argument("ports", metavar="[LOCAL:]PORT...", nargs=-1, required=True)
@click.option("--bind", default="127.0.0.1", show_default=True, help="Address of this host to listen on.")
def command(sandbox_id: str, ports: tuple[str, ...], bind: str) -> None:
    """Listen on LOCAL (PORT if not given, any free one if 0) and carry connections to PORT in the sandbox.

    Works with networking off. Ends with Ctrl-C.
    """
    pairs = [parse_pair(text) for text in ports]

    async def work(controller: AsyncController) -> None:
        import trio

        await controller.get_sandbox(sandbox_id)
        async with trio.open_nursery() as nursery:
            for local, port in pairs:
                await nursery.start(_listen, controller, sandbox_id, bind, local, port)

    with_controller(work)


def parse_pair(text: str) -> tuple[int, int]:
    """LOCAL:PORT or PORT."""
    local, colon, port = text.rpartition(":")
    try:
        pair = int(local) if colon else int(port), int(port)
    except ValueError:
        pair = -1, -1
    if not (0 <= pair[0] <= 65535 and 1 <= pair[1] <= 65535):
        raise click.BadParameter(f"{text!r} is not [LOCAL:]PORT", param_hint="PORT")
    return pair


async def _listen(
    controller: AsyncController,
    sandbox_id: str,
    bind: str,
    local: int,
    port: int,
    task_status: trio.TaskStatus[None],
) -> None:
    import trio

    from forkd.specs.errors import HostNotReady

    try:
        listeners = await trio.open_tcp_listeners(local, host=bind)
    except OSError as error:
        raise HostNotReady(f"cannot listen on {bind}:{local}: {error}", hint="0:PORT takes any free one") from error
    number = listeners[0].socket.getsockname()[1]
    click.echo(f"{bind}:{number} leads to port {port} of {sandbox_id}", err=True)
    sys.stderr.flush()
    task_status.started()

    async def serve(stream: trio.SocketStream) -> None:
        await carry(controller, sandbox_id, port, stream)

    await trio.serve_listeners(serve, listeners)


async def carry(controller: AsyncController, sandbox_id: str, port: int, stream: trio.SocketStream) -> None:
    """Carry one connection; a refusal is told on stderr and ends just this one."""
    import trio

    from forkd.sdk.errors import ControllerError

    try:
        channel = await controller.connect_port(sandbox_id, port)
    except ControllerError as error:
        click.echo(f"forkd: {error}", err=True)
        await stream.aclose()
        return

    async def upwards() -> None:
        try:
            while data := await stream.receive_some(CHUNK):
                await channel.send(bytes(data))
            await channel.send('{"eof": true}')
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            nursery.cancel_scope.cancel()

    async with stream, channel, trio.open_nursery() as nursery:
        nursery.start_soon(upwards)
        try:
            async for message in channel:
                if isinstance(message, bytes):
                    await stream.send_all(message)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the local end hung up
        nursery.cancel_scope.cancel()
