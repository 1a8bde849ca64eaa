#!/bin/sh
# SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
#
# rust.sh SOURCES SPEC_CRATE CORE_CRATE AUTO_CONF BUILD_DIR OUT
#
# Compiles the Rust side to one object, OUT. Rust's own core library is built from rust-src first (kept in
# $VIRTIO_RDMA_RUST_CACHE, else in BUILD_DIR/rustlib, by compiler and flags), then our crates, with link-time
# optimization over all, so that only what is used remains.
set -eu
sources=$1 spec=$2 core=$3 conf=$4 build=$5 out=$6
rustc=${RUSTC:-rustc} ld=${LD:-ld} objcopy=${OBJCOPY:-objcopy} nm=${NM:-nm}
export RUSTC_BOOTSTRAP=1

library=${RUST_LIB_SRC:-$($rustc --print sysroot)/lib/rustlib/src/rust/library}
if ! [ -e "$library/core/src/lib.rs" ]; then
    echo "rust.sh: no Rust library sources in $library (Debian: apt-get install rust-src)" >&2
    exit 1
fi
work=$build/rustlib
mkdir -p "$work"

config() { grep -q "^CONFIG_$1=y" "$conf"; }
number() { sed -n "s/^CONFIG_$1=//p" "$conf"; }
# Does this compiler know the flag?
knows() {
    echo '#![feature(no_core)] #![no_core]' | $rustc --target x86_64-unknown-none --crate-type rlib --crate-name probe \
        --sysroot=/dev/null --emit=metadata="$work/probe.rmeta" "$@" - >/dev/null 2>&1
}

# As the kernel's C objects: objtool checks that, and the mitigations are worth nothing if one module is without.
target=x86_64-unknown-none
flags="--sysroot=/dev/null -Cpanic=abort -Cforce-unwind-tables=n -Ccodegen-units=1
    -Csymbol-mangling-version=v0 -Crelocation-model=static -Ccode-model=kernel -Cno-redzone=y -Copt-level=2
    -Cdebug-assertions=n -Coverflow-checks=y -Ctarget-cpu=x86-64 -Ztune-cpu=generic -Zplt=yes -Zfunction-sections=n"
features=
if knows -Cjump-tables=n; then flags="$flags -Cjump-tables=n"; else flags="$flags -Zno-jump-tables"; fi
if config X86_KERNEL_IBT; then flags="$flags -Zcf-protection=branch"; fi
if config MITIGATION_RETHUNK; then flags="$flags -Zfunction-return=thunk-extern"; fi
if config MITIGATION_RETPOLINE; then
    if knows -Zretpoline-external-thunk; then
        flags="$flags -Zretpoline-external-thunk"
    else
        features="$features,+retpoline-external-thunk,+retpoline-indirect-branches,+retpoline-indirect-calls"
    fi
fi
if config MITIGATION_SLS; then
    if knows -Zharden-sls=all; then
        flags="$flags -Zharden-sls=all"
    else
        features="$features,+harden-sls-ijmp,+harden-sls-ret"
    fi
fi
if config CALL_PADDING; then
    padding=$(number FUNCTION_PADDING_BYTES)
    flags="$flags -Zpatchable-function-entry=$padding,$padding"
fi
if config KASAN_GENERIC; then
    # Every access calls out, as with KASAN_OUTLINE.
    flags="$flags -Zsanitizer=kernel-address -Zsanitizer-recover=kernel-address
        -Cllvm-args=-asan-mapping-offset=$(number KASAN_SHADOW_OFFSET)
        -Cllvm-args=-asan-instrumentation-with-call-threshold=0 -Cllvm-args=-asan-globals=0
        -Cllvm-args=-asan-kernel-mem-intrinsic-prefix=1"
fi
if [ -n "$features" ]; then
    # These are no features to rustc, and it warns when they come as flags: so as features of a target of our own.
    $rustc -Zunstable-options --print target-spec-json --target $target |
        sed -e '/"is-builtin"/d' -e "s/\\(\"features\": \"[^\"]*\)\"/\\1$features\"/" >"$work/x86_64-kernel.json"
    target="$work/x86_64-kernel.json -Zunstable-options"
