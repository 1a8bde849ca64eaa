# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# shellcheck shell=sh
#
# For scripts that are the first process of namespaces (mount, net, pid, ipc and uts) and make a guest image their root:
# begin_root, whatever else is to be mounted in it, and enter_root. All of it goes with the namespaces.

# read_only FILE PLACE: the file or directory is seen there, and cannot be written to.
read_only() {
    mount --bind "$1" "$2"
    mount -o remount,bind,ro "$2"
}

# begin_root DIRECTORY IMAGE: the image is DIRECTORY/root, which can be written to and is the current directory then.
begin_root() {
    mount -t tmpfs -o mode=755 tmpfs "$1"
    cd "$1"
    mkdir lower upper work root
    mount -t ext4 -o loop,ro "$2" lower
    mount -t overlay -o lowerdir=lower,upperdir=upper,workdir=work overlay root
    cd root
    mkdir -p before
}

# enter_root NAME: the current directory is the root, of a host by that name.
enter_root() {
    mount -t proc proc proc
    mount -t sysfs -o ro sysfs sys
    mount -t tmpfs -o mode=755 tmpfs run
    mount -t tmpfs -o mode=1777 tmpfs tmp
    # Not the machine's: it has devices that are none of a VM's business.
    mount -t tmpfs -o mode=755 tmpfs dev
    mkdir dev/net dev/pts dev/shm
    mount -t devpts -o newinstance,ptmxmode=666 devpts dev/pts
    mount -t tmpfs -o mode=1777 tmpfs dev/shm
    ln -s pts/ptmx dev/ptmx
    ln -s /proc/self/fd dev/fd
    for node in null:3 zero:5 full:7 random:8 urandom:9; do
        mknod -m 666 "dev/${node%:*}" c 1 "${node#*:}"
    done
    mknod -m 666 dev/tty c 5 0
    mknod -m 666 dev/net/tun c 10 200
    pivot_root . before
    cd /
    umount -l /before
    hostname "$1"
    ip link set lo up
}
