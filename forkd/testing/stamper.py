"""The program a StampingMachine runs: ``stamper IMAGE BYTES`` counts, and stamps one page after the other."""

from __future__ import annotations

import mmap
import os
import sys

PAGE = 4096


def main(image: str, stamped: int) -> None:
    """Map ``image`` privately, say that it is ready, and stamp until killed."""
    descriptor = os.open(image, os.O_RDWR)
    ram = mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE)
    words = memoryview(ram).cast("Q")  # one store a stamp: struct.pack_into would write zeros first
    print("ready", flush=True)
    count = 0
    while True:
        count += 1
        for offset in range(0, stamped // 8, PAGE // 8):
            words[offset] = count


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
