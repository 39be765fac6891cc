#!/bin/sh
# Installs forkd, checked against its SHA256SUMS: from a directory (dist/) or a URL that has both.
#   sh packaging/install.sh [--prefix DIR] [--unit] [FROM]
# FROM defaults to the directory dist beside this script's; DIR to /usr/local. With --unit also the systemd unit.
set -eu

prefix=/usr/local
unit=
from=
while [ $# -gt 0 ]; do
    case $1 in
        --prefix) prefix=${2:?--prefix needs a directory}; shift 2 ;;
        --unit) unit=yes; shift ;;
        -h | --help) sed -n '2,4s/^# //p' "$0"; exit 0 ;;
        -*) echo "install.sh: there is no option $1" >&2; exit 2 ;;
        *) from=$1; shift ;;
    esac
done
here=$(cd "$(dirname "$0")" && pwd)
from=${from:-$here/../dist}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fetch() {
    case $from in
        http://* | https://*)
            if command -v curl >/dev/null 2>&1; then
                curl --fail --silent --show-error --location --output "$work/$1" "${from%/}/$1"
            else
                wget --quiet --output-document "$work/$1" "${from%/}/$1"
            fi ;;
        *) cp "${from%/}/$1" "$work/$1" ;;
    esac
}

fetch SHA256SUMS
fetch forkd
grep ' \*\{0,1\}forkd$' "$work/SHA256SUMS" >"$work/wanted" || {
    echo "install.sh: SHA256SUMS at $from does not name forkd; nothing was installed" >&2
    exit 1
}
(cd "$work" && sha256sum --check --quiet --strict wanted) || {
    echo "install.sh: forkd from $from is not what SHA256SUMS says; nothing was installed" >&2
    exit 1
}

install -d "$prefix/bin" "$prefix/share/man/man1" "$prefix/share/bash-completion/completions"
install -m 755 "$work/forkd" "$prefix/bin/.forkd.new"
"$prefix/bin/.forkd.new" --version >"$work/version" || {
    rm -f "$prefix/bin/.forkd.new"
    echo "install.sh: the binary does not run on this machine; nothing was installed" >&2
    exit 1
}
mv "$prefix/bin/.forkd.new" "$prefix/bin/forkd"
[ ! -f "$here/forkd.1" ] || install -m 644 "$here/forkd.1" "$prefix/share/man/man1/forkd.1"
"$prefix/bin/forkd" completion bash >"$prefix/share/bash-completion/completions/forkd"
if [ -n "$unit" ]; then
    sed "s|/usr/local/bin/forkd|$prefix/bin/forkd|" "$here/forkd.service" >"$work/forkd.service"
    install -D -m 644 "$work/forkd.service" "${UNIT_DIR:-/etc/systemd/system}/forkd.service"
    echo "next: systemctl daemon-reload && systemctl enable --now forkd"
fi
head -n 1 "$work/version"
echo "next: forkd doctor && forkd quickstart"
