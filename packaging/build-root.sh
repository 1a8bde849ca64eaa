#!/bin/bash
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
#
# build-root.sh TREE MIRROR SUITE CONTROL
#
# Makes TREE, a root of a Debian suite (trixie, sid) in which packages are built and looked at: what every build of a
# package may take for granted, what the file CONTROL has for Build-Depends, and lintian.
# A mirror may stand still for longer than a Release file is valid: its signature is what counts.
# Needs root and mmdebstrap.
set -euo pipefail
tree=$1 mirror=$2 suite=$3 control=$4

sources=("deb $mirror $suite main")
if [ "$suite" != sid ]; then sources+=("deb $mirror $suite-updates main"); fi

mmdebstrap --quiet --mode=root --variant=buildd --components=main \
    --aptopt='APT::Install-Recommends "false"' \
    --aptopt='Acquire::Check-Valid-Until "false"' \
    --dpkgopt='path-exclude=/usr/share/locale/*' \
    --dpkgopt='path-exclude=/usr/lib/llvm-*/lib/*.a' \
    --include=lintian,xz-utils,fakeroot \
    --skip=cleanup/apt,cleanup/reproducible \
    --customize-hook='mkdir -p "$1/src" "$1/out" "$1/build" "$1/tmp/needed/debian"' \
    --customize-hook="cp '$control' \"\$1/tmp/needed/debian/control\"" \
    --customize-hook='chroot "$1" env DEBIAN_FRONTEND=noninteractive apt-get -q -y build-dep /tmp/needed </dev/null' \
    --customize-hook='rm -rf "$1/tmp/needed" "$1/var/cache/apt" "$1/var/lib/apt/lists"' \
    "$suite" "$tree" "${sources[@]}"
