# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""A QEMU without a guest: this program is the driver, through QEMU's qtest protocol, and the operator, through QMP."""

import json
import os
import socket
import struct
import subprocess
import tempfile
import time

DEVICE = 4              # PCI slot
BAR_MSIX = 0xE1000000
BAR_MODERN = 0xE2000000
RINGS = 0x100000        # where the rings are in guest memory, 16 KiB each
MSI = 0x80000           # where interrupts arrive in guest memory, 4 bytes each

ACKNOWLEDGE, DRIVER, DRIVER_OK, FEATURES_OK, NEEDS_RESET = 1, 2, 4, 8, 64
NO_VECTOR = 0xFFFF


class Machine:
    """A virtual machine with a vhost-user-rdma-pci device."""

    def __init__(self, qemu, directory, path, device="", chardev="", ports=False):
        self.paths = [os.path.join(directory, name) for name in ("qtest", "qmp")]
        arguments = [
            qemu, "-machine", "q35,memory-backend=m0", "-accel", "qtest", "-m", "64M",
            "-object", "memory-backend-memfd,id=m0,size=64M,share=on", "-nodefaults", "-display", "none",
            "-qtest", f"unix:{self.paths[0]},server=on,wait=off", "-qtest-log", "none",
            "-qmp", f"unix:{self.paths[1]},server=on,wait=off",
            *(["-device", "pcie-root-port,id=p0,chassis=1"] if ports else []),
            "-chardev", f"socket,id=c0,path={path}{chardev}",
            "-device", f"vhost-user-rdma-pci,id=r0,chardev=c0{device or f',addr={DEVICE}'}"]
        for stale in self.paths:
            if os.path.exists(stale):
                os.unlink(stale)
        # A file and not a pipe, which would fill up and stop QEMU.
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                        stderr=self.errors)
        self.qtest_file = self.qmp_file = None

    def connect(self, timeout=20):
        """Waits until QEMU has made its devices."""
        self.qtest_file = self._socket(self.paths[0], timeout)
        self.qmp_file = self._socket(self.paths[1], timeout)
        self._qmp_read()
        self.qmp("qmp_capabilities")
        return self

    def _socket(self, path, timeout):
        end = time.monotonic() + timeout
        while True:
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(timeout)
            try:
                connection.connect(path)
                return connection.makefile("rw")
            except OSError:
                connection.close()
                if self.process.poll() is not None or time.monotonic() > end:
                    raise AssertionError(f"QEMU did not start: {self.end()}") from None
                time.sleep(0.01)

    def end(self):
        """Ends QEMU; returns what it said."""
        if self.qmp_file and self.process.poll() is None:
            try:
                self.qmp("quit")
            except (OSError, ValueError):
                pass
        return self.wait(10)

    def wait(self, timeout):
        """Waits for the end of QEMU, kills it if that does not come; returns what it said."""
        hung = ""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            hung = "(QEMU hung and was killed)\n"
        self.errors.seek(0)
        return self.errors.read() + hung

    def _qmp_read(self):
        while True:
            line = self.qmp_file.readline()
            if not line:
                raise ValueError("QEMU is gone")
            message = json.loads(line)
            if "event" not in message:
                return message

    def qmp(self, command, **arguments):
        """Runs a QMP command."""
        self.qmp_file.write(json.dumps({"execute": command, "arguments": arguments}) + "\n")
        self.qmp_file.flush()
        return self._qmp_read()

    def qtest(self, *words):
        """Runs a qtest command."""
        self.qtest_file.write(" ".join(hex(word) if isinstance(word, int) else word for word in words) + "\n")
        self.qtest_file.flush()
        while True:
            answer = self.qtest_file.readline().split()
            if not answer:
                raise ValueError("QEMU is gone")
            if answer[0] == "OK":
                return int(answer[1], 16) if len(answer) > 1 else None
            if answer[0] != "IRQ":
                raise ValueError(" ".join(answer))

    def pci_read(self, offset, size, function=DEVICE << 3):
        """Reads PCI configuration space."""
        self.qtest("outl", 0xCF8, 0x80000000 | function << 8 | offset & 0xFC)
        value = self.qtest("inl", 0xCFC) >> (offset & 3) * 8
        return value & (1 << size * 8) - 1

    def pci_write(self, offset, value, function=DEVICE << 3):
        """Writes 32 bits of PCI configuration space."""
        self.qtest("outl", 0xCF8, 0x80000000 | function << 8 | offset)
        self.qtest("outl", 0xCFC, value)

    def probe(self):
        """Sets up the BARs and finds the capabilities, as firmware and driver do."""
        self.pci_write(0x14, BAR_MSIX)
        self.pci_write(0x20, BAR_MODERN)
        self.pci_write(0x24, 0)
        self.pci_write(0x04, 6)
        self.capabilities, self.msix = {}, None
        position = self.pci_read(0x34, 1)
        while position:
            if self.pci_read(position, 1) == 9:
                kind = self.pci_read(position + 3, 1)
                self.capabilities[kind] = self.pci_read(position + 8, 4)
                if kind == 2:
                    self.multiplier = self.pci_read(position + 16, 4)
            elif self.pci_read(position, 1) == 0x11:
                self.msix = position
            position = self.pci_read(position + 1, 1)
        self.vectors = (self.pci_read(self.msix + 2, 2) & 0x7FF) + 1

    def common(self, offset, size, value=None):
        """Reads or writes the common configuration."""
        letter = {1: "b", 2: "w", 4: "l", 8: "q"}[size]
        address = BAR_MODERN + self.capabilities[1] + offset
        if value is None:
            return self.qtest("read" + letter, address)
        return self.qtest("write" + letter, address, value)

    def status(self, value=None):
        """Reads or writes the device status."""
        return self.common(0x14, 1, value)

    def features(self):
        """The offered features."""
        self.common(0, 4, 0)
        low = self.common(4, 4)
        self.common(0, 4, 1)
        return low | self.common(4, 4) << 32

    def config(self):
        """The device configuration space."""
        address = BAR_MODERN + self.capabilities[4]
        return b"".join(struct.pack("<I", self.qtest("readl", address + i)) for i in range(0, 64, 4))

    def interrupts(self, vector):
        """Whether `vector` has fired since it was last asked."""
        fired = self.qtest("readl", MSI + 4 * vector)
        self.qtest("writel", MSI + 4 * vector, 0)
        return fired == 0x5A00 + vector

    def start(self, interrupting):
        """Drives the device to DRIVER_OK; the first `interrupting` queues get vectors 1, 2, ..."""
        self.probe()
        self.pci_write(self.msix, 0x80000000 | self.pci_read(self.msix, 2))
        for vector in range(self.vectors):
            entry = BAR_MSIX + 16 * vector
            for word, value in enumerate((MSI + 4 * vector, 0, 0x5A00 + vector, 0)):
                self.qtest("writel", entry + 4 * word, value)
        self.status(0)
        self.status(ACKNOWLEDGE | DRIVER)
        offered = self.features()
        for word in (0, 1):
            self.common(8, 4, word)
            self.common(12, 4, offered >> 32 * word & 0xFFFFFFFF)
        self.status(ACKNOWLEDGE | DRIVER | FEATURES_OK)
        assert self.status() & FEATURES_OK
        self.common(0x10, 2, 0)
        for index in range(self.common(0x12, 2)):
            ring = RINGS + index * 0x4000
            self.common(0x16, 2, index)
            self.common(0x1A, 2, 1 + index if index < interrupting else NO_VECTOR)
            for field, address in ((0x20, ring), (0x28, ring + 0x2000), (0x30, ring + 0x3000)):
                self.common(field, 4, address)
                self.common(field + 4, 4, 0)
            self.common(0x1C, 2, 1)
        self.status(ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK)

    def notify(self, index):
        """Rings a queue, as a process with its page mapped does."""
        self.common(0x16, 2, index)
        offset = self.common(0x1E, 2) * self.multiplier
        self.qtest("writel", BAR_MODERN + self.capabilities[2] + offset, index)
