#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Tests of QEMU's vhost-user-rdma-pci against a back end that serves nothing and without a guest.

Usage: qemu/test/run.py [--qemu QEMU] [TEST...]

The last line is "N passed, M failed".
"""

import argparse
import os
import select
import struct
import subprocess
import sys
import tempfile
import time
import traceback

import vhost_user as vu
from machine import NEEDS_RESET, DRIVER_OK, MSI, Machine
from vhost_user import BackEnd, rdma_config

TESTS = []


def test(function):
    """Marks a test."""
    TESTS.append(function)
    return function


class Context:
    """What a test needs: makes back ends and machines, and ends them."""

    def __init__(self, qemu, directory):
        self.qemu, self.directory = qemu, directory
        self.path = os.path.join(directory, "rdma.sock")
        self.machines, self.backends = [], []

    def backend(self, **options):
        """A back end on the usual socket."""
        self.backends.append(BackEnd(self.path, **options))
        return self.backends[-1]

    def machine(self, **options):
        """A machine whose device is there."""
        return self.unconnected(**options).connect()

    def unconnected(self, **options):
        """A machine that may fail to start."""
        self.machines.append(Machine(self.qemu, self.directory, self.path, **options))
        return self.machines[-1]

    def started(self, reconnect=False, **options):
        """A back end and a machine whose driver has set DRIVER_OK."""
        backend = self.backend(**options)
        machine = self.machine(chardev=",reconnect-ms=50" if reconnect else "")
        machine.start(interrupting=struct.unpack_from("<H", backend.config, 6)[0] + 2)
        backend.wait(backend.running, "all queues running")
        return backend, machine

    def refused(self, words, **options):
        """QEMU must refuse the back end, and say why."""
        self.backend(**options)
        machine = self.unconnected()
        errors = machine.wait(30)
        assert machine.process.returncode == 1, (machine.process.returncode, errors)
        assert words in errors, errors

    def end(self):
        """Ends everything; returns what the machines said."""
        said = ""
        for machine in self.machines:
            alive = machine.process.poll() is None
            said += machine.end()
            assert not alive or machine.process.returncode == 0, f"QEMU ended with {machine.process.returncode}: {said}"
            assert machine.process.returncode in (0, 1), f"QEMU ended with {machine.process.returncode}: {said}"
        for backend in self.backends:
            backend.close()
        return said


def until(condition, what, timeout=20):
    """Waits until `condition()` is true."""
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"timed out: {what}")
        time.sleep(0.01)


def readable(fd, timeout):
    """Takes the events of an eventfd, if there are any in time."""
    if not select.select([fd], [], [], timeout)[0]:
        return False
    os.read(fd, 8)
    return True


@test
def identity(context):
    """PCI identity, number of vectors, queues and their sizes, configuration space, notification pages."""
    context.backend(completion=3, doorbell=2)
    machine = context.machine()
    machine.probe()
    assert machine.pci_read(0, 4) == 0x106A1AF4
    assert machine.pci_read(8, 4) >> 16 == 0x0280
    assert machine.vectors == 6, machine.vectors
    assert machine.common(0x12, 2) == 7
    sizes = []
    for index in range(7):
        machine.common(0x16, 2, index)
        sizes.append(machine.common(0x18, 2))
        assert machine.common(0x1E, 2) == index
    assert sizes == [64, 256, 256, 256, 256, 2, 2], sizes
    assert machine.multiplier == 4096
    assert machine.config() == rdma_config(3, 2)


@test
def options(context):
    """The properties that override defaults."""
    context.backend()
    machine = context.machine(device=",addr=4,vectors=3,page-per-vq=off")
    machine.probe()
    assert machine.vectors == 3
    assert machine.multiplier == 4


@test
def most_queues(context):
    """64 queues in all."""
    context.started(completion=31, doorbell=31)
    context.machines[0].notify(63)


@test
def features(context):
    """The back end's features reach the guest, and only those that QEMU can serve."""
    device = 1 << 0 | 1 << 23 | 1 << 50 | 1 << 63
    context.backend(features=vu.VERSION_1 | vu.EVENT_IDX | vu.RING_RESET | device)
    machine = context.machine()
    machine.probe()
    assert machine.features() == vu.VERSION_1 | vu.EVENT_IDX | device, hex(machine.features())


