#!/bin/sh
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
#
# link-provider.sh ARCHIVE LIBRARY
#
# Makes LIBRARY, the provider with versions for its symbols, of ARCHIVE, which
# `cargo rustc --package virtio-rdma-provider --lib --crate-type staticlib` has made.
# For a cdylib rustc gives the linker a list of symbols of its own, beside which there can be no versions.
set -eu
archive=$1 library=$2
here=$(cd "$(dirname "$0")" && pwd)
# All of the archive: nobody names what registers the provider when the library is loaded.
${CC:-cc} -shared -o "$library" -Wl,-soname,libvirtio_rdma.so.1 \
    -Wl,--version-script="$here/../guest-driver/provider/libvirtio_rdma.map" \
    -Wl,--whole-archive "$archive" -Wl,--no-whole-archive \
    -Wl,--gc-sections -Wl,--as-needed -Wl,--no-undefined -Wl,-z,relro,-z,now \
    ${LDFLAGS-} -l:libibverbs.so.1 -lgcc_s -lc
