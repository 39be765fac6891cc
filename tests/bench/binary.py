"""How large dist/forkd is and how quickly it starts, as ratios to `python -c pass` in the same run."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
BINARY = str(ROOT / "dist" / "forkd")
SOURCE = [sys.executable, "-m", "forkd"]
RUNS = 11


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as folder:
        env = {"PATH": os.environ["PATH"], "FORKD_DATA_DIR": folder, "HOME": folder}
        with open(f"{folder}/log", "wb") as log:
            daemon = subprocess.Popen([BINARY, "daemon", "--bind", "none"], env=env, stderr=log)
        while "stop it with" not in Path(f"{folder}/log").read_text():
            time.sleep(0.05)
        try:
            base = median([sys.executable, "-c", "pass"], env)
            print(f"size of dist/forkd      {os.path.getsize(BINARY) / 1e6:6.1f} MB")
            print(f"python -c pass          {base * 1000:6.0f} ms")
            for name, command in (
                ("forkd --version", [BINARY, "--version"]),
                ("forkd ls (a daemon)", [BINARY, "ls"]),
                ("source: --version", [*SOURCE, "--version"]),
                ("source: --help", [*SOURCE, "--help"]),
                ("source: ls (a daemon)", [*SOURCE, "ls"]),
            ):
                took = median(command, env)
                print(f"{name:<24}{took * 1000:6.0f} ms {took / base:6.1f} times")
        finally:
            daemon.terminate()
            daemon.wait()


def median(command: list[str], env: dict[str, str]) -> float:
    """Seconds of wall clock."""
    times = []
    for _ in range(RUNS):
        began = time.perf_counter()
        subprocess.run(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True, cwd=ROOT)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


if __name__ == "__main__":
    main()
