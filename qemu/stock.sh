#!/bin/bash
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
#
# stock.sh DIRECTORY MIRROR
#
# Makes DIRECTORY/qemu-system-x86_64, the QEMU of trixie-backports as Debian has built it, for hosts whose own is older than
# 10.1 and knows no vfio-user-pci: its packages, unpacked beside their libraries, and a script that starts it with these.
# A mirror may stand still for longer than a Release file is valid: its signature is what counts.
# Needs root, mmdebstrap and 0.3 GB of disk.
set -euo pipefail
directory=$1 mirror=$2
tree=$directory/tree

mmdebstrap --quiet --mode=root --variant=extract --components=main \
    --aptopt='APT::Install-Recommends "false"' \
    --aptopt='APT::Default-Release "trixie-backports"' \
    --aptopt='Acquire::Check-Valid-Until "false"' \
    --include=qemu-system-x86,qemu-system-data,seabios \
    trixie "$tree" "deb $mirror trixie main" "deb $mirror trixie-backports main"
rm -rf "$tree"/dev "$tree"/var "$tree"/usr/share/doc "$tree"/usr/share/man "$tree"/usr/share/locale

# The directory is renamed when it is complete.
cat >"$directory/qemu-system-x86_64" <<'SCRIPT'
#!/bin/sh
tree=$(dirname "$(readlink -f "$0")")/tree
libraries=$tree/usr/lib/x86_64-linux-gnu
export QEMU_MODULE_DIR="$libraries/qemu"
exec "$libraries/ld-linux-x86-64.so.2" --library-path "$libraries" "$tree/usr/bin/qemu-system-x86_64" \
    -L "$tree/usr/share/qemu" -L "$tree/usr/share/seabios" "$@"
SCRIPT
chmod +x "$directory/qemu-system-x86_64"
"$directory/qemu-system-x86_64" -device vfio-user-pci,help >/dev/null
