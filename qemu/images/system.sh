#!/bin/bash
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
#
# system.sh IMAGE MIRROR SUITE PACKAGE...
#
# Makes IMAGE, the disk of a Debian 13 as its installer leaves it: systemd, a kernel, an initramfs, and the headers; the
# kernel of trixie-backports, too. Added are an agent that runs commands for the launcher, and two repositories, since the
# guest has no network to get packages from: /srv/debian with those that are named and all that they need, and
# /srv/backports with QEMU of trixie-backports.
# Beside IMAGE are the kernels and what they boot with: vmlinuz-NAME, initrd-NAME, NAME being trixie or backports.
# A mirror may stand still for longer than a Release file is valid: its signature is what counts.
# Needs root, mmdebstrap and mke2fs.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

# Runs inside the new tree, after the packages are in.
second_stage() {
    local packages=${*:2}
    cp "$here"/guest/agent "$1/usr/local/sbin/agent"
    chroot "$1" /bin/sh -eu -s "$packages" <<'INSIDE'
export DEBIAN_FRONTEND=noninteractive
own=$(ls /usr/lib/modules)
new=$(apt-cache madison linux-image-amd64 | awk '$3 !~ /~bpo/ { next } { print $3; exit }')
release=$(apt-cache show "linux-image-amd64=$new" | grep -o 'linux-image-[0-9][^ ,]*' | head -n 1)
release=${release#linux-image-}
apt-get install -q -y -t trixie-backports "linux-image-$release" "linux-headers-$release" </dev/null
mkdir -p /etc/virtio-rdma
echo "$own" >/etc/virtio-rdma/trixie
echo "$release" >/etc/virtio-rdma/backports

apt-get install -q -y --download-only $1 </dev/null
mkdir -p /srv/debian
mv /var/cache/apt/archives/*.deb /srv/debian/
apt-get install -q -y --download-only -t trixie-backports qemu-system-x86 ipxe-qemu </dev/null
mkdir -p /srv/backports
mv /var/cache/apt/archives/*.deb /srv/backports/

echo "/dev/vda / ext4 defaults 0 1" >/etc/fstab
echo guest >/etc/hostname
cat >/etc/systemd/network/guest.network <<NETWORK
[Match]
Type=ether
[Network]
Address=10.10.0.1/24
NETWORK
cat >/etc/systemd/system/agent.service <<AGENT
[Unit]
Description=Runs commands for the launcher
After=multi-user.target
[Service]
ExecStart=/usr/local/sbin/agent
Restart=always
LimitMEMLOCK=infinity
KillMode=process
[Install]
WantedBy=default.target
AGENT
systemctl enable agent systemd-networkd
systemctl disable systemd-networkd-wait-online
passwd -d root
INSIDE
}

if [ "${SECOND_STAGE:-}" = yes ]; then
    second_stage "$@"
    exit
fi

image=$1 mirror=$2 suite=$3
shift 3
tree=$image.tree

sources=("deb $mirror $suite main" "deb $mirror $suite-updates main" "deb $mirror $suite-backports main")
mmdebstrap --quiet --mode=root --variant=important --components=main \
    --aptopt='APT::Install-Recommends "false"' \
    --aptopt='Acquire::Check-Valid-Until "false"' \
    --dpkgopt='path-exclude=/usr/share/locale/*' \
    --include=linux-image-amd64,linux-headers-amd64,initramfs-tools,zstd,python3-minimal,pciutils,systemd-sysv \
    --skip=cleanup/apt,cleanup/reproducible \
    --customize-hook="SECOND_STAGE=yes bash '$0' \"\$1\" $*" \
    "$suite" "$tree" "${sources[@]}"

for repository in debian backports; do
    (cd "$tree/srv/$repository" && dpkg-scanpackages . >Packages 2>/dev/null)
    echo "deb [trusted=yes] file:/srv/$repository ./"
done >"$tree/etc/apt/sources.list"
# What apt knows trixie-backports by, and that it takes from there what it is told to.
(
    cd "$tree/srv/backports"
    cat >Release <<RELEASE
Suite: trixie-backports
Codename: trixie-backports
NotAutomatic: yes
ButAutomaticUpgrades: yes
Date: $(LC_ALL=C date -u '+%a, %d %b %Y %H:%M:%S UTC')
SHA256:
 $(sha256sum Packages | cut -d ' ' -f 1) $(stat -c %s Packages) Packages
RELEASE
)
rm -rf "$tree"/var/cache/apt/*.bin "$tree"/var/lib/apt/lists/* "$tree"/etc/apt/sources.list.d/* \
    "$tree"/etc/apt/apt.conf.d/99mmdebstrap "$tree"/etc/dpkg/dpkg.cfg.d/99mmdebstrap
directory=$(dirname "$image")
for name in trixie backports; do
    release=$(cat "$tree/etc/virtio-rdma/$name")
    cp "$tree/boot/vmlinuz-$release" "$directory/vmlinuz-$name"
    cp "$tree/boot/initrd.img-$release" "$directory/initrd-$name"
done

mke2fs -q -t ext4 -m 0 -L guest-system -d "$tree" "$image" 8G
rm -rf "$tree"
