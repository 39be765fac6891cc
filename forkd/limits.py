"""A sandbox's limits: read from its description, applied to its control group, and named when they are hit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from forkd.linux import cgroup
from forkd.linux.hostprobe import HostProbe
from forkd.specs.errors import BadInput, LimitRefused
from forkd.specs.models import SandboxInfo

MIB = 1 << 20
MIN_MEMORY_MIB = 16
MIN_CPUS = 0.01
MIN_PIDS = 16
"""A VMM is a handful of threads; fewer would break it rather than bound it."""
FIELDS = {"memory": "memory_limit_mib", "cpu": "cpu_limit", "pids": "pids_limit", "io": "io_limit_mibps"}


def check_limits(info: SandboxInfo) -> None:
    """Raise BadInput for a limit no machine could live with."""
    for controller, least in (("memory", MIN_MEMORY_MIB), ("cpu", MIN_CPUS), ("pids", MIN_PIDS), ("io", 1)):
        value = getattr(info, FIELDS[controller])
        if value is not None and not least <= value < float("inf"):
            raise BadInput(f"{FIELDS[controller]} is {value}", hint=f"give {least} or more")


def amounts(info: SandboxInfo) -> cgroup.Amounts:
    """The limits in the kernel's units."""
    memory, io = info.memory_limit_mib, info.io_limit_mibps
    return cgroup.Amounts(
        memory=None if memory is None else memory * MIB,
        cpu=info.cpu_limit,
        pids=info.pids_limit,
        io=None if io is None else io * MIB,
    )


class Limiter:
    """The control groups of one owner's machines."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._table: dict[str, cgroup.Hierarchy] | None = None
        self._groups: dict[str, cgroup.Group] = {}

    def apply(self, info: SandboxInfo, pid: int | None = None, *, lenient: bool = False) -> None:
        """Give the sandbox the limits it is described with; ``pid`` is its machine, if it runs already.

        What cannot be applied raises LimitRefused, or is a warning if the sandbox is ``best_effort`` or this call
        ``lenient``.
        """
        wanted = amounts(info)
        if info.id not in self._groups and not wanted.wanted():
            return
        check_limits(info)
        group = self._groups.setdefault(info.id, cgroup.Group(info.id, self.table(), self._disks))
        failed = group.apply(wanted)
        if pid is not None:
            self.admit(info.id)(pid)  # before anything is refused: the limits that are not must hold
        if failed and not (lenient or info.best_effort):
            limits = ", ".join(f"{FIELDS[name]}: {why}" for name, why in failed.items())
            raise LimitRefused(
                f"a limit cannot be applied: {limits}",
                hint="forkd doctor says what is missing; with best_effort it is a warning",
                refused=[FIELDS[name] for name in failed],
            )
        for name, why in failed.items():
            warning = f"{FIELDS[name]} is not applied: {why}"
            if warning not in info.warnings:
                info.warnings.append(warning)

    def admit(self, sandbox_id: str) -> Callable[[int], None]:
        """What puts a machine into its group; does nothing for one without limits."""

        def into(pid: int) -> None:
            if (group := self._groups.get(sandbox_id)) is not None:
                try:
                    group.admit(pid)
                except OSError as error:
                    raise LimitRefused(
                        f"VMM {pid} cannot be put under its limits: {error.strerror}", refused=list(FIELDS.values())
                    ) from error

        return into

    def limited(self, sandbox_id: str) -> bool:
        """Whether ``admit`` has a group to put its machine into."""
        return sandbox_id in self._groups

    def hits(self, sandbox_id: str) -> list[str]:
        """The limits that have held the sandbox back so far, by field name."""
        group = self._groups.get(sandbox_id)
        return [] if group is None else [FIELDS[name] for name in group.hits()]

    def ran_out(self, info: SandboxInfo) -> str | None:
        """The sentence for a machine that was ended by its memory limit."""
        group = self._groups.get(info.id)
        if group is None or not group.oom_kills():
            return None
        return f"out of memory: it reached its memory_limit_mib of {info.memory_limit_mib}"

    def release(self, sandbox_id: str) -> None:
        """Remove the group of a machine that is gone."""
        if (group := self._groups.pop(sandbox_id, None)) is not None:
            group.remove()

    def leftovers(self) -> list[Path]:
        """Empty groups that belong to no slot of any owner."""
        slots = {path.name for path in self._run_dir.glob("*/*")}
        return [path for path in cgroup.leftovers(self.table()) if path.name not in slots]

    def table(self) -> dict[str, cgroup.Hierarchy]:
        """Which hierarchy has which controller; looked up once."""
        if self._table is None:
            self._table = cgroup.homes(cgroup.hierarchies(HostProbe().read))
        return self._table

    def _disks(self) -> list[str]:
        return cgroup.block_device(self._run_dir)
