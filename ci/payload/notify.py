#!/usr/bin/python3 -IS
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""notify.py COUNT: how long it takes the guest to notify the device's last virtqueue, a doorbell queue, whose worker sleeps: the
median of COUNT writes to its notification register (Virtio 1.2, 4.1.4.4), ns, for each device of virtio-rdma that the guest has.
It maps registers that a driver has: the kernel wants `iomem=relaxed` for that."""
import glob
import mmap
import statistics
import struct
import sys
import time

DRIVER = "/sys/bus/virtio/drivers/virtio_rdma"
VENDOR = 9
COMMON, NOTIFY = 1, 2
NUM_QUEUES = 18
# Longer than a worker polls for work that may come at once.
PAUSE_NS = 300_000


def capabilities(config):
    """The structures of virtio: for each kind its BAR, its offset there, and where the capability is."""
    found, at = {}, config[0x34]
    while at:
        kind, following, _, structure = config[at : at + 4]
        if kind == VENDOR:
            found[structure] = (config[at + 4], struct.unpack_from("<I", config, at + 8)[0], at)
        at = following
    return found


class Half:
    """A register of 16 bits."""

    def __init__(self, device, bar, offset):
        in_page = offset % mmap.PAGESIZE
        with open(f"{device}/resource{bar}", "r+b") as file:
            page = mmap.mmap(file.fileno(), mmap.PAGESIZE, offset=offset - in_page)
        self.halves, self.at = memoryview(page).cast("H"), in_page // 2

    def read(self):
        return self.halves[self.at]

    def write(self, value):
        self.halves[self.at] = value


def median(device, count):
    with open(f"{device}/config", "rb") as file:
        config = file.read(256)
    found = capabilities(config)
    bar, common, _ = found[COMMON]
    notify_bar, notify, at = found[NOTIFY]
    step = struct.unpack_from("<I", config, at + 16)[0]
    queues = Half(device, bar, common + NUM_QUEUES).read()
    register = Half(device, notify_bar, notify + (queues - 1) * step)
    clock = time.perf_counter_ns
    taken = []
    for _ in range(count):
        until = clock() + PAUSE_NS
        while clock() < until:
            pass
        before = clock()
        register.write(queues - 1)
        taken.append(clock() - before)
    return statistics.median(taken)


def main():
    count = int(sys.argv[1])
    for device in glob.glob(f"{DRIVER}/virtio*"):
        print(median(f"{device}/..", count))


main()
