#!/bin/sh
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
#
# build.sh OUT_DIR
#
# Builds Soft-iWARP, which Debian's kernels leave out, for the kernel $KVER, whose headers are installed, from Debian's
# package of that kernel's source:
#
#   OUT_DIR/siw.ko      as it is: it asks for no CRC, and has one if its peer asks
#   OUT_DIR/siw_crc.ko  the same, but it asks for a CRC
#
# Runs in the build root; of that it changes nothing. If the mirror has the source of another patch level only, that is
# what is built.
set -eu
out=$(mkdir -p "$1" && cd "$1" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

version=$(dpkg-query -W -f '${Version}' "linux-headers-$KVER")
series=$(echo "$KVER" | cut -d. -f1,2)
package=linux-source-$series
mkdir -p apt/lists/partial apt/cache/archives/partial
cat >apt/conf <<EOF
Dir::State::lists "$work/apt/lists";
Dir::Cache "$work/apt/cache";
APT::Sandbox::User "root";
Acquire::Check-Valid-Until "false";
Acquire::Languages "none";
EOF
export APT_CONFIG="$work/apt/conf"
apt-get -q update
apt-get -q download "$package=$version" || apt-get -q download "$package"
ls ./*.deb

# The package holds a tar file of the whole kernel: of that, one directory.
dpkg-deb --fsys-tarfile ./*.deb | tar -xO "./usr/src/$package.tar.xz" |
    tar -xJ --strip-components=4 "$package/drivers/infiniband/sw/siw"
rm ./*.deb

# The kernel's own file names them; the build may write another one over it.
objects=$(sed -n ':a; /\\$/ { N; ba }; s/\\\n//g; s/^siw-y := *//p' siw/Makefile)
[ -n "$objects" ]

# build NAME: makes the module NAME of what is in siw/.
build() {
    printf 'obj-m := %s.o\n%s-y := %s\n' "$1" "$1" "$objects" >siw/Kbuild
    make -C "/usr/src/linux-headers-$KVER" M="$work/siw" clean modules
    strip --strip-debug -o "$out/$1.ko.new" "siw/$1.ko"
    mv "$out/$1.ko.new" "$out/$1.ko"
}
build siw
grep -q '^const bool mpa_crc_required;' siw/siw_cm.c siw/siw_main.c
sed -i 's/^const bool mpa_crc_required;/const bool mpa_crc_required = true;/' siw/siw_cm.c siw/siw_main.c
build siw_crc
