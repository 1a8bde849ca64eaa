#!/bin/bash
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
#
# build.sh WORK VERSION EPOCH SUITE [NEXT]
#
# Runs inside the root of build-root.sh, without a network. Builds the packages of VERSION of the tarballs in WORK
# (virtio-rdma_UPSTREAM.orig.tar.xz, and beside it the component vendor). WORK/repository gets them and the sources, and
# is a repository for apt. EPOCH, seconds, is the time that everything is dated. Fails if lintian finds errors, or if
# libibverbs does not load the provider.
# WORK/next gets the same packages as version NEXT, for tests of upgrades.
set -euo pipefail
work=$1 version=$2 epoch=$3 suite=$4 next=${5:-}
upstream=${version%-*}
export SOURCE_DATE_EPOCH=$epoch LC_ALL=C.UTF-8 DEB_BUILD_OPTIONS="parallel=$(nproc)"

# changelog VERSION
changelog() {
    cat >debian/changelog <<CHANGELOG
virtio-rdma ($1) $suite; urgency=medium

  * CHANGELOG.md of the sources says what is new.

 -- $(sed -n 's/^Maintainer: //p' debian/control)  $(date -u -R -d "@$epoch")
CHANGELOG
}

# repository DIRECTORY FILE...
repository() {
    mkdir "$1"
    mv "${@:2}" "$1"
    (cd "$1" && dpkg-scanpackages --multiversion . >Packages)
}

mkdir "$work/tree"
cd "$work/tree"
tar --strip-components=1 -xf "../virtio-rdma_$upstream.orig.tar.xz"
mkdir vendor
tar -C vendor --strip-components=1 -xf "../virtio-rdma_$upstream.orig-vendor.tar.xz"
cp -R packaging/debian debian
changelog "$version"
dpkg-buildpackage --no-sign
lintian --fail-on error --info --tag-display-limit 0 --allow-root "../virtio-rdma_${version}_amd64.changes"
cd ..
sh tree/packaging/check-provider.sh "$work"
repository repository virtio-rdma_"$upstream".orig*.tar.xz virtio-rdma_"$version"[._]* ./*.deb

if [ -n "$next" ]; then
    cd tree
    changelog "$next"
    # Not `clean`: what was compiled is the same.
    dh_clean -XCargo.toml.orig
    debian/rules binary
    cd ..
    repository next ./*.deb
fi
