"""`forkd hub`: look into registries; make, trust and use keys; keep logins."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from forkd.cli.common import json_option, mib, plain, print_json, table, with_controller
from forkd.cli.packs import hub_option, local_hub, local_url


@click.group("hub")
def command() -> None:
    """Look into registries; make, trust and use keys; keep logins."""


@command.command("ls")
@hub_option
@json_option
def list_command(hub: str | None, as_json: bool) -> None:
    """List what a registry offers."""
    _show(hub, "", as_json)


@command.command("search")
@click.argument("words", nargs=-1, required=True)
@hub_option
@json_option
def search(words: tuple[str, ...], hub: str | None, as_json: bool) -> None:
    """List the packages whose name or description has all WORDS."""
    _show(hub, " ".join(words), as_json)


def _show(hub: str | None, words: str, as_json: bool) -> None:
    rows = with_controller(lambda controller: controller.hub_packages(local_hub(hub), words))
    if as_json:
        print_json(rows)
        return
    cells = [
        [
            f"{row['package']}@{row['version']}",
            mib(row["size_bytes"]),
            f"{row['memory_mib']} MiB" if row["memory_mib"] else "-",
            row["base_image"] or "-",
            row["created_at"] or "-",
            row["description"] or "-",
        ]
        for row in rows
    ]
    if cells:
        table(["PACKAGE", "SIZE", "MEMORY", "IMAGE", "CREATED", "DESCRIPTION"], cells)
    click.echo(f"{len(rows)} versions", err=True)


@command.command("check")
@click.argument("ref")
@hub_option
@json_option
def check(ref: str, hub: str | None, as_json: bool) -> None:
    """Say, before anything is fetched, whether REF would run here, who signed it and how much would be fetched.

    Exit code 1 if it would not run.
    """
    found: dict[str, Any] = with_controller(lambda controller: controller.hub_check(local_url(ref), local_hub(hub)))
    if as_json:
        print_json(found)
    else:
        platform = found["platform"]
        needs = f"{platform['engine']} {platform['engine_version']}, {platform['accelerator']}, {platform['cpu']}"
        signed = f"{found['trust']}{': ' + ', '.join(found['signed_by']) if found['signed_by'] else ''}"
        for name, value in (
            ("ref", found["ref"]),
            ("runs here", f"{'yes' if found['runs_here'] else 'NO'} ({found['why']})"),
            ("made on", f"{needs}, {platform['arch']}"),
            ("machine", f"{found['hardware']['vcpus']} CPU, {found['hardware']['mem_mib']} MiB"),
            ("layers", " -> ".join(found["layers"])),
            ("to fetch", f"{mib(found['fetch_bytes'])} of {mib(found['total_bytes'])}"),
            ("signed", signed),
            ("description", found["description"] or "-"),
        ):
            click.echo(f"{name:14}{plain(value)}")
    sys.exit(0 if found["runs_here"] else 1)


@command.command("login")
@click.argument("url")
@click.option("--username", help="User name; the password is read from standard input.")
@click.option("--token-stdin", is_flag=True, help="Read a bearer token from standard input.")
@click.option("--logout", is_flag=True, help="Forget the login.")
def login(url: str, username: str | None, token_stdin: bool, logout: bool) -> None:
    """Keep a login for the registry at URL. Secrets are read from standard input, never from arguments."""
    if logout + token_stdin + (username is not None) != 1:
        raise click.UsageError("give one of --username, --token-stdin and --logout")
    fields: dict[str, Any] = {"forget": True}
    if not logout:
        secret = click.prompt("Secret", hide_input=True) if sys.stdin.isatty() else sys.stdin.readline().strip()
        fields = {"token": secret} if token_stdin else {"username": username, "password": secret}
    with_controller(lambda controller: controller.hub_login(url, **fields))
    click.echo(f"✓ {url}", err=True)


@command.command("keygen")
@click.option("--name", default="default", show_default=True, help="Name of the key.")
@json_option
def keygen(name: str, as_json: bool) -> None:
    """Make a key to sign packs with; print its public part, for others to trust."""
    made = with_controller(lambda controller: controller.hub_keygen(name))
    if as_json:
        print_json(made)
        return
    click.echo(f"✓ {made['path']}", err=True)
    click.echo(made["public_key"])


@command.command("sign")
@click.argument("file")
@click.option("--key", default="default", show_default=True, help="Its name, or the path of its file.")
@json_option
def sign(file: str, key: str, as_json: bool) -> None:
    """Add a signature to the pack FILE. To sign on the way to a registry: forkd push --sign KEY."""
    given = os.path.abspath(key) if "/" in key else key
    done = with_controller(lambda controller: controller.hub_sign(os.path.abspath(file), given))
    if as_json:
        print_json(done)
    else:
        click.echo("\n".join(f"✓ signed by {one}" for one in done["signed_by"]), err=True)


@command.command("trust")
@click.argument("name", required=False)
@click.argument("key", required=False)
@click.option("--remove", is_flag=True, help="Stop trusting NAME.")
@json_option
def trust(name: str | None, key: str | None, remove: bool, as_json: bool) -> None:
    """Trust the public KEY under NAME; without arguments, list who is trusted."""
    if (name is None) != (key is None) and not remove:
        raise click.UsageError("give NAME and KEY, or NAME with --remove")
    if name is None:
        rows = with_controller(lambda controller: controller.hub_trusted())
    else:
        rows = with_controller(lambda controller: controller.hub_trust(name, None if remove else key))
    if as_json:
        print_json(rows)
    else:
        for row in rows:
            click.echo(f"{row['public_key']} {row['name']}")