@test
def refuses_bad_queue_numbers(context):
    """Configurations the device cannot have."""
    for completion, doorbell in ((0, 1), (1, 0), (32, 31), (65535, 65535)):
        context.refused("each must be at least 1", completion=completion, doorbell=doorbell, queues=64)
        context.backends.pop().close()
    context.refused("it supports only 4", queues=4)


@test
def refuses_back_end_without_config(context):
    """Without a configuration space there is no device."""
    context.refused("VHOST_USER_PROTOCOL_F_CONFIG", protocol=vu.ALL_PROTOCOL_FEATURES & ~vu.F_CONFIG)


@test
def needs_chardev(context):
    """The chardev is mandatory."""
    process = subprocess.run([context.qemu, "-machine", "q35", "-accel", "qtest", "-display", "none", "-nodefaults",
                              "-device", "vhost-user-rdma-pci"], capture_output=True, text=True, timeout=30,
                             check=False)
    assert process.returncode == 1
    assert "'chardev' is missing" in process.stderr, process.stderr


@test
def waits_for_back_end(context):
    """With reconnect-ms, QEMU waits for a back end that comes later."""
    machine = context.unconnected(chardev=",reconnect-ms=50")
    time.sleep(0.5)
    assert machine.process.poll() is None
    context.backend()
    machine.connect().probe()
    assert machine.vectors == 5


@test
def notifications_and_interrupts(context):
    """Each queue's page reaches its own kick, each call its own vector; doorbell queues have no call."""
    backend, machine = context.started(completion=2, doorbell=2)
    assert backend.num == {0: 64, 1: 256, 2: 256, 3: 256, 4: 2, 5: 2}, backend.num
    # QEMU kicks each queue once when it starts, for what the guest put there before.
    for index in range(6):
        assert readable(backend.kick[index], 5)
    # A doorbell is rung by processes: any width of store must do.
    for index in range(6):
        machine.notify(index)
        assert [i for i in range(6) if readable(backend.kick[i], 5 if i == index else 0)] == [index]
    assert backend.call[4] is None and backend.call[5] is None
    for index in range(4):
        os.write(backend.call[index], struct.pack("=Q", 1))
        until(lambda: machine.qtest("readl", MSI + 4 * (1 + index)), f"interrupt of queue {index}")
        assert [vector for vector in range(machine.vectors) if machine.interrupts(vector)] == [1 + index]


@test
def stop_and_continue(context):
    """QMP stop stops the rings, cont starts them where they were, and the device is not reset."""
    backend, machine = context.started()
    for _ in range(3):
        backend.clear()
        machine.qmp("stop")
        messages = [(request, word) for request, word in backend.messages if request == vu.GET_VRING_BASE]
        assert [word for _, word in messages] == [0, 1, 2, 3, 4], backend.messages
        assert not backend.running()
        backend.base = {index: 7 + index for index in range(5)}
        machine.qmp("cont")
        backend.wait(backend.running, "all queues running again")
        assert vu.RESET_DEVICE not in backend.requests()
    assert machine.status() & (DRIVER_OK | NEEDS_RESET) == DRIVER_OK


@test
def stop_keeps_ring_positions(context):
    """The positions that the back end gives at a stop are those it gets at the next start."""
    backend, machine = context.started()
    backend.base = {index: 3 for index in range(5)}
    # A position counts only if the guest's rings agree: make 3 entries available and used.
    for index in range(5):
        for offset in (0x2002, 0x3002):
            machine.qtest("writew", 0x100000 + index * 0x4000 + offset, 3)
    machine.qmp("stop")
    backend.wait(lambda: not backend.enabled, "the stop")
    backend.base = {}
    machine.qmp("cont")
    backend.wait(backend.running, "the start")
    assert backend.base == {index: 3 for index in range(5)}, backend.base


@test
def reset_by_driver(context):
    """Status 0 stops the rings first, then resets the device."""
    backend, machine = context.started()
    backend.clear()
    machine.status(0)
    backend.wait(lambda: vu.RESET_DEVICE in backend.requests(), "reset")
    requests = backend.requests()
    assert requests.count(vu.RESET_DEVICE) == 1
    assert requests.count(vu.GET_VRING_BASE) == 5
    assert requests.index(vu.RESET_DEVICE) > max(i for i, r in enumerate(requests) if r == vu.GET_VRING_BASE)
    backend.clear()
    machine.start(4)
    backend.wait(backend.running, "all queues running again")


