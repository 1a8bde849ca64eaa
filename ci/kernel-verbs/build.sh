#!/bin/sh
# SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
#
# build.sh OUT_DIR
#
# Builds OUT_DIR/kernel_verbs_test.ko and OUT_DIR/slow_resolve.ko for the kernel $KVER, whose headers are installed.
# Leaves the source tree alone. Any warning is an error.
set -eu
out=$(mkdir -p "$1" && cd "$1" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
cp "$here"/Kbuild "$here"/*.[ch] "$tree"
if ! make -C "/usr/src/linux-headers-$KVER" M="$tree" KCFLAGS=-Werror modules >"$tree/log" 2>&1; then
    cat "$tree/log" >&2
    exit 1
fi
if grep -i 'warning' "$tree/log" >&2; then
    echo "build.sh: the warnings above are errors" >&2
    exit 1
fi
for module in kernel_verbs_test slow_resolve; do
    strip --strip-debug -o "$out/$module.ko.new" "$tree/$module.ko"
    mv "$out/$module.ko.new" "$out/$module.ko"
done
