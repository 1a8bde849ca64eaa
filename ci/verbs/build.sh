#!/bin/sh
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
#
# build.sh DIRECTORY
#
# Makes DIRECTORY/verbs-test, the tests of the public verbs API, and DIRECTORY/device-lost, which sees a device go. The
# headers are those that guest-driver/provider/set-up.sh fetched; they are linked with a library that has the names and
# versions of libibverbs and nothing in it, and run with the guest's true one; the same goes for the provider's own
# library.
set -eu

out=$1
here=$(cd "$(dirname "$0")" && pwd)
dv=$here/../../guest-driver/provider/include
tree=${VIRTIO_RDMA_RDMA_CORE:-${XDG_CACHE_HOME:-$HOME/.cache}/virtio-rdma/rdma-core-56.1}
if [ ! -e "$tree/libibverbs.map" ]; then
    echo "$tree/libibverbs.map is missing: run guest-driver/provider/set-up.sh" >&2
    exit 1
fi

stub=$out/stub
mkdir -p "$stub"
# Names of the public interface, each with its newest version. A name that libc has is no concern: there is none.
awk -v code="$stub/stub.c" -v script="$stub/stub.map" '
    / *\{$/ { version = $1; if (version !~ /PRIVATE/) versions[++n] = version }
    $1 ~ /^[_a-z0-9]+;$/ && version !~ /PRIVATE/ { name = $1; sub(";", "", name); newest[name] = version }
    END {
        for (i = 1; i <= n; i++) {
            printf "%s { global:", versions[i] > script
            for (name in newest) {
                if (newest[name] != versions[i]) continue
                printf " %s;", name > script
                printf "void %s(void) {}\n", name > code
            }
            printf " };\n" > script
        }
    }' "$tree/libibverbs.map"
"${CC:-cc}" -shared -nostdlib -fno-builtin -fPIC -w -Wl,-soname,libibverbs.so.1 \
    -Wl,--version-script="$stub/stub.map" -o "$stub/libibverbs.so" "$stub/stub.c"
# The same for what the provider has beyond the verbs.
sh "$here/dv-stub.sh" "$stub"

build() {
    name=$1
    shift
    "${CC:-cc}" -std=gnu11 -O2 -g -pthread -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Werror \
        -isystem "$tree/include" -I "$dv" -I "$here" \
        -o "$out/$name.new" "$@" -L "$stub" -lvirtio_rdma -libverbs
    mv "$out/$name.new" "$out/$name"
}
build verbs-test "$here"/*.c
build device-lost "$here/programs/device-lost.c" "$here/common.c"
