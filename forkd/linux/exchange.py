"""Two names of one file system change places, with nothing in between that anybody could see."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def exchange(one: Path, other: Path) -> bool:
    """Swap what two paths name; False where the file system cannot. Raises OSError, as rename does."""
    libc = ctypes.CDLL(None, use_errno=True)
    # SAFETY: the kernel reads two strings of ours, which live until the call returns.
    if libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS):
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))
