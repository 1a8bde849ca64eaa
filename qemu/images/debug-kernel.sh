#!/bin/bash
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
#
# debug-kernel.sh BASE TREE
#
# Makes TREE: BASE (see build-root.sh; of trixie), with another guest kernel beside the others: the suite's source with
# debug.config, which has the kernel's checkers of locks, memory and leaks. Goes on with a TREE that was begun. In it,
# kernel.sh and the modules' build.sh do for this kernel what they do for the others; it is slow where there is no KVM.
# A mirror may stand still for longer than a Release file is valid: its signature is what counts.
# Needs root, 4 GB of disk, and most of an hour on 2 cores.
set -euo pipefail
base=$1 tree=$2

# Runs inside the new tree.
second_stage() {
    apt() {
        DEBIAN_FRONTEND=noninteractive apt-get -q -o APT::Install-Recommends=false \
            -o Acquire::Check-Valid-Until=false -o APT::Sandbox::User=root "$@" </dev/null
    }
    apt update
    apt install -y bc bison flex linux-source-6.12
    cd /usr/src
    if ! [ -e linux-source-6.12/.config ]; then tar xf linux-source-6.12.tar.xz; fi
    cd linux-source-6.12

    KCONFIG_ALLCONFIG=/usr/src/debug.config make -s allnoconfig
    # A setting whose dependencies are not there is dropped without a word.
    while read -r line; do
        if ! grep -qxF -- "$line" .config; then
            echo "debug-kernel.sh: not in the configuration: $line" >&2
            exit 1
        fi
    done < <(grep -E '^CONFIG_|^# CONFIG_' /usr/src/debug.config)
    make -s -j "$(nproc)" bzImage modules
    release=$(make -s kernelrelease)
    make -s INSTALL_MOD_STRIP=1 modules_install
    cp arch/x86/boot/bzImage "/usr/lib/modules/$release/vmlinuz"
    ln -sfn "$PWD" "/usr/src/linux-headers-$release"
    echo "$release" >/etc/virtio-rdma/debug
}

if [ "${SECOND_STAGE:-}" = yes ]; then
    second_stage
    exit
fi

if ! [ -e "$tree" ]; then cp -a "$base" "$tree"; fi
cp -L /etc/resolv.conf "$tree/etc/resolv.conf"
here=$(cd "$(dirname "$0")" && pwd)
cp "$here/debug.config" "$here/debug-kernel.sh" "$tree/usr/src/"
unshare --mount --propagation private -- sh -ec '
    mount -t proc proc "$1/proc"
    mount --rbind /dev "$1/dev"
    exec chroot "$1" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp LC_ALL=C.UTF-8 SECOND_STAGE=yes \
        bash /usr/src/debug-kernel.sh - -' sh "$tree"
