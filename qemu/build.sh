#!/bin/bash
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# Builds QEMU 10.0 (Debian 13's source package) with the device vhost-user-rdma-pci. See --help.
set -euo pipefail

usage() {
    cat <<'USAGE'
Usage: qemu/build.sh

Builds QEMU 10.0 from Debian 13's source package with Debian's patches and the series in qemu/patches,
installs it in ${XDG_CACHE_HOME:-~/.cache}/virtio-rdma/qemu-HASH/ (HASH covers the patches, the device
list and this script) and prints the path of its qemu-system-x86_64, the only line on standard output.
If it is there already, prints the path and does nothing else.

Runs on Debian 12 and 13, x86-64, as root or with sudo: build dependencies are installed by apt. The
source comes through an apt configuration of its own; the machine's is neither used for that nor changed,
except that its Debian mirror is taken if it names one.
USAGE
}

case "${1-}" in
    -h | --help) usage; exit 0 ;;
    '') ;;
    *) usage >&2; exit 2 ;;
esac

here=$(cd "$(dirname "$0")" && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/virtio-rdma
hash=$(cd "$here" && sha256sum build.sh x86_64-softmmu.mak patches/*.patch | sha256sum | cut -c1-16)
prefix=$cache/qemu-$hash
binary=bin/qemu-system-x86_64

if [ -x "$prefix/$binary" ]; then
    echo "$prefix/$binary"
    exit 0
fi

# Standard output is for the path alone.
exec 3>&1 1>&2

say() { echo "qemu: $*"; }
die() { say "error: $*"; exit 1; }

[ "$(uname -m)" = x86_64 ] || die "only x86-64 hosts are supported, this is $(uname -m)"
command -v apt-get >/dev/null || die "this needs Debian 12 or 13 (no apt-get here)"

mkdir -p "$cache"
exec 9>"$cache/qemu-$hash.lock"
if ! flock -n 9; then
    say "another build of the same is under way: waiting for it"
    flock 9
    if [ -x "$prefix/$binary" ]; then
        echo "$prefix/$binary" >&3
        exit 0
    fi
fi

# Under the lock this name is ours: what is there was left by a build that was killed.
work=$cache/qemu-$hash.building
log=$cache/qemu-$hash.log
rm -rf "$work"
mkdir -p "$work"
: >"$log"
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# step TEXT COMMAND...: says what is done and how long it took; its output goes to the log.
step() {
    local text=$1 begin=$SECONDS status=0
    shift
    say "$text ..."
    echo "== $text" >>"$log"
    # A subshell with its own `set -e`; not as a condition, where bash would ignore it.
    set +e
    (
        set -e
        "$@"
    ) >>"$log" 2>&1 3>&- 9>&-
    status=$?
    set -e
    if [ "$status" -ne 0 ]; then
        tail -n 30 "$log" | sed 's/^/qemu: | /'
        die "$text: failed (the whole log: $log)"
    fi
    say "$text: $((SECONDS - begin)) s"
}

as_root() {
    if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo -- "$@"; fi
}

begin=$SECONDS
packages=(bzip2 ca-certificates debian-archive-keyring dpkg-dev gcc libattr1-dev libc6-dev libcap-ng-dev libfdt-dev
    libglib2.0-dev libslirp-dev ninja-build patch perl pkg-config python3 python3-venv xz-utils zlib1g-dev)
# Debian 12's meson is too old for QEMU 10.0: there it comes from PyPI.
debian=$(. /etc/os-release && echo "${VERSION_ID:-}")
if [ "${debian%%.*}" != 12 ]; then
    packages+=(meson)
fi

# apt's own lock timeout does not cover the lists, so try for up to two minutes. Any other failure, such as an
# unreachable repository, need not matter: the installation will tell.
update_lists() {
    local try said
    for try in $(seq 24); do
        said=$(as_root env LC_ALL=C apt-get -q update 2>&1) && return 0
        printf 'attempt %s: %s\n' "$try" "$said"
        if ! grep -qE 'Could not get lock|Unable to lock' <<<"$said"; then
            return 0
        fi
        sleep 5
    done
}

install_packages() {
    update_lists
    as_root env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=600 \
        install --no-install-recommends "$@"
}

missing=()
for package in "${packages[@]}"; do
    if ! dpkg-query -W -f '${db:Status-Status}\n' "$package" 2>/dev/null | grep -qx installed; then
        missing+=("$package")
    fi
done
if [ ${#missing[@]} -gt 0 ]; then
    step "installing ${#missing[@]} packages to build with (${missing[*]})" install_packages "${missing[@]}"
fi

# private_apt MIRROR: sets up an apt that knows only Debian 13 and touches only $work/apt.
private_apt() {
    local dir=$work/apt
    rm -rf "$dir"
    mkdir -p "$dir/lists/partial" "$dir/cache/archives/partial" "$dir/state"
    for suite in trixie trixie-updates; do
        echo "deb [arch=amd64 signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $1 $suite main"
        echo "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $1 $suite main"
    done >"$dir/sources.list"
    apt_options=(-q
        -o "Dir::Etc::SourceList=$dir/sources.list" -o Dir::Etc::SourceParts=/dev/null
        -o Dir::Etc::Preferences=/dev/null -o Dir::Etc::PreferencesParts=/dev/null
        -o "Dir::State=$dir/state" -o "Dir::State::Lists=$dir/lists" -o Dir::State::Status=/dev/null
        -o "Dir::Cache=$dir/cache" -o "Dir::Log=$dir"
        -o APT::Sandbox::User=root -o Acquire::Languages=none -o Acquire::Retries=3
        -o APT::Architecture=amd64 -o APT::Architectures::=amd64)
    apt-get "${apt_options[@]}" -o APT::Update::Error-Mode=any update
}

download() {
    local mirror default=http://deb.debian.org/debian
    mirror=$(cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list /etc/apt/sources.list.d/*.sources 2>/dev/null |
        grep -E '^(deb|deb-src|URIs:)[[:space:]]' | grep -oE 'https?://[^[:space:]]+/debian/?([[:space:]]|$)' |
        head -n 1 | tr -d '[:space:]' || true)
    if ! private_apt "${mirror:-$default}"; then
        [ "${mirror:-$default}" != "$default" ]
        private_apt "$default"
    fi
    mkdir "$work/source" "$work/firmware"
    (cd "$work/source" && apt-get "${apt_options[@]}" --download-only source qemu)
    (cd "$work/firmware" && apt-get "${apt_options[@]}" download seabios qemu-system-data ipxe-qemu)
}

unpack() {
    local description version
    description=$(echo "$work"/source/qemu_*.dsc)
    version=$(sed -n 's/^Version: *//p' "$description")
    echo "QEMU $version"
    case $version in
        1:10.0.*) ;;
        *) echo "Debian 13's QEMU is $version, the patches are for 10.0.*"; return 1 ;;
    esac
    echo "$version" >"$work/version"
    # apt has verified the files already.
    dpkg-source --no-check -x "$description" "$work/qemu"
    for patch in "$here"/patches/*.patch; do
        patch -d "$work/qemu" -p1 -N --batch -i "$patch"
    done
    cp "$here/x86_64-softmmu.mak" "$work/qemu/configs/devices/x86_64-softmmu/virtio-rdma.mak"
}

setup_python() {
    # The system's Python, never changed: what is missing goes into an environment of its own.
    /usr/bin/python3 -m venv --system-site-packages "$work/venv"
    if ! "$work/venv/bin/python3" -c '
import sys
from mesonbuild.coredata import version
sys.exit(tuple(map(int, version.split(".")[:2])) < (1, 5))'; then
        "$work/venv/bin/python3" -m pip install --quiet --disable-pip-version-check 'meson>=1.5,<1.8'
    fi
}

configure() {
    mkdir "$work/build"
    cd "$work/build"
    # The prefix is nominal: QEMU finds its firmware relative to its binary.
    "$work/qemu/configure" --python="$work/venv/bin/python3" --prefix=/usr --target-list=x86_64-softmmu \
        --without-default-features --without-default-devices --with-devices-x86_64=virtio-rdma \
        --enable-tcg --enable-kvm --enable-vhost-user --enable-slirp --enable-virtfs --enable-attr \
        --enable-cap-ng --disable-docs --disable-install-blobs --disable-debug-info --disable-tools \
        --disable-guest-agent --disable-download
}

compile() {
    ninja -C "$work/build" -j "$(nproc)" qemu-system-x86_64
}

# The firmware comes along (Debian 13's, on Debian 12 too), so that no -L option is needed.
stage() {
    local root=$work/prefix file
    mkdir -p "$root/bin" "$root/share/qemu" "$root/share/doc"
    strip -o "$root/$binary" "$work/build/qemu-system-x86_64"
    for file in "$work"/firmware/*.deb; do
        dpkg-deb -x "$file" "$work/firmware/root"
    done
    for file in seabios/bios-256k.bin seabios/bios.bin qemu/kvmvapic.bin qemu/linuxboot.bin qemu/linuxboot_dma.bin \
        qemu/multiboot.bin qemu/multiboot_dma.bin qemu/pvh.bin qemu/efi-virtio.rom; do
        cp -L "$work/firmware/root/usr/share/$file" "$root/share/qemu/"
    done
    cp "$work/qemu/COPYING" "$work/qemu/COPYING.LIB" "$work/qemu/LICENSE" "$work/version" "$root/share/doc/"
}

check() {
    local qemu=$work/prefix/$binary
    "$qemu" -version
    "$qemu" -device vhost-user-rdma-pci,help
    # Starts a machine with firmware and an option ROM.
    echo quit | timeout 60 "$qemu" -machine q35,accel=tcg -nodefaults -display none -monitor stdio -device virtio-net-pci
}

say "building QEMU with vhost-user-rdma-pci in $work"
step "fetching Debian 13's QEMU source and firmware" download
step "unpacking and patching" unpack
step "setting up Python and meson" setup_python
step "configuring" configure
step "compiling on $(nproc) processors (the long one: about 5 minutes on 2)" compile
step "installing" stage
step "checking that it starts" check
rm -rf "$prefix"
mv "$work/prefix" "$prefix"
rm -rf "$work" "$log"
say "QEMU $(sed 's/^1://' "$prefix/share/doc/version") is ready: $((SECONDS - begin)) s in all"
echo "$prefix/$binary" >&3