@test
def reset_of_system(context):
    """A system reset resets the device, running or stopped."""
    backend, machine = context.started()
    for stopped in (False, True):
        if stopped:
            machine.start(4)
            machine.qmp("stop")
        backend.clear()
        machine.qmp("system_reset")
        backend.wait(lambda: vu.RESET_DEVICE in backend.requests(), f"reset, stopped: {stopped}")


@test
def no_reset_unless_negotiated(context):
    """A back end without RESET_DEVICE is not sent one."""
    backend, machine = context.started(protocol=vu.ALL_PROTOCOL_FEATURES & ~vu.F_RESET_DEVICE)
    machine.status(0)
    machine.start(4)
    backend.wait(backend.running, "all queues running again")
    assert vu.RESET_DEVICE not in backend.requests()


@test
def configuration_changes(context):
    """A change interrupts, moves the generation and shows new contents; the numbers of queues stay."""
    backend, machine = context.started()
    generation = machine.common(0x15, 1)
    changed = bytearray(rdma_config(9, 9))
    changed[10] = 1
    backend.change_config(bytes(changed))
    until(lambda: machine.interrupts(0), "configuration interrupt")
    assert machine.common(0x15, 1) != generation
    changed[6:10] = struct.pack("<HH", 2, 1)
    assert machine.config() == bytes(changed)


@test
def configuration_change_before_driver(context):
    """A change before the driver is there is harmless, and seen later."""
    backend = context.backend()
    machine = context.machine()
    changed = rdma_config(2, 1, b"\1")
    backend.change_config(changed)
    machine.start(4)
    until(lambda: machine.config() == changed, "new configuration")


@test
def back_end_dies_and_returns(context):
    """The guest is told; the device is quiet, can be reset, and runs again with the next back end."""
    backend, machine = context.started(reconnect=True)
    backend.close()
    until(lambda: machine.status() & NEEDS_RESET, "DEVICE_NEEDS_RESET")
    until(lambda: machine.interrupts(0), "configuration interrupt")
    assert machine.config() == rdma_config(2, 1)
    for index in range(5):
        machine.notify(index)
    again = context.backend()
    again.wait(again.running, "all queues running in the new back end")
    assert machine.status() & NEEDS_RESET
    machine.status(0)
    again.wait(lambda: vu.RESET_DEVICE in again.requests(), "reset")
    machine.start(4)
    again.wait(again.running, "all queues running after the reset")
    assert not machine.status() & NEEDS_RESET


@test
def driver_starts_without_back_end(context):
    """A driver that sets the device up while there is no back end gets the next one."""
    backend, machine = context.started(reconnect=True)
    backend.close()
    until(lambda: machine.status() & NEEDS_RESET, "DEVICE_NEEDS_RESET")
    machine.status(0)
    machine.start(4)
    assert machine.status() & (DRIVER_OK | NEEDS_RESET) == DRIVER_OK
    machine.qmp("stop")
    machine.qmp("cont")
    again = context.backend()
    again.wait(again.running, "all queues running in the new back end")
    assert machine.status() & (DRIVER_OK | NEEDS_RESET) == DRIVER_OK


@test
def back_end_dies_while_stopped(context):
    """The loss is told when the virtual machine goes on, and the rings start only then."""
    backend, machine = context.started(reconnect=True)
    machine.qmp("stop")
    backend.close()
    again = context.backend()
    again.wait(lambda: vu.GET_CONFIG in again.requests(), "the connection")
    time.sleep(0.1)
    assert not again.enabled
    machine.qmp("cont")
    again.wait(again.running, "all queues running in the new back end")
    assert machine.status() & NEEDS_RESET


@test
def back_end_dies_for_good(context):
    """Without reconnect-ms the machine goes on without the device."""
    backend, machine = context.started()
    backend.close()
    until(lambda: machine.status() & NEEDS_RESET, "DEVICE_NEEDS_RESET")
    machine.qmp("stop")
    machine.qmp("cont")
    machine.status(0)
    machine.start(4)
    machine.qmp("system_reset")
    machine.probe()
    assert machine.config() == rdma_config(2, 1)


@test
def different_back_end_is_refused(context):
    """A back end with other queues or fewer features cannot take over; one like the first can."""
    backend, machine = context.started(reconnect=True)
    backend.close()
    for options in ({"completion": 1, "doorbell": 2}, {"doorbell": 2}, {"features": vu.VERSION_1}):
        wrong = context.backend(**options)
        wrong.wait(lambda: wrong.connections >= 2, "refused connections")
        wrong.close()
    right = context.backend()
    right.wait(right.running, "all queues running in the right back end")
    assert machine.status() & NEEDS_RESET


