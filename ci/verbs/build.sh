#!/bin/sh
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
#
# build.sh DIRECTORY
#
# Makes DIRECTORY/verbs-test, the tests of the public verbs API. The headers are those that
# guest-driver/provider/set-up.sh fetched; it is linked with a library that has the names and versions of libibverbs and
# nothing in it, and runs with the guest's true one.
set -eu

out=$1
here=$(cd "$(dirname "$0")" && pwd)
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

"${CC:-cc}" -std=gnu11 -O2 -g -pthread -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Werror \
    -isystem "$tree/include" -I "$here/../../guest-driver/provider/include" \
    -o "$out/verbs-test.new" "$here"/*.c -L "$stub" -libverbs
mv "$out/verbs-test.new" "$out/verbs-test"
