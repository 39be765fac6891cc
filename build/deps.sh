#!/bin/sh
# Checks for the programs forkd needs and installs them where it may; says exactly what is missing where it may not.
set -eu

need=""
want() { command -v "$1" >/dev/null 2>&1 || need="$need $2"; }
want qemu-system-x86_64 qemu-system-x86
want mmdebstrap mmdebstrap
want mkfs.ext4 e2fsprogs
want dpkg-deb dpkg
want setpriv util-linux
want ip iproute2
want nft nftables
want docker-registry docker-registry
want objdump binutils
PATH="$PATH:/usr/sbin" want nginx nginx-light
want zstd zstd
${PYTHON:-python3} -c 'import ensurepip' 2>/dev/null || need="$need python3-venv"
${PYTHON:-python3} -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "forkd needs Python 3.11 or newer; ${PYTHON:-python3} is $(${PYTHON:-python3} -V)" >&2
    exit 1
}
# The binary carries Python's shared library, which Debian packages apart from the interpreter.
${PYTHON:-python3} -c 'import sysconfig, ctypes as c; c.CDLL(sysconfig.get_config_var("INSTSONAME"))' 2>/dev/null ||
    need="$need libpython$(${PYTHON:-python3} -c 'import sys; print("%d.%d" % sys.version_info[:2])')"

[ -n "$need" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "forkd needs these packages:$need" >&2
    echo "install them, for example: sudo apt-get install --no-install-recommends$need" >&2
    exit 1
fi
echo "==> installing$need" >&2
export DEBIAN_FRONTEND=noninteractive
apt-get -qq update
# shellcheck disable=SC2086  # a list of package names
# RUNLEVEL=1: servers that come with it, which tests run themselves, are not started on the host.
RUNLEVEL=1 apt-get -qq install --no-install-recommends -y $need >/dev/null
