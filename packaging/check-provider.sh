#!/bin/sh
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
#
# check-provider.sh DIRECTORY
#
# Runs inside the root of build-root.sh, in a mount namespace of its own. Installs the provider's packages, which are in
# DIRECTORY, over the root in a file system that is thrown away, and fails if the suite's libibverbs does not take the
# provider for a device. No device is there: libibverbs finds what it reads of one in place of /sys and /dev.
set -eu
packages=$1
root=$(mktemp -d)
mount -t tmpfs tmpfs "$root"
mkdir "$root/upper" "$root/work" "$root/tree"
mount -t overlay -o "lowerdir=/,upperdir=$root/upper,workdir=$root/work" overlay "$root/tree"
cd "$root/tree"
mkdir -p check dev/infiniband sys/class/infiniband/card/device sys/class/infiniband_verbs/uverbs0
cp "$packages"/libvirtio-rdma1_*.deb "$packages"/libvirtio-rdma-dev_*.deb check/
[ -e dev/null ] || mknod -m 666 dev/null c 1 3
: >dev/infiniband/uverbs0
(
    cd sys/class
    echo 6 >infiniband_verbs/abi_version
    echo card >infiniband_verbs/uverbs0/ibdev
    echo 1 >infiniband_verbs/uverbs0/abi_version
    echo 231:192 >infiniband_verbs/uverbs0/dev
    echo 1 >infiniband/card/node_type
    echo pci:v00001AF4d0000106Asv00001AF4sd00001100bc02sc07i00 >infiniband/card/device/modalias
)
cat >check/list.c <<'END'
#include <stdio.h>
#include <infiniband/verbs.h>
int main(void) {
    struct ibv_device **list = ibv_get_device_list(NULL);
    for (; list && *list; list++)
        puts(ibv_get_device_name(*list));
    return 0;
}
END
chroot . sh -euc '
    cc -o /check/list /check/list.c -libverbs
    # What is found without the provider says nothing about it.
    [ -z "$(/check/list)" ]
    dpkg --install /check/*.deb
    found=$(IBV_SHOW_WARNINGS=1 /check/list)
    [ "$found" = card ] || { echo "libibverbs does not load the provider" >&2; exit 1; }
'
echo "The provider is loaded by libibverbs $(dpkg-query -W -f '${Version}' libibverbs1)"
cd /
umount "$root/tree" "$root"
rmdir "$root"
