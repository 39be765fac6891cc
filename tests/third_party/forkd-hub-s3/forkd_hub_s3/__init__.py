"""Hub transport ``s3``: any S3-compatible store as a registry, as ``s3://BUCKET/PREFIX``.

Says who it is by AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or by a login with user and password), and finds the
store by AWS_REGION and AWS_ENDPOINT_URL, as every S3 tool does.
"""

from __future__ import annotations

from collections.abc import Callable

from forkd.specs.hookspecs import hookimpl
from forkd.specs.transport import HubTransport

__version__ = "0.1.0"
forkd_contract = 1


@hookimpl
def forkd_register_hub_transports(register: Callable[[HubTransport], None]) -> None:
    """Hand over the transport; httpx is imported when it is first used."""
    from forkd_hub_s3.transport import S3Transport

    register(S3Transport())
