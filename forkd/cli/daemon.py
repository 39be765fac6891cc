"""`forkd daemon`: serve the REST API."""

from __future__ import annotations

import click

from forkd.cli.common import fail, first_of


@click.command("daemon")
@click.option("--bind", help="HOST:PORT for TCP, or none; default 127.0.0.1:8889. [env: FORKD_BIND]")
@click.option("--socket", help="Unix socket, or none; default forkd.sock in the data directory. [env: FORKD_SOCKET]")
@click.option("--token-file", help="Tokens, one a line: TOKEN, or NAME TOKEN [hub] (pulls). [env: FORKD_TOKEN_FILE]")
@click.option("--tls-cert", help="PEM certificate; with --tls-key TCP speaks https. [env: FORKD_TLS_CERT]")
@click.option("--tls-key", help="PEM key of the certificate. [env: FORKD_TLS_KEY]")
@click.option("--audit-log", help="File for one JSON line a request, or none. [env: FORKD_AUDIT_LOG]")
@click.option("--branch-concurrency", type=int, help="Captures at once; default 4. [env: FORKD_BRANCH_CONCURRENCY]")
@click.option("--agent-ports", help="A loopback port for each sandbox: on, off, auto. [env: FORKD_AGENT_PORTS]")
@click.option("--pool", help="Machines kept warm for snapshots' next children: TAG=N,TAG=N. [env: FORKD_POOL]")
@click.option("--end-sandboxes", is_flag=True, default=None, help="End sandboxes with the daemon.")
@click.option("--config", "path", type=click.Path(), help="TOML file with the same settings.")
@click.option("--init-config", is_flag=True, help="Print a config file with every setting explained, and exit.")
def command(path: str | None, init_config: bool, **flags: object) -> None:
    """Serve the REST API until Ctrl-C or SIGTERM.

    Every other verb finds the daemon by itself. Sandboxes outlive commands, and the daemon: the next one adopts them.
    """
    import logging

    import trio

    from forkd.config import load_settings
    from forkd.daemon.config import load_config, template
    from forkd.specs.errors import ForkdError

    if init_config:
        click.echo(template(), nl=False)
        return
    from forkd.daemon.serve import run_daemon

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("forkd.http").setLevel(logging.WARNING)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        config = load_config(path, flags)
        trio.run(run_daemon, load_settings(), config, lambda line: click.echo(f"forkd daemon: {line}", err=True))
    except* ForkdError as group:
        fail(first_of(group))
