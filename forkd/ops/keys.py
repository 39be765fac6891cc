"""Keys and logins: made, kept in a directory only their owner can enter, and looked up."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from forkd.hub import refs, signatures
from forkd.runtime import Runtime
from forkd.specs.errors import BadInput, Conflict, NotFound
from forkd.specs.tags import check_tag
from forkd.specs.transport import Login
from forkd.store import files

TRUSTED = "trusted-keys"
LOGINS = "logins.json"


class _SavedLogin(msgspec.Struct, omit_defaults=True):
    token: str | None = None
    username: str | None = None
    password: str | None = None


def keygen(runtime: Runtime, name: str) -> dict[str, Any]:
    """Make a signing key. An existing one is never replaced."""
    path = _key_path(runtime, name)
    _private(runtime)
    pem = signatures.new_key()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise Conflict(f"there is a key {name!r} already", hint="give another name with --name") from error
    with open(descriptor, "wb") as out:
        out.write(pem)
        out.flush()
        os.fsync(out.fileno())
    return {"name": name, "path": str(path), "public_key": signatures.public_hex(signatures.load_key(pem))}


def sign_document(runtime: Runtime, document: bytes, key: str | None) -> bytes:
    """A manifest with a signature by the key named, or as it is if none is."""
    if key is None:
        return document
    path = Path(key) if "/" in key else _key_path(runtime, key)
    try:
        pem = path.read_bytes()
    except OSError as error:
        raise NotFound(f"the key {path} cannot be read: {error.strerror}", hint="make one: forkd hub keygen") from error
    return signatures.sign(document, signatures.load_key(pem))


def trusted_keys(runtime: Runtime) -> dict[str, str]:
    """Names of the keys trusted here, by key. Raises TrustError if their file is malformed."""
    try:
        return signatures.parse_trusted((runtime.settings.hub_dir / TRUSTED).read_text())
    except FileNotFoundError:
        return {}


def trust(runtime: Runtime, name: str, key: str | None) -> list[dict[str, str]]:
    """Trust ``key`` under ``name``; without a key, trust what has that name no longer. Returns who is trusted then."""
    check_tag(name, "key name")
    keys = {public: known for public, known in trusted_keys(runtime).items() if known != name}
    if key is not None:
        keys[signatures.parse_public(key)] = name
    elif len(keys) == len(trusted_keys(runtime)):
        raise NotFound(f"no trusted key is called {name!r}")
    _private(runtime)
    files.write_durably(runtime.settings.hub_dir / TRUSTED, signatures.format_trusted(keys).encode())
    return list_trusted(runtime)


def list_trusted(runtime: Runtime) -> list[dict[str, str]]:
    """Who is trusted."""
    return [{"name": name, "public_key": key} for key, name in sorted(trusted_keys(runtime).items())]


def save_login(runtime: Runtime, url: str, login: Login) -> None:
    """Keep a login for a registry, in a file only we can read."""
    logins = _logins(runtime)
    logins[refs.base_url(url)] = _SavedLogin(token=login.token, username=login.username, password=login.password)
    _write_logins(runtime, logins)


def forget_login(runtime: Runtime, url: str) -> None:
    """Forget one. Raises NotFound."""
    logins = _logins(runtime)
    if logins.pop(refs.base_url(url), None) is None:
        raise NotFound(f"there is no login for {url}")
    _write_logins(runtime, logins)


def login_for(runtime: Runtime, url: str) -> Login | None:
    """The login for a URL: the one saved for the longest URL it begins with, else the token that is set for the hub."""
    fitting = [base for base in _logins(runtime) if _is_below(url, base)]
    if fitting:
        saved = _logins(runtime)[max(fitting, key=len)]
        return Login(token=saved.token, username=saved.username, password=saved.password)
    settings = runtime.settings
    if settings.hub_token and settings.hub_url and _is_below(url, refs.base_url(settings.hub_url)):
        return Login(token=settings.hub_token)
    return None


def _is_below(url: str, base: str) -> bool:
    """Never by the beginning of a word: ``https://host`` is not ``https://host.example``."""
    return url == base or url.startswith(base + "/")


def _logins(runtime: Runtime) -> dict[str, _SavedLogin]:
    try:
        data = (runtime.settings.hub_dir / LOGINS).read_bytes()
        return msgspec.json.decode(data, type=dict[str, _SavedLogin])
    except FileNotFoundError:
        return {}
    except msgspec.MsgspecError as error:
        raise BadInput(f"{runtime.settings.hub_dir / LOGINS} is malformed: {error}", hint="remove it") from error


def _write_logins(runtime: Runtime, logins: dict[str, _SavedLogin]) -> None:
    _private(runtime)
    files.write_durably(runtime.settings.hub_dir / LOGINS, msgspec.json.encode(logins))


def _key_path(runtime: Runtime, name: str) -> Path:
    return runtime.settings.hub_dir / "keys" / f"{check_tag(name, 'key name')}.pem"


def _private(runtime: Runtime) -> None:
    """Make the directory of secrets, closed to others before anything is in it."""
    (runtime.settings.hub_dir / "keys").mkdir(parents=True, exist_ok=True)
    runtime.settings.hub_dir.chmod(0o700)
