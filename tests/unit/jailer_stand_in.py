"""A stand-in for Firecracker's jailer: a mount namespace, a new root, another user, then the program, in one process.

As the real one it is run as root with `--id`, `--exec-file`, `--uid`, `--gid`, `--chroot-base-dir`, and what comes
behind `--` is the program's. Directories the stand-in for Firecracker needs to run at all are mounted into the root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

NEEDED = ("usr", "bin", "lib", "lib64", Path(__file__).resolve().parts[1])


def main() -> None:
    split = sys.argv.index("--")
    options = dict(zip(sys.argv[1:split:2], sys.argv[2:split:2], strict=True))
    program = Path(options["--exec-file"]).resolve()
    root = Path(options["--chroot-base-dir"], program.name, options["--id"], "root")
    if os.environ.get("STAND_IN") != "inside":
        os.environ["STAND_IN"] = "inside"
        os.execvp("unshare", ["unshare", "--mount", "--propagation", "private", sys.executable, *sys.argv])
    root.mkdir(parents=True, exist_ok=True)
    shutil.copy(program, root / program.name)
    mount("--bind", root, root)
    for name in NEEDED:
        if Path("/", name).is_dir():
            (root / name).mkdir()
            mount("--rbind", Path("/", name), root / name)
    (root / "old").mkdir()
    os.chown(root, int(options["--uid"]), int(options["--gid"]))
    os.chdir(root)
    subprocess.run(["pivot_root", ".", "old"], check=True)
    os.chdir("/")
    os.setgroups([])
    os.setgid(int(options["--gid"]))
    os.setuid(int(options["--uid"]))
    os.execv(f"/{program.name}", [program.name, "--id", options["--id"], *sys.argv[split + 1 :]])


def mount(how: str, source: Path, target: Path) -> None:
    subprocess.run(["mount", how, source, target], check=True)


if __name__ == "__main__":
    main()