@test
def connection_lost_at_any_message(context):
    """Whatever message the connection breaks on, from the first to the last of a start, QEMU recovers."""
    backend, machine = context.started(reconnect=True)
    # The messages of a connection that starts the rings at once: what reconnecting costs.
    backend.clear()
    backend.drop()
    backend.wait(lambda: backend.connections == 2 and backend.running(), "reconnection")
    length = len(backend.messages)
    assert length > 40, backend.messages
    for at in range(length):
        before = backend.connections
        backend.die_at = at
        backend.drop()
        backend.wait(lambda: backend.connections >= before + 2, f"new connections, broken at {at}")
        backend.wait(backend.running, f"all queues running, broken at {at}")
    assert machine.status() & NEEDS_RESET


@test
def connection_lost_while_realizing(context):
    """The same when the device is made: QEMU tries again."""
    for at in range(20):
        backend = context.backend(die_at=at)
        # The last messages have no answer, so the loss may be noticed only afterwards: hence reconnect-ms.
        machine = context.machine(chardev=",reconnect-ms=50")
        backend.wait(lambda: backend.connections == (1 if backend.die_at is not None else 2), f"broken at {at}")
        machine.start(4)
        backend.wait(backend.running, f"all queues running, broken at {at}")
        machine.end()
        backend.close()


@test
def connection_lost_while_stopping(context):
    """A back end that dies while the rings are being stopped."""
    backend, machine = context.started(reconnect=True)
    for step in range(11):
        for action in (lambda: machine.status(0), lambda: machine.qmp("stop"), lambda: machine.qmp("system_reset")):
            before = backend.connections
            backend.break_after(step)
            action()
            backend.die_at = None
            backend.drop()
            backend.wait(lambda: backend.connections > before, f"new connection, step {step}")
            machine.qmp("cont")
            machine.start(4)
            backend.wait(backend.running, f"all queues running, step {step}")


@test
def unplug(context):
    """Unplugging ends the connection, plugging the device in again makes a new one."""
    backend = context.backend()
    machine = context.machine(device=",bus=p0", ports=True)
    for plugged in range(1, 4):
        backend.wait(lambda: backend.connections == plugged and backend.connection, f"connection {plugged}")
        machine.qmp("device_del", id="r0")
        # The guest's part, as its ACPI code does it: eject slot 0 of the hot-plug bus with the number 0.
        machine.qtest("outl", 0xCD0, 0)
        machine.qtest("outl", 0xCC8, 1)
        backend.wait(lambda: not backend.connection, "end of the connection")
        until(lambda: "return" in machine.qmp("device_add", driver="vhost-user-rdma-pci", id="r0", chardev="c0", bus="p0"),
              "plugging in again")


@test
def not_migratable(context):
    """Migration is refused with the reason."""
    _, machine = context.started()
    answer = machine.qmp("migrate", uri="tcp:127.0.0.1:1")
    assert "non-migratable device '0000:00:04.0/vhost-user-rdma'" in answer["error"]["desc"], answer


@test
def status_query(context):
    """The operator's view knows the device."""
    _, machine = context.started()
    answer = machine.qmp("x-query-virtio-status", path="/machine/peripheral/r0/virtio-backend")
    assert answer["return"]["name"] == "virtio-rdma", answer


def main():
    """Runs the tests."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--qemu", help="the qemu-system-x86_64 to test (default: the one build.sh makes)")
    parser.add_argument("tests", nargs="*", help="the tests to run (default: all)")
    arguments = parser.parse_args()
    if not arguments.qemu:
        build = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "build.sh")
        arguments.qemu = subprocess.run([build], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    passed = failed = 0
    for function in TESTS:
        if arguments.tests and function.__name__ not in arguments.tests:
            continue
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="qemu-test-") as directory:
            context = Context(arguments.qemu, directory)
            error = said = ""
            try:
                function(context)
            except Exception:  # a test's failure of any kind is reported, not raised
                error = traceback.format_exc()
            try:
                said = context.end()
            except AssertionError as problem:
                error += str(problem)
        seconds = time.monotonic() - begin
        if error:
            failed += 1
            print(f"FAIL {function.__name__} ({seconds:.1f} s)\n{error}\nQEMU said:\n{said}")
        else:
            passed += 1
            print(f"ok   {function.__name__} ({seconds:.1f} s)")
        sys.stdout.flush()
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
