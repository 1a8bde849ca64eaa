#!/bin/sh
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
#
# dv-stub.sh DIRECTORY
#
# Makes DIRECTORY/libvirtio_rdma.so, which has the names of virtio_rdma_dv and nothing in it: to link programs with that run
# with a guest's true one.
set -eu
header=$(dirname "$0")/../../guest-driver/provider/include/infiniband/virtio_rdma_dv.h
sed -n 's/.*[ *]\(virtio_rdma_dv_[a-z_]*\)(.*/void \1(void) {}/p' "$header" |
    "${CC:-cc}" -shared -nostdlib -fPIC -w -Wl,-soname,libvirtio_rdma.so.1 -o "$1/libvirtio_rdma.so" -x c -
