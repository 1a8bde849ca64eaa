# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""A vhost-user back end that serves nothing: it answers the front end and writes down what was asked."""

import os
import socket
import struct
import threading

(GET_FEATURES, SET_FEATURES, SET_OWNER) = (1, 2, 3)
(SET_MEM_TABLE, SET_VRING_NUM, SET_VRING_ADDR, SET_VRING_BASE, GET_VRING_BASE) = (5, 8, 9, 10, 11)
(SET_VRING_KICK, SET_VRING_CALL, SET_VRING_ERR) = (12, 13, 14)
(GET_PROTOCOL_FEATURES, SET_PROTOCOL_FEATURES, GET_QUEUE_NUM, SET_VRING_ENABLE) = (15, 16, 17, 18)
(SET_BACKEND_REQ_FD, GET_CONFIG) = (21, 24)
(RESET_DEVICE, GET_MAX_MEM_SLOTS, ADD_MEM_REG, REM_MEM_REG) = (34, 36, 37, 38)
BACKEND_CONFIG_CHANGE_MSG = 2

F_MQ, F_REPLY_ACK, F_BACKEND_REQ, F_CONFIG, F_RESET_DEVICE, F_MEM_SLOTS = (1 << bit for bit in (0, 3, 5, 9, 13, 15))
ALL_PROTOCOL_FEATURES = F_MQ | F_REPLY_ACK | F_BACKEND_REQ | F_CONFIG | F_RESET_DEVICE | F_MEM_SLOTS

VERSION_1 = 1 << 32
EVENT_IDX = 1 << 29
INDIRECT_DESC = 1 << 28
PROTOCOL_FEATURES = 1 << 30
RING_RESET = 1 << 40

MAC = bytes.fromhex("525400123456")


def rdma_config(completion, doorbell, rest=b""):
    """The device's configuration space."""
    return (MAC + struct.pack("<HH", completion, doorbell) + rest).ljust(64, b"\0")


class BackEnd:
    """Listens on `path` until closed; one connection at a time."""

    def __init__(self, path, completion=2, doorbell=1, features=VERSION_1 | EVENT_IDX | INDIRECT_DESC | 1,
                 protocol=ALL_PROTOCOL_FEATURES, queues=None, die_at=None):
        self.config = rdma_config(completion, doorbell)
        self.features = features
        self.protocol = protocol
        self.queues = 2 + completion + doorbell if queues is None else queues
        self.die_at = die_at            # close the connection on the message with this number
        self.count = 0                  # messages on the present connection
        self.messages = []              # (request, first 32-bit word of the payload)
        self.connections = 0
        self.kick, self.call, self.enabled, self.base, self.num = {}, {}, {}, {}, {}
        self.request_socket = None
        self.connection = None
        self.changed = threading.Condition()
        self.path = path
        self.listener = socket.socket(socket.AF_UNIX)
        if os.path.exists(path):
            os.unlink(path)
        self.listener.bind(path)
        self.listener.listen(8)
        self.closing = False
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def close(self):
        """Ends the back end, as a crash would."""
        self.closing = True
        self.drop()
        try:
            self.listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self.thread.join(10)
        self.listener.close()

    def drop(self):
        """Closes the present connection."""
        with self.changed:
            if self.connection:
                try:
                    self.connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass

    def wait(self, condition, what, timeout=20):
        """Waits until `condition()` is true."""
        with self.changed:
            if not self.changed.wait_for(condition, timeout):
                raise AssertionError(f"timed out: {what}; last messages: {self.messages[-20:]}")

    def requests(self):
        """The requests since the last clear()."""
        with self.changed:
            return [request for request, _ in self.messages]

    def clear(self):
        """Forgets the messages so far."""
        with self.changed:
            self.messages.clear()

    def running(self):
        """Whether all queues run."""
        return len(self.enabled) == self.queues and all(self.enabled.values())

    def break_after(self, messages):
        """Breaks the present connection after so many more messages."""
        with self.changed:
            self.die_at = self.count + messages

    def change_config(self, config):
        """Changes the configuration space and tells the front end."""
        self.config = config
        self.request_socket.sendall(struct.pack("<III", BACKEND_CONFIG_CHANGE_MSG, 1, 0))

    def _serve(self):
        while not self.closing:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            with self.changed:
                self.connection = connection
                self.connections += 1
            self.count = 0
            try:
                while self._message(connection):
                    self.count += 1
            except OSError:
                pass
            with self.changed:
                self.connection = None
                connection.close()
                for fd in [*self.kick.values(), *self.call.values()]:
                    if fd is not None:
                        os.close(fd)
                self.kick, self.call, self.enabled, self.base, self.num = {}, {}, {}, {}, {}
                if self.request_socket:
                    self.request_socket.close()
                    self.request_socket = None
                self.changed.notify_all()

    def _message(self, connection):
        header, fds, _, _ = socket.recv_fds(connection, 12, 16)
        if len(header) < 12:
            return False
        request, flags, size = struct.unpack("<III", header)
        payload = b""
        while len(payload) < size:
            part = connection.recv(size - len(payload))
            if not part:
                return False
            payload += part
        if self.die_at is not None and self.count == self.die_at:
            self.die_at = None
            for fd in fds:
                os.close(fd)
            return False
        with self.changed:
            word = struct.unpack_from("<I", payload)[0] if len(payload) >= 4 else 0
            self.messages.append((request, word))
            reply = self._handle(request, payload, fds)
            if reply is None and flags & 8:
                reply = struct.pack("<Q", 0)
            self.changed.notify_all()
        if reply is not None:
            connection.sendall(struct.pack("<III", request, 5, len(reply)) + reply)
        return True

    def _vring_fd(self, table, payload, fds):
        (value,) = struct.unpack("<Q", payload)
        index = value & 0xFF
        if table.get(index) is not None:
            os.close(table[index])
        table[index] = None if value & 0x100 else fds.pop()

    def _handle(self, request, payload, fds):
        reply = None
        if request == GET_FEATURES:
            reply = struct.pack("<Q", self.features | PROTOCOL_FEATURES)
        elif request == GET_PROTOCOL_FEATURES:
            reply = struct.pack("<Q", self.protocol)
        elif request == GET_QUEUE_NUM:
            reply = struct.pack("<Q", self.queues)
        elif request == GET_MAX_MEM_SLOTS:
            reply = struct.pack("<Q", 32)
        elif request == GET_CONFIG:
            offset, size, config_flags = struct.unpack_from("<III", payload)
            reply = struct.pack("<III", offset, size, config_flags) + self.config[offset:offset + size]
        elif request == SET_BACKEND_REQ_FD:
            self.request_socket = socket.socket(fileno=fds.pop())
        elif request == SET_VRING_NUM:
            index, value = struct.unpack("<II", payload)
            self.num[index] = value
        elif request == SET_VRING_BASE:
            index, value = struct.unpack("<II", payload)
            self.base[index] = value
        elif request == GET_VRING_BASE:
            index, _ = struct.unpack("<II", payload)
            self.enabled.pop(index, None)
            reply = struct.pack("<II", index, self.base.get(index, 0))
        elif request == SET_VRING_ENABLE:
            index, value = struct.unpack("<II", payload)
            self.enabled[index] = bool(value)
        elif request == SET_VRING_KICK:
            self._vring_fd(self.kick, payload, fds)
        elif request == SET_VRING_CALL:
            self._vring_fd(self.call, payload, fds)
        for fd in fds:
            os.close(fd)
        return reply
