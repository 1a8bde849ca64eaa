#!/bin/bash
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
#
# build-root.sh TREE MIRROR SUITE
#
# Makes TREE, a root of a Debian suite (trixie, sid) in which the kernel module is compiled: gcc, rustc with rust-src,
# bindgen, and the headers of the suite's guest kernels. Those are the suite's own, and with trixie also the one of
# trixie-backports: the module uses no Rust metadata of the kernel, so trixie's rustc does for the newer kernel as well.
# The kernels themselves are there too, so that the kernel that boots is always the one whose headers were compiled
# against.
# A mirror may stand still for longer than a Release file is valid: its signature is what counts.
# Needs root and mmdebstrap.
set -euo pipefail
tree=$1 mirror=${2:-} suite=${3:-}

# Runs inside the new tree, after the packages are in.
second_stage() {
    chroot "$1" /bin/sh -eu -s "$2" <<'INSIDE'
suite=$1
export DEBIAN_FRONTEND=noninteractive INITRD=No

# kernel VERSION RELEASE: puts a kernel and its modules beside its headers. Some headers depend on the package of the
# kernel and have brought it; others do not, and that package wants an initramfs generator: its parts are all we need.
kernel() {
    modules=/usr/lib/modules/$2
    if [ -e "/boot/vmlinuz-$2" ]; then
        mv "/boot/vmlinuz-$2" "$modules/vmlinuz"
        return
    fi
    mkdir /tmp/kernel
    cd /tmp/kernel
    for part in "linux-image-$2" "linux-binary-$2" "linux-modules-$2"; do
        if apt-cache show "$part" >/dev/null 2>&1; then apt-get download -q "$part=$1"; fi
    done
    for deb in *.deb; do dpkg-deb -x "$deb" tree; done
    for from in tree/usr/lib/modules/"$2" tree/lib/modules/"$2"; do
        if [ -d "$from" ]; then cp -a "$from/." "$modules/"; fi
    done
    if [ -e "tree/boot/vmlinuz-$2" ]; then cp "tree/boot/vmlinuz-$2" "$modules/vmlinuz"; fi
    depmod "$2"
    cd /
    rm -rf /tmp/kernel
}

mkdir -p /etc/virtio-rdma /src /out
own=$(ls /usr/src | sed -n 's/^linux-headers-\(.*-amd64\)$/\1/p' | head -n 1)
kernel "$(dpkg-query -W -f '${Version}' "linux-headers-$own")" "$own"
echo "$own" >"/etc/virtio-rdma/$suite"
if [ "$suite" = trixie ]; then
    new=$(apt-cache madison linux-headers-amd64 | awk '$3 !~ /~bpo/ { next } { print $3; exit }')
    release=$(apt-cache show "linux-headers-amd64=$new" | grep -o 'linux-headers-[0-9][^ ,]*' | head -n 1)
    release=${release#linux-headers-}
    apt-get install -q -y -t trixie-backports "linux-headers-$release" </dev/null
    kernel "$new" "$release"
    echo "$release" >/etc/virtio-rdma/backports
fi
rm -rf /boot/* /var/cache/apt /var/lib/apt/lists
INSIDE
}

if [ "${SECOND_STAGE:-}" = yes ]; then
    second_stage "$1" "$suite"
    exit
fi

sources=("deb $mirror $suite main")
if [ "$suite" != sid ]; then sources+=("deb $mirror $suite-updates main" "deb $mirror $suite-backports main"); fi

export INITRD=No
mmdebstrap --quiet --mode=root --variant=apt --components=main \
    --aptopt='APT::Install-Recommends "false"' \
    --aptopt='Acquire::Check-Valid-Until "false"' \
    --dpkgopt='path-exclude=/usr/share/doc/*' \
    --dpkgopt='path-exclude=/usr/share/man/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' \
    --dpkgopt='path-exclude=/usr/lib/llvm-*/lib/*.a' \
    --dpkgopt='path-exclude=/usr/src/rustc-*/src/doc/*' \
    --dpkgopt='path-exclude=/usr/src/rustc-*/src/tools/*' \
    --dpkgopt='path-exclude=/usr/src/rustc-*/compiler/*' \
    --include=gcc,make,libc6-dev,rustc,rust-src,bindgen,binutils,kmod,libelf-dev,python3-minimal,xz-utils,cpio,e2fsprogs,busybox-static,linux-headers-amd64 \
    --skip=cleanup/apt,cleanup/reproducible \
    --customize-hook="SECOND_STAGE=yes bash '$0' \"\$1\" '' '$suite'" \
    "$suite" "$tree" "${sources[@]}"
