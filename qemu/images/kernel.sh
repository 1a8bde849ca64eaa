#!/bin/bash
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
#
# kernel.sh KVER OUT
#
# Runs inside the build root. Makes what one guest kernel needs to boot the root image: OUT/vmlinuz, OUT/modules.img
# (ext4, mounted on /usr/lib/modules) and OUT/initrd.img (loads the disk's drivers and mounts the root).
set -euo pipefail
kver=$1 out=$2
here=$(cd "$(dirname "$0")" && pwd)
from=/usr/lib/modules/$kver
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The modules a guest may want: virtio, the RDMA stack and what runs over it, network and file systems for tests.
wanted='^kernel/(drivers/(virtio|block|infiniband/(core|sw|ulp)|nvme|target)/|drivers/acpi/button|drivers/input/evdev'
wanted+='|drivers/net/(virtio_net|dummy|tun|veth|macvlan|vrf|bonding/)|drivers/char/hw_random/virtio-rng|drivers/scsi/sd_mod'
wanted+='|fs/(ext4|overlayfs|9p|nfs|nfsd|nfs_common|lockd|fuse)/|net/(9p|sunrpc|rds|smc|8021q|vmw_vsock)/|net/bridge/bridge|crypto/crc32|lib/libcrc32c)'
unwanted='^kernel/drivers/block/(drbd|aoe|mtip32xx|zram|xen|rbd)'

# closure FILE...: the named modules and all they need, each after what it needs.
awk -v wanted="$wanted" -v unwanted="$unwanted" -F'[: ]+' '
    { deps = ""; for (i = 2; i <= NF; i++) if ($i != "") deps = $i " " deps; need[$1] = deps
      if ($1 ~ wanted && $1 !~ unwanted) first[$1] = 1 }
    function add(m,   n, list, i) {
        if (m in seen) return
        seen[m] = 1
        n = split(need[m], list, " ")
        for (i = 1; i <= n; i++) add(list[i])
        print m
    }
    END { for (m in first) add(m) }' "$from/modules.dep" >"$work/list"

tree=$work/tree/$kver
mkdir -p "$tree"
(cd "$from" && xargs cp --parents -t "$tree" <"$work/list")
find "$tree" -name '*.ko.xz' -print0 | xargs -0 -r -n 64 -P 2 xz -d
cp "$from"/modules.{builtin,builtin.modinfo,order} "$tree/"
mkdir -p "$work/base/lib"
ln -s "$work/tree" "$work/base/lib/modules"
depmod -b "$work/base" "$kver"

# The initramfs: busybox, its init and the modules between power-on and the root file system, in loading order.
boot=$work/boot
mkdir -p "$boot"/{bin,modules,dev,proc,lower,rw,root}
cp /usr/bin/busybox "$boot/bin/busybox"
cp "$here/guest/initramfs" "$boot/init"
chmod 755 "$boot/init"
# ext4 wants crc32c by an alias: a module of its own on 6.12, a library it depends on later.
mapfile -t crc < <(sed -n 's|.*/\(crc32c[^/]*\)\.ko.*|\1|p' "$work/list")
modprobe -S "$kver" -d "$work/base" --show-depends --all "${crc[@]}" virtio_pci virtio_blk ext4 overlay |
    awk '$1 == "insmod" && !seen[$2]++ { print $2 }' >"$work/early"
: >"$boot/modules/order"
while read -r file; do
    cp "$file" "$boot/modules/"
    basename "$file" >>"$boot/modules/order"
done <"$work/early"
(cd "$boot" && find . | sort | cpio --quiet -o -H newc -R 0:0) >"$out/initrd.img"

cp -L "$from/vmlinuz" "$out/vmlinuz"
size=$(du -sm "$work/tree" | cut -f1)
mke2fs -q -t ext4 -O ^has_journal -m 0 -L guest-modules -d "$work/tree" "$out/modules.img" "$((size * 5 / 4 + 8))M"
echo "$kver" >"$out/kver"
