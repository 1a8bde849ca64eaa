#!/bin/sh
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
#
# Fetches what building the provider needs and Debian does not package: the private headers and the symbol versions of
# rdma-core, from its source. Also libclang, which reads them. Quick if all is there; safe to run twice at once.
#
#     set-up.sh [VERSION]
#
# VERSION is 56.1 (the default, what the build uses by itself) or 65.0 (VIRTIO_RDMA_RDMA_CORE=RESULT makes the build use it).
#
# The result is $XDG_CACHE_HOME/virtio-rdma/rdma-core-VERSION/ (default ~/.cache): `include/` with the headers as
# they are seen inside rdma-core's build, `libibverbs.map`, and `pabi`, the version of the private interface.
#
# VIRTIO_RDMA_MIRROR  Debian mirror to use (default: the one of this machine, else deb.debian.org)
set -eu

version=${1:-56.1}
case $version in
56.1)
    suite=trixie
    sha256=63ce7f2baa7242c2dbc76375dac957c420187dd27f8c5e148efc07971ee522a8
    ;;
65.0)
    suite=sid
    sha256=f6ba3d8b2c4aa334c5c883c1ad0772de339011123cff4fb1db32ae7a443fb7ca
    ;;
*)
    echo "unknown version of rdma-core: $version" >&2
    exit 2
    ;;
esac
# Counts up when the layout of the result changes.
layout=1

cache=${XDG_CACHE_HOME:-$HOME/.cache}/virtio-rdma
result=$cache/rdma-core-$version

as_root() {
    if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo "$@"; fi
}

installed() {
    dpkg-query -W -f '${db:Status-Status}\n' "$1" 2>/dev/null | grep -qx installed
}

for package in libclang-dev python3 debian-archive-keyring; do
    installed "$package" || missing="${missing-} $package"
done
if [ -n "${missing-}" ]; then
    echo "Installing$missing"
    as_root apt-get -q -o DPkg::Lock::Timeout=300 update
    # shellcheck disable=SC2086
    as_root env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=300 \
        install --no-install-recommends $missing
fi

[ "$(cat "$result/layout" 2>/dev/null)" = "$layout" ] && exit 0

mirror=${VIRTIO_RDMA_MIRROR:-$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' |
    sed -n 's,/*$,,; /\/debian$/ { p; q }')}
mirror=${mirror:-http://deb.debian.org/debian}

mkdir -p "$cache"
work=$(mktemp -d "$cache/rdma-core.XXXXXX")
trap 'rm -rf "$work"' EXIT
tarball=$work/rdma-core_$version.orig.tar.gz

echo "Fetching the source of rdma-core $version from $mirror"
mkdir -p "$work/apt/lists/partial" "$work/apt/cache/archives/partial"
echo "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $suite main" >"$work/apt/sources.list"
apt() {
    apt-get -q \
        -o Dir::Etc::SourceList="$work/apt/sources.list" -o Dir::Etc::SourceParts=/dev/null \
        -o Dir::State::Lists="$work/apt/lists" -o Dir::Cache="$work/apt/cache" \
        -o Acquire::Languages=none -o Acquire::Check-Valid-Until=false -o APT::Sandbox::User=root "$@"
}
apt update >"$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }
# Some mirrors lack the other files of a source package; the tarball alone will do, if it is the right one.
(cd "$work" && apt source --download-only rdma-core) >"$work/log" 2>&1 || true
if ! echo "$sha256  $tarball" | sha256sum --check --status; then
    cat "$work/log" >&2
    echo "rdma-core_$version.orig.tar.gz is not to be had from $mirror, or is not what it was" >&2
    exit 1
fi

source=$work/rdma-core-$version
mkdir "$source"
tar -C "$source" --strip-components=1 -xzf "$tarball"
tree=$work/tree
mkdir -p "$tree/include/infiniband" "$tree/include/kernel-abi"
cp "$source"/libibverbs/*.h "$source"/kernel-headers/rdma/ib_user_ioctl_verbs.h "$tree/include/infiniband/"
cp -r "$source/kernel-headers/rdma" "$tree/include/"
python3 "$source/buildlib/make_abi_structs.py" "$source/kernel-headers/rdma/ib_user_verbs.h" \
    "$tree/include/kernel-abi/ib_user_verbs.h"
for dir in ccan util; do
    mkdir "$tree/include/$dir"
    cp "$source/$dir"/*.h "$tree/include/$dir/"
done
: >"$tree/include/config.h"
cp "$source/COPYING.md" "$source"/COPYING.BSD_MIT "$tree/"
pabi=$(sed -n 's/^set(IBVERBS_PABI_VERSION "\([0-9]*\)")/\1/p' "$source/CMakeLists.txt")
echo "$pabi" >"$tree/pabi"
sed "s/@IBVERBS_PABI_VERSION@/$pabi/" "$source/libibverbs/libibverbs.map.in" >"$tree/libibverbs.map"
echo "$layout" >"$tree/layout"

# Whoever is second finds the same thing there.
rm -rf "$result"
mv -T "$tree" "$result" 2>/dev/null || [ -e "$result/layout" ]
