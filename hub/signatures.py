"""ed25519 signatures over manifests, key files, and the judgement of a policy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from forkd.specs.errors import BadInput, PackError, TrustError
from forkd.specs.packs import MAX_SIGNATURES
from forkd.specs.tags import check_tag

POLICIES = ("off", "warn", "require")
_CONTEXT = b"forkd pack manifest 3\n"
_MARK = b"#: "
_LINE = re.compile(rb"#: ed25519 ([0-9a-f]{64}) ([0-9a-f]{128})")
_KEY = re.compile(r"(?:ed25519 )?([0-9a-f]{64})(?: ([^\s]+))?")


@dataclass(frozen=True, slots=True)
class Signature:
    """A signature as it stands in a manifest: the public key and the signature, in hexadecimal."""

    key: str
    value: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the signatures are worth here: ``trust`` is ``trusted``, ``unknown``, ``unsigned`` or ``unchecked``."""

    trust: str
    signers: tuple[str, ...] = ()
    warning: str | None = None


def new_key() -> bytes:
    """A new private key, as PEM."""
    return Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def load_key(pem: bytes) -> Ed25519PrivateKey:
    """A private key from PEM. Raises BadInput."""
    try:
        key = serialization.load_pem_private_key(pem, None)
    except (ValueError, TypeError) as error:
        raise BadInput("the key file is not a private key in PEM without a password") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise BadInput("the key is not an ed25519 key", hint="make one: forkd hub keygen")
    return key


def public_hex(key: Ed25519PrivateKey) -> str:
    """The public key in hexadecimal: how keys are named."""
    return key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw).hex()


def split(document: bytes) -> tuple[bytes, list[Signature]]:
    """A manifest file as its body and its signatures. Raises PackError if lines at the end are malformed."""
    at = 0 if document.startswith(_MARK) else document.find(b"\n" + _MARK) + 1
    if at == 0 and not document.startswith(_MARK):
        return document, []
    body, lines = document[:at], document[at:].split(b"\n")
    if lines.pop() != b"" or len(lines) > MAX_SIGNATURES:
        raise PackError(f"the manifest's signatures are malformed or more than {MAX_SIGNATURES}")
    found = [_LINE.fullmatch(line) for line in lines]
    signatures = [Signature(match[1].decode(), match[2].decode()) for match in found if match]
    if len(signatures) < len(lines) or len({signature.key for signature in signatures}) < len(lines):
        raise PackError("the manifest's signatures are malformed, or two are by one key")
    return body, signatures


def sign(document: bytes, key: Ed25519PrivateKey) -> bytes:
    """The manifest file with one more signature; one by the same key is replaced."""
    body, signatures = split(document)
    kept = [signature for signature in signatures if signature.key != public_hex(key)]
    made = Signature(public_hex(key), key.sign(_CONTEXT + body).hex())
    lines = b"".join(f"#: ed25519 {one.key} {one.value}\n".encode() for one in [*kept, made])
    split(body + lines)  # refuses one too many
    return body + lines


def judge(body: bytes, signatures: list[Signature], trusted: Mapping[str, str], policy: str) -> Verdict:
    """What signatures over ``body`` are worth; ``trusted`` has names by public key. Raises TrustError.

    A signature that does not fit is refused unless the policy is ``off``; one by nobody we know only under ``require``.
    """
    if policy not in POLICIES:
        raise BadInput(f"there is no trust policy {policy!r}", hint="use off, warn or require")
    if policy == "off":
        return Verdict("unchecked")
    for signature in signatures:
        try:
            Ed25519PublicKey.from_public_bytes(bytes.fromhex(signature.key)).verify(
                bytes.fromhex(signature.value), _CONTEXT + body
            )
        except (InvalidSignature, ValueError) as error:
            raise TrustError(
                f"the signature by {signature.key[:16]}… does not fit the manifest",
                hint="the pack was altered after it was signed; get it from its maker again",
            ) from error
    names = tuple(trusted[signature.key] for signature in signatures if signature.key in trusted)
    if names:
        return Verdict("trusted", names)
    keys = tuple(signature.key for signature in signatures)
    said = f"signed by {', '.join(key[:16] + '…' for key in keys)}, unknown here" if keys else "not signed"
    if policy == "require":
        hint = (
            f"if you trust its maker: forkd hub trust NAME {keys[0]}" if keys else "only signed packs are allowed here"
        )
        raise TrustError(f"the pack is {said}", hint=hint)
    return Verdict("unknown" if keys else "unsigned", keys, f"the pack is {said}")


def parse_trusted(text: str) -> dict[str, str]:
    """The trusted-keys file: names by public key, one ``ed25519 KEY NAME`` a line. Raises TrustError."""
    keys: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _KEY.fullmatch(line.strip())
        if match is None or match[2] is None:
            raise TrustError(f"line {number} of the trusted-keys file is not 'ed25519 KEY NAME'")
        keys[match[1]] = match[2]
    return keys


def format_trusted(keys: Mapping[str, str]) -> str:
    """The trusted-keys file."""
    return "".join(f"ed25519 {key} {check_tag(name, 'key name')}\n" for key, name in sorted(keys.items()))


def parse_public(text: str) -> str:
    """A public key as people write it: hexadecimal digits, or a line of the trusted-keys file. Raises BadInput."""
    match = _KEY.fullmatch(text.strip())
    if match is None:
        raise BadInput(f"{text.strip()[:40]!r} is not a public key", hint="give 64 hexadecimal digits")
    return match[1]
