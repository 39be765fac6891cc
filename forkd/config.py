"""Flags, environment and TOML into one frozen Settings value; all directory names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

DEFAULT_URL = "http://127.0.0.1:8889"
MAX_CHILDREN = 1000
MAX_VCPUS = 8
MAX_VOLUMES = 21
"""A machine has 24 places for devices; rootfs, agent and network take three."""
MIN_MEM_MIB = 64
MAX_MEM_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Settings:
    """What forkd runs with. Directories are made when first used, never here."""

    data_dir: Path
    engine: str = "auto"
    accel: str = "auto"
    kernel: Path | None = None
    start_limit: int = 8
    boot_timeout: float = 120.0
    image_cache_bytes: int = 8 << 30
    branch_concurrency: int = 0
    spawn: str = "auto"
    template_count: int = 4
    template_mib: int = 2048
    template_idle_secs: float = 600.0
    template_warmup: int = 20
    pool_idle_secs: float = 3600.0
    blob_cache_bytes: int = 4 << 30
    hub_url: str | None = None
    hub_token: str | None = field(default=None, repr=False)
    low_water_bytes: int | None = None
    """Free space below which no snapshot is begun; the smaller of 1 GiB and 2 % of the disk if None."""
    trust: str = "warn"
    plugins: Path | None = None
    disabled_plugins: tuple[str, ...] = ()
    jail: str = ""
    """The number of the user Firecracker runs as, in a jail of its own; none if empty."""
    vmm_users: str = "auto"
    """Whether each QEMU runs as a user of its own: auto (where forkd is root and may), off, or a range FIRST-LAST."""
    dns: str | None = None
    """The nameserver guests' questions are passed to; the host's own if None."""

    @property
    def plugin_dir(self) -> Path:
        """Foreign plugins, a file or a package each; nobody else may be able to write there."""
        return self.plugins or self.data_dir / "plugins"

    @property
    def snapshots_dir(self) -> Path:
        """Where snapshots live, one directory a tag."""
        return self.data_dir / "snapshots"

    @property
    def images_dir(self) -> Path:
        """Materialised memory images of chains."""
        return self.data_dir / "images"

    @property
    def rootfs_dir(self) -> Path:
        """Read-only disks, by content."""
        return self.data_dir / "rootfs"

    @property
    def cache_dir(self) -> Path:
        """Small facts worth remembering, all of them expendable."""
        return self.data_dir / "cache"

    @property
    def hub_dir(self) -> Path:
        """Keys, logins and trusted keys."""
        return self.data_dir / "hub"

    @property
    def blobs_dir(self) -> Path:
        """Compressed files on their way to or from registries; expendable."""
        return self.data_dir / "blobs"

    @property
    def kept_dir(self) -> Path:
        """Work directories of sandboxes that have ended, kept because somebody asked for it."""
        return self.data_dir / "kept"

    @property
    def run_dir(self) -> Path:
        """One directory for each forkd process that owns machines, one below it for each machine."""
        return self.data_dir / "run"

    @property
    def inventory(self) -> Path:
        """What the daemon runs."""
        return self.data_dir / "inventory.db"

    @property
    def socket(self) -> Path:
        """Where the daemon listens for commands of its own user."""
        return self.data_dir / "forkd.sock"


def load_settings(environ: Mapping[str, str] | None = None, **overrides: object) -> Settings:
    """Settings from the environment; keyword arguments that are not None win."""
    env = os.environ if environ is None else environ
    values: dict[str, object] = {"data_dir": _data_dir(env)}
    if kernel := env.get("FORKD_KERNEL"):
        values["kernel"] = Path(kernel)
    words = {
        "engine": "FORKD_ENGINE",
        "accel": "FORKD_ACCEL",
        "spawn": "FORKD_SPAWN",
        "dns": "FORKD_DNS",
        "hub_url": "FORKD_HUB_URL",
        "hub_token": "FORKD_HUB_TOKEN",
        "trust": "FORKD_HUB_TRUST",
        "jail": "FORKD_JAIL",
        "vmm_users": "FORKD_VMM_USERS",
    }
    for key, name in words.items():
        if value := env.get(name):
            values[key] = value
    if plugins := env.get("FORKD_PLUGIN_DIR"):
        values["plugins"] = Path(plugins).absolute()
    if disabled := env.get("FORKD_DISABLE_PLUGINS"):
        values["disabled_plugins"] = tuple(name.strip() for name in disabled.split(",") if name.strip())
    values.update({key: value for key, value in overrides.items() if value is not None})
    return Settings(**values)  # type: ignore[arg-type]


def _data_dir(env: Mapping[str, str]) -> Path:
    if explicit := env.get("FORKD_DATA_DIR"):
        return Path(explicit).absolute()
    base = env.get("XDG_DATA_HOME") or os.path.join(env.get("HOME") or "/tmp", ".local/share")
    return Path(base).absolute() / "forkd"
