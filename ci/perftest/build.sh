#!/bin/sh
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
#
# build.sh OUT_DIR
#
# Builds the programs of perftest that have SRD (-c SRD), from Debian's source of it with the patches beside this
# script, so that they know our device's:
#
#   OUT_DIR/ib_{send,write,read}_{bw,lat}
#
# They are linked with the suite's rdma-core, and with a library that has the names of virtio_rdma_dv and nothing in it.
#
# Runs in the build root, in a mount namespace of its own. The packages that it needs are installed in an overlay in
# memory, so the root stays as it is.
set -eu
mkdir -p "$1"
here=$(cd "$(dirname "$0")" && pwd)
version=25.01.0+0.80
sha256=54e86b131f0b06862b8b9cd692739737295463cfef467bdda5f5aa3dae8c5b05
programs="ib_send_bw ib_send_lat ib_write_bw ib_write_lat ib_read_bw ib_read_lat"

work=$(mktemp -d)
root=$work/root
mkdir "$work/upper" "$work/work" "$root"
mount -t overlay -o "lowerdir=/,upperdir=$work/upper,workdir=$work/work" overlay "$root"
mount -t proc proc "$root/proc"
mount -t tmpfs tmp "$root/tmp"
mount --rbind /dev "$root/dev"

sed -n '1s/^deb /deb-src /p' /etc/apt/sources.list >"$root/etc/apt/sources.list.d/source.list"
cat >"$root/etc/apt/apt.conf.d/perftest" <<CONF
APT::Install-Recommends "false";
APT::Sandbox::User "root";
Acquire::Check-Valid-Until "false";
Acquire::Languages "none";
CONF
inside() { chroot "$root" env DEBIAN_FRONTEND=noninteractive "$@" </dev/null; }
inside apt-get -q update
inside apt-get -q -y install autoconf automake libtool patch \
    libibverbs-dev librdmacm-dev libibumad-dev libpci-dev

# Some mirrors lack the other files of a source package; the tarball alone will do, if it is the right one.
inside sh -c 'cd /tmp && apt-get -q source --download-only perftest' || true
tarball=$root/tmp/perftest_$version.orig.tar.gz
if ! echo "$sha256  $tarball" | sha256sum --check --status; then
    echo "perftest_$version.orig.tar.gz is not to be had, or is not what it was" >&2
    exit 1
fi
mkdir "$root/tmp/perftest"
tar -C "$root/tmp/perftest" --strip-components=1 -xzf "$tarball"
cp -r "$here/patches" "$root/tmp/"

dv=$here/../../guest-driver/provider/include/infiniband/virtio_rdma_dv.h
cp "$dv" "$root/usr/include/infiniband/"
sh "$here/../verbs/dv-stub.sh" "$root/usr/lib"

# shellcheck disable=SC2086
inside sh -euc '
    cd /tmp/perftest
    while read -r name; do patch -p1 <"../patches/$name"; done <../patches/series
    sh autogen.sh
    ./configure
    grep -q "define HAVE_VIRTIO_RDMA 1" config.h
    make -j"$(nproc)" "$@"
    strip "$@"' sh $programs
for program in $programs; do cp "$root/tmp/perftest/$program" "$1/"; done
