#!/bin/bash
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
#
# root.sh IMAGE MIRROR SUITE
#
# Makes IMAGE, the ext4 root file system of all guests of a Debian suite (trixie, sid): rdma-core, its tools, perftest
# and pyverbs, iperf3 to measure TCP with, and the few scripts of guest/. No kernel and no modules (see kernel.sh),
# nothing of this project's RDMA stack (that comes through a share at boot). It is mounted read-only, so all VMs share it.
# A mirror may stand still for longer than a Release file is valid: its signature is what counts.
# Needs root, mmdebstrap and mke2fs.
set -euo pipefail
image=$1 mirror=$2 suite=$3
here=$(cd "$(dirname "$0")" && pwd)
tree=$image.tree
sources=("deb $mirror $suite main")
if [ "$suite" != sid ]; then sources+=("deb $mirror $suite-updates main"); fi

mmdebstrap --quiet --mode=root --variant=apt --components=main \
    --aptopt='APT::Install-Recommends "false"' \
    --aptopt='Acquire::Check-Valid-Until "false"' \
    --dpkgopt='path-exclude=/usr/share/man/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' \
    --dpkgopt='path-exclude=/usr/share/doc/*' \
    --dpkgopt='path-include=/usr/share/doc/rdma-core' --dpkgopt='path-include=/usr/share/doc/rdma-core/*' \
    --include=rdma-core,ibverbs-utils,ibverbs-providers,rdmacm-utils,perftest,iperf3,python3-pyverbs,iproute2,iputils-ping,kmod,mount,pciutils,strace,procps,busybox-static \
    "$suite" "$tree" "${sources[@]}"

rm -rf "$tree"/var/cache/* "$tree"/var/lib/apt/lists "$tree"/boot "$tree"/usr/share/info
mkdir -p "$tree"/usr/lib/modules "$tree"/payload "$tree"/exchange "$tree"/lib/virtio-rdma
cp "$here"/guest/{start,agent,shell} "$tree"/lib/virtio-rdma/
chmod 755 "$tree"/lib/virtio-rdma/*
cp "$here"/guest/inittab "$tree"/etc/inittab
ln -sf /usr/bin/busybox "$tree"/sbin/init
# Compiled once here rather than at every boot: the root is read-only and its overlay starts empty.
chroot "$tree" python3 -m compileall -q /usr/lib/python3 /usr/lib/python3.* >/dev/null || true

size=$(du -sm --apparent-size "$tree" | cut -f1)
mke2fs -q -t ext4 -O ^has_journal -m 0 -L guest-root -d "$tree" "$image" "$((size * 5 / 4 + 32))M"
rm -rf "$tree"
