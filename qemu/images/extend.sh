#!/bin/bash
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
#
# extend.sh BASE IMAGE MIRROR SUITE PACKAGE...
#
# Makes IMAGE, the root file system of guests that have more software than all others: BASE (see root.sh) and some packages.
# An image of its own, so that those of all others stay as small as they are.
# A mirror may stand still for longer than a Release file is valid: its signature is what counts.
# Needs root, debugfs and mke2fs.
set -euo pipefail
base=$1 image=$2 mirror=$3 suite=$4
shift 4
tree=$image.tree

mkdir "$tree"
# It says its version and that it cannot set the owner of lost+found.
debugfs -R "rdump / $tree" "$base" 2>/dev/null
rmdir "$tree"/lost+found
sources=("deb $mirror $suite main")
if [ "$suite" != sid ]; then sources+=("deb $mirror $suite-updates main"); fi
printf '%s\n' "${sources[@]}" >"$tree"/etc/apt/sources.list
cp -L /etc/resolv.conf "$tree"/etc/resolv.conf

# A regular file in its place would keep what was written to it, and packages make copies of /dev/null.
[ -c "$tree"/dev/null ] || mknod -m 666 "$tree"/dev/null c 1 3
# Nothing is to be started here.
printf '#!/bin/sh\nexit 101\n' >"$tree"/usr/sbin/policy-rc.d
chmod 755 "$tree"/usr/sbin/policy-rc.d
apt() {
    chroot "$tree" env DEBIAN_FRONTEND=noninteractive apt-get -q -o APT::Install-Recommends=false \
        -o Acquire::Check-Valid-Until=false -o APT::Sandbox::User=root \
        -o DPkg::Options::=--path-exclude='/usr/share/man/*' -o DPkg::Options::=--path-exclude='/usr/share/locale/*' \
        -o DPkg::Options::=--path-exclude='/usr/share/doc/*' "$@" </dev/null
}
apt update
apt install -y "$@"
# Some bring systemd.
ln -sf /usr/bin/busybox "$tree"/sbin/init
rm -rf "$tree"/var/cache/* "$tree"/var/lib/apt/lists/* "$tree"/usr/share/info "$tree"/usr/sbin/policy-rc.d

size=$(du -sm --apparent-size "$tree" | cut -f1)
mke2fs -q -t ext4 -O ^has_journal -m 0 -L guest-root -d "$tree" "$image" "$((size * 5 / 4 + 32))M"
rm -rf "$tree"