fi
flags="--target $target $(echo $flags)"

edition=$(sed -n 's/^edition *= *"\([0-9]*\)".*/\1/p' "$library/core/Cargo.toml")
cache=${VIRTIO_RDMA_RUST_CACHE:-$work}/$( ($rustc -vV && echo "$flags $features $edition" | sed "s|$work||") | sha256sum | cut -c 1-16)
if ! [ -e "$cache/libcompiler_builtins.rlib" ]; then
    # Others may be at it as well, for another kernel: it is whole before it gets its name.
    made=$cache.$$
    rm -rf "$made"
    mkdir -p "$made"
    $rustc --edition="${edition:-2021}" --crate-type rlib --crate-name core $flags --cap-lints allow \
        --cfg no_fp_fmt_parse --emit=link="$made/libcore.rlib" "$library/core/src/lib.rs"
    # The compiler wants a crate of this name; what would be in it (memcpy and the like) the kernel has.
    printf '%s\n' '#![allow(internal_features)]' '#![feature(compiler_builtins)]' '#![compiler_builtins]' \
        '#![no_builtins]' '#![no_std]' >"$work/compiler_builtins.rs"
    $rustc --edition=2021 --crate-type rlib --crate-name compiler_builtins $flags -L "$made" \
        --emit=link="$made/libcompiler_builtins.rlib" "$work/compiler_builtins.rs"
    [ -e "$cache/libcompiler_builtins.rlib" ] || rm -rf "$cache"
    mv -T "$made" "$cache" 2>/dev/null || rm -rf "$made"
fi

# What this kernel's headers have.
cfg=
has() {
    cfg="$cfg --check-cfg=cfg($1)"
    if grep -qE "$2" "$build/bindings.rs"; then cfg="$cfg --cfg $1"; fi
}
has has_dmah '^pub struct ib_dmah\b'
has has_create_user_cq '^ *pub create_user_cq:'
has has_resize_user_cq '^ *pub resize_user_cq:'
has has_report_port_event '^ *pub report_port_event:'
has has_query_port_speed '^ *pub query_port_speed:'
has has_robust_udata 'fn set_uverbs_robust_udata\('

crate() {
    name=$1 type=$2 root=$3
    shift 3
    $rustc --edition=2021 --crate-type "$type" --crate-name "$name" $flags -Dwarnings -L "$cache" -L "$work" \
        --remap-path-prefix="$(dirname "$root")=$name" --remap-path-prefix="$build=build" "$@" "$root"
}
crate virtio_rdma_spec rlib "$spec/lib.rs" --emit=link="$work/libvirtio_rdma_spec.rlib"
crate virtio_rdma_driver_core rlib "$core/lib.rs" --extern virtio_rdma_spec \
    --emit=link="$work/libvirtio_rdma_driver_core.rlib"
VIRTIO_RDMA_BINDINGS=$build/bindings.rs crate virtio_rdma staticlib "$sources/lib.rs" $cfg -Clto=fat \
    --extern virtio_rdma_spec --extern virtio_rdma_driver_core --emit=link="$work/libvirtio_rdma.a"

$ld -m elf_x86_64 -r --whole-archive -o "$out" "$work/libvirtio_rdma.a"
$objcopy -R .llvmbc -R .llvmcmd "$out"
if readelf -rW "$out" | grep -q GOT; then
    echo "rust.sh: $out has relocations that the kernel's loader does not know" >&2
    exit 1
fi
# The optimizer must have found that no check can fail; an index out of range, an overflow or an unwrap would stop the
# guest's kernel. With the checks of KASAN in between it cannot see that everywhere.
if ! config KASAN_GENERIC && $nm -u "$out" | grep -q vrdma_panic; then
    echo "rust.sh: $out can panic:" >&2
    # Who calls that: by name, or, in another section, by the section that rarely executed functions are in.
    ${OBJDUMP:-objdump} -dr "$out" | awk '
        /^[0-9a-f]+ </ { caller = $2; next }
        /panick|R_X86_64_PLT32.*\.text\.unlikely/ { print caller }' | sort | uniq -c >&2
    exit 1
fi
