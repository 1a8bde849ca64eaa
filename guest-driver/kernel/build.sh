#!/bin/sh
# SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
#
# build.sh OUT_DIR
#
# Builds OUT_DIR/virtio_rdma.ko for the kernel $KVER, or else the newest kernel whose headers are installed. Needs its
# headers, gcc, make, rustc, rust-src, bindgen. Leaves the source tree alone; keeps Rust's core library, which takes
# most of the time, in OUT_DIR/rust-cache. Any warning is an error.
set -eu
out=$(mkdir -p "$1" && cd "$1" && pwd)
here=$(cd "$(dirname "$0")" && pwd)

kdir=
if [ -n "${KVER:-}" ]; then
    for dir in "/lib/modules/$KVER/build" "/usr/src/linux-headers-$KVER"; do
        if [ -e "$dir/Module.symvers" ]; then kdir=$dir; fi
    done
else
    for dir in $(printf '%s\n' /lib/modules/*/build /usr/src/linux-headers-* | sort -V); do
        if [ -e "$dir/Module.symvers" ]; then kdir=$dir; fi
    done
fi
if [ -z "$kdir" ]; then
    echo "build.sh: no kernel headers${KVER:+ for $KVER} (Debian: apt-get install linux-headers-amd64)" >&2
    exit 1
fi

tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
make -s -C "$here" source-tree DEST="$tree/src"
export VIRTIO_RDMA_RUST_CACHE="$out/rust-cache"
if ! make -C "$tree/src" KDIR="$kdir" modules >"$tree/log" 2>&1; then
    cat "$tree/log" >&2
    exit 1
fi
cat "$tree/log"
if grep -i 'warning' "$tree/log" >&2; then
    echo "build.sh: the warnings above are errors" >&2
    exit 1
fi
strip --strip-debug -o "$out/virtio_rdma.ko.new" "$tree/src/virtio_rdma.ko"
mv "$out/virtio_rdma.ko.new" "$out/virtio_rdma.ko"
