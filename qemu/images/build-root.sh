#!/bin/bash
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
#
# build-root.sh TREE MIRROR
#
# Makes TREE, a Debian 13 root in which the kernel module is compiled: gcc, rustc with rust-src, bindgen, and the
# headers of both guest kernels (Debian 13's own and the one of trixie-backports). The kernels themselves are there
# too, so that the kernel that boots is always the one whose headers were compiled against. One tree serves both: the
# module uses no Rust metadata of the kernel, so trixie's rustc does for the newer kernel as well.
# Needs root and mmdebstrap.
set -euo pipefail
tree=$1 mirror=${2:-}

# Runs inside the new tree, after the packages are in.
second_stage() {
    local root=$1
    chroot "$root" /bin/sh -eu <<'INSIDE'
export DEBIAN_FRONTEND=noninteractive INITRD=No
new=$(apt-cache madison linux-headers-amd64 | awk '$3 !~ /~bpo/ { next } { print $3; exit }')
kver=$(apt-cache show "linux-headers-amd64=$new" | grep -o 'linux-headers-[0-9][^ ,]*' | head -n 1)
kver=${kver#linux-headers-}
apt-get install -q -y -t trixie-backports "linux-headers-$kver"
old=$(ls /usr/src | sed -n 's/^linux-headers-\(.*-amd64\)$/\1/p' | grep -vxF "$kver" | head -n 1)
# The image package of the newer kernel pulls in an initramfs generator; its parts are all we need.
mkdir /tmp/kernel
cd /tmp/kernel
for part in "linux-image-$kver" "linux-binary-$kver" "linux-modules-$kver"; do
    if apt-cache show "$part" >/dev/null 2>&1; then apt-get download -q "$part=$new"; fi
done
for deb in *.deb; do dpkg-deb -x "$deb" tree; done
for from in tree/usr/lib/modules/"$kver" tree/lib/modules/"$kver"; do
    if [ -d "$from" ]; then cp -a "$from/." "/usr/lib/modules/$kver/"; fi
done
if [ -e "tree/boot/vmlinuz-$kver" ]; then cp "tree/boot/vmlinuz-$kver" "/usr/lib/modules/$kver/vmlinuz"; fi
ln -sf "/boot/vmlinuz-$old" "/usr/lib/modules/$old/vmlinuz"
depmod "$kver"
cd /
rm -rf /tmp/kernel /boot/initrd.img-* /var/cache/apt /var/lib/apt/lists
mkdir -p /etc/virtio-rdma /src /out
echo "$old" >/etc/virtio-rdma/trixie
echo "$kver" >/etc/virtio-rdma/backports
INSIDE
}

if [ "${SECOND_STAGE:-}" = yes ]; then
    second_stage "$1"
    exit
fi

export INITRD=No
mmdebstrap --quiet --mode=root --variant=apt --components=main \
    --aptopt='APT::Install-Recommends "false"' \
    --dpkgopt='path-exclude=/usr/share/doc/*' \
    --dpkgopt='path-exclude=/usr/share/man/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' \
    --dpkgopt='path-exclude=/usr/lib/llvm-*/lib/*.a' \
    --dpkgopt='path-exclude=/usr/src/rustc-*/src/doc/*' \
    --dpkgopt='path-exclude=/usr/src/rustc-*/src/tools/*' \
    --dpkgopt='path-exclude=/usr/src/rustc-*/compiler/*' \
    --include=gcc,make,libc6-dev,rustc,rust-src,bindgen,binutils,kmod,libelf-dev,python3-minimal,xz-utils,cpio,e2fsprogs,busybox-static,linux-headers-amd64 \
    --skip=cleanup/apt,cleanup/reproducible \
    --customize-hook="SECOND_STAGE=yes bash '$0' \"\$1\"" \
    trixie "$tree" \
    "deb $mirror trixie main" "deb $mirror trixie-updates main" "deb $mirror trixie-backports main"
