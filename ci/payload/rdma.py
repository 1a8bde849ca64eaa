#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""RDMA with every byte checked, through stock pyverbs. Runs in the guests of VM lanes.

  rdma.py target PORT              serves one other end: does with its memory and queue pair what that asks for by TCP
  rdma.py verify HOST PORT         every operation at many sizes and alignments against a target
  rdma.py onesided HOST PORT       WRITE and READ against a target that is frozen meanwhile, checked after it
  rdma.py flow HOST PORT COUNT     numbered messages to a target that checks order and contents (COUNT 0: for ever)
  rdma.py writes HOST PORT COUNT   RDMA WRITEs of numbered blocks, each read back and compared (COUNT 0: for ever)
  rdma.py many COUNT               so many queue pairs and completion queues at once, connected to each other in pairs
  rdma.py scale COUNT              so many queue pairs and completion queues at once, and what the first and the last cost
"""
import json
import os
import random
import socket
import sys
import time
import zlib

import pyverbs.enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context, get_device_list
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

ACCESS = (
    e.IBV_ACCESS_LOCAL_WRITE
    | e.IBV_ACCESS_REMOTE_WRITE
    | e.IBV_ACCESS_REMOTE_READ
)
SIZE = 4 << 20
DEPTH = 64
INLINE = 64
SIZES = (1, 2, 3, 7, 8, 63, 64, 65, 255, 1000, 4095, 4096, 4097, 65536, 100001, 1048575, 1048576)


class Failure(Exception):
    """Something was not as it has to be."""


def check(good, text):
    """Fails with `text` unless `good`."""
    if not good:
        raise Failure(text)


def noise(seed, length):
    """Bytes that a seed stands for."""
    return random.Random(seed).randbytes(length)


def gid_index():
    """The index of this guest's IPv4 GID."""
    with os.popen("/payload/gid") as pipe:
        return int(pipe.read())


def status_name(status):
    """The name of a completion status."""
    for name in dir(e):
        if name.startswith("IBV_WC_") and getattr(e, name) == status and name.endswith(("SUCCESS", "ERR")):
            return name
    return str(status)


class Device:
    """The guest's RDMA device with a protection domain, and how it is addressed."""

    def __init__(self):
        devices = get_device_list()
        check(devices, "no RDMA device")
        self.context = Context(name=devices[0].name.decode())
        self.pd = PD(self.context)
        self.gid_index = gid_index()
        self.gid = self.context.query_gid(1, self.gid_index).gid

    def queue_pair(self, cq, depth=DEPTH, sges=4, inline=INLINE):
        """A reliable connected queue pair."""
        cap = QPCap(depth, depth, sges, sges, inline)
        return QP(self.pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=cap, sq_sig_all=0))

    def connect(self, qp, number, gid):
        """Takes a queue pair from reset to RTS."""
        route = GlobalRoute(dgid=GID(gid), sgid_index=self.gid_index, hop_limit=64)
        attr = QPAttr(port_num=1)
        attr.qp_access_flags = ACCESS
        attr.path_mtu = e.IBV_MTU_1024
        attr.dest_qp_num = number
        attr.rq_psn = attr.sq_psn = 17
        attr.max_rd_atomic = attr.max_dest_rd_atomic = 8
        attr.min_rnr_timer = 12
        attr.timeout = 14
        attr.retry_cnt = 7
        attr.rnr_retry = 7
        attr.ah_attr = AHAttr(port_num=1, is_global=1, gr=route)
        qp.to_rts(attr)


class End:
    """One end: a queue pair, its completion queue, and registered memory."""

    def __init__(self):
        self.device = Device()
        self.cq = CQ(self.device.context, 4 * DEPTH)
        self.mr = MR(self.device.pd, SIZE, ACCESS)
        self.qp = self.device.queue_pair(self.cq)

    def info(self):
        """What the other end has to know."""
        return {"qpn": self.qp.qp_num, "gid": self.device.gid, "address": self.mr.buf, "rkey": self.mr.rkey}

    def connect(self, other):
        """Connects to the end that `other` describes."""
        self.device.connect(self.qp, other["qpn"], other["gid"])

    def post_recv(self, number, offset, length):
        """Posts a receive."""
        self.qp.post_recv(RecvWR(wr_id=number, num_sge=1, sg=[SGE(self.mr.buf + offset, length, self.mr.lkey)]))

    def post(self, opcode, sges, number=0, remote=None, flags=0, imm=0):
        """Posts to the send queue: `sges` is a list of (offset, length), `remote` is (address, rkey)."""
        sg = [SGE(self.mr.buf + offset, length, self.mr.lkey) for offset, length in sges]
        wr = SendWR(wr_id=number, opcode=opcode, num_sge=len(sg), sg=sg, imm_data=imm, send_flags=flags | e.IBV_SEND_SIGNALED)
        if remote:
            wr.set_wr_rdma(remote[1], remote[0])
        self.qp.post_send(wr)

    def poll(self, count, timeout=60):
        """Waits for so many completions."""
        got = []
        until = time.monotonic() + timeout
        while len(got) < count:
            got += self.cq.poll(count - len(got))[1]
            check(time.monotonic() < until, f"{len(got)} of {count} completions after {timeout} s")
        return got

    def good(self, count=1, timeout=60):
        """Waits for so many good completions."""
        done = self.poll(count, timeout)
        for wc in done:
            check(wc.status == e.IBV_WC_SUCCESS, f"completion {wc.wr_id}: {status_name(wc.status)}")
        return done


class Lines:
    """JSON, a line each, over TCP."""

    def __init__(self, connection):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self.file = connection.makefile("r")

    def send(self, message):
        """Sends one."""
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self):
        """Receives one; None at the end."""
        line = self.file.readline()
        return json.loads(line) if line else None

    def ask(self, **message):
        """Sends one and returns the answer to it."""
        self.send(message)
        answer = self.receive()
        check(answer is not None, "the target has gone")
        check("error" not in answer, f"the target: {answer.get('error')}")
        return answer


def tell(end):
    """Says what it has, for those who attack it."""
    print("end", json.dumps(end.info()), flush=True)


def target(port):
    """Serves one other end."""
    end = End()
    listener = socket.create_server(("", int(port)))
    connection, _ = listener.accept()
    tell(end)
    lines = Lines(connection)
    lines.send(end.info())
    end.connect(lines.receive())
    lines.send({})
    while (request := lines.receive()) is not None:
        try:
            lines.send(serve(end, **request))
        except Exception as error:  # whatever it is, the other end wants to know
            lines.send({"error": f"{type(error).__name__}: {error}"})
            raise


def serve(end, do, offset=0, length=0, seed=0, count=1):
    """Does what the other end asks for."""
    if do == "fill":
        end.mr.write(noise(seed, length), length, offset)
    elif do == "crc":
        return {"crc": zlib.crc32(end.mr.read(length, offset))}
    elif do == "recv":
        for number in range(count):
            end.post_recv(number, offset, length)
    elif do == "poll":
        return {"done": [[wc.opcode, wc.byte_len, wc.imm_data, wc.wc_flags] for wc in end.good(count)]}
    elif do == "sink":
        sink(end, count, length)
    return {}


def block(number, length):
    """The contents of message `number`."""
    return number.to_bytes(8, "little") * (length // 8)


def sink(end, count, length):
    """Receives `count` numbered messages and checks that each comes once, in order and whole."""
    posted = expected = 0
    while posted < min(count, DEPTH):
        end.post_recv(posted % DEPTH, posted % DEPTH * length, length)
        posted += 1
    while expected < count:
        for wc in end.good(1, timeout=300):
            check(wc.byte_len == length, f"message {expected}: {wc.byte_len} bytes")
            data = end.mr.read(length, wc.wr_id * length)
            check(data == block(expected, length), f"message {expected} is not what was sent")
            expected += 1
            if posted < count:
                end.post_recv(wc.wr_id, wc.wr_id * length, length)
                posted += 1


def reach(host, port):
    """Connects to a target; returns this end, the line to it, and what it said of itself."""
    end = End()
    tell(end)
    lines = Lines(socket.create_connection((host, int(port)), timeout=60))
    lines.connection.settimeout(None)
    other = lines.receive()
    lines.send(end.info())
    lines.receive()
    end.connect(other)
    return end, lines, other


def verify(host, port):
    """Every operation at many sizes and alignments."""
    end, lines, other = reach(host, port)
    rkey = other["rkey"]
    transfers = total = 0
    for number, size in enumerate(SIZES):
        here, there = 3 + number, 4096 - 5 - number
        address = other["address"] + there
        data = noise(number, size)
        third = size // 3
        split = [(here, third), (here + third, third), (here + 2 * third, size - 2 * third)] if size >= 3 else [(here, size)]

        def arrived(what, wanted=data, at=there):
            answer = lines.ask(do="crc", offset=at, length=len(wanted))
            check(answer["crc"] == zlib.crc32(wanted), f"{what} of {len(wanted)} bytes: wrong data arrived")

        end.mr.write(data, size, here)
        runs = [
            ("WRITE", e.IBV_WR_RDMA_WRITE, [(here, size)], 0),
            ("WRITE, three SGEs", e.IBV_WR_RDMA_WRITE, split, 0),
            ("WRITE with immediate", e.IBV_WR_RDMA_WRITE_WITH_IMM, [(here, size)], 0),
            ("SEND", e.IBV_WR_SEND, [(here, size)], 0),
            ("SEND, three SGEs", e.IBV_WR_SEND, split, 0),
            ("SEND with immediate", e.IBV_WR_SEND_WITH_IMM, [(here, size)], 0),
        ]
        if size <= INLINE:
            runs.append(("WRITE, inline", e.IBV_WR_RDMA_WRITE, split, e.IBV_SEND_INLINE))
            runs.append(("SEND, inline", e.IBV_WR_SEND, split, e.IBV_SEND_INLINE))
        for what, opcode, sges, flags in runs:
            lines.ask(do="fill", offset=there, length=size, seed=1000 + number)
            receives = opcode != e.IBV_WR_RDMA_WRITE
            if receives:
                lines.ask(do="recv", offset=there, length=size)
            end.post(opcode, sges, remote=(address, rkey), flags=flags, imm=0x01020304 + number)
            end.good()
            if receives:
                ((got, length, imm, wc_flags),) = lines.ask(do="poll")["done"]
                writes = opcode == e.IBV_WR_RDMA_WRITE_WITH_IMM
                check(got == (e.IBV_WC_RECV_RDMA_WITH_IMM if writes else e.IBV_WC_RECV), f"{what}: opcode {got}")
                check(length == size, f"{what}: {length} bytes instead of {size}")
                with_imm = opcode != e.IBV_WR_SEND
                check(bool(wc_flags & e.IBV_WC_WITH_IMM) == with_imm, f"{what}: wc_flags {wc_flags:#x}")
                check(not with_imm or imm == 0x01020304 + number, f"{what}: immediate {imm:#x}")
            arrived(what)
            transfers += 1
            total += size
        for what, sges in (("READ", [(here, size)]), ("READ, three SGEs", split)):
            seed = 2000 + 2 * number + len(sges)
            lines.ask(do="fill", offset=there, length=size, seed=seed)
            end.mr.write(b"\0" * size, size, here)
            end.post(e.IBV_WR_RDMA_READ, sges, remote=(address, rkey))
            end.good()
            check(end.mr.read(size, here) == noise(seed, size), f"{what} of {size} bytes: wrong data arrived")
            transfers += 1
            total += size
        # Not one byte beside the place.
        guard = noise(3000 + number, 16)
        for at in (there - 16, there + size):
            lines.ask(do="fill", offset=at, length=16, seed=3000 + number)
        end.mr.write(data, size, here)
        end.post(e.IBV_WR_RDMA_WRITE, [(here, size)], remote=(address, rkey))
        end.good()
        for at in (there - 16, there + size):
            arrived("a write beside the place", guard, at)
        transfers += 1
        total += size
    lines.ask(do="recv", offset=0, length=0)
    end.post(e.IBV_WR_SEND, [(0, 0)])
    end.good()
    ((_, length, _, _),) = lines.ask(do="poll")["done"]
    check(length == 0, f"an empty SEND of {length} bytes")
    end.post(e.IBV_WR_RDMA_WRITE, [(0, 0)], remote=(other["address"], rkey))
    end.good()
    print(f"verified {transfers + 2} transfers, {total} bytes")


def wait_for_file(path, seconds=120):
    """Waits until the launcher has made a file."""
    until = time.monotonic() + seconds
    while not os.path.exists(path):
        check(time.monotonic() < until, f"no {path} after {seconds} s")
        time.sleep(0.05)


def onesided(host, port):
    """WRITE and READ against a target that is frozen between /tmp/frozen and /tmp/thawed."""
    end, lines, other = reach(host, port)
    size, half = 1 << 20, SIZE // 2
    remote = (other["address"], other["rkey"])
    lines.ask(do="fill", offset=half, length=size, seed=1)
    print("ready", flush=True)
    wait_for_file("/tmp/frozen")
    data = noise(2, size)
    end.mr.write(data, size, 0)
    for number in range(16):
        part = size // 16
        end.post(e.IBV_WR_RDMA_WRITE, [(number * part, part)], remote=(remote[0] + number * part, remote[1]))
    end.good(16)
    end.post(e.IBV_WR_RDMA_READ, [(half, size)], remote=(remote[0] + half, remote[1]))
    end.good()
    check(end.mr.read(size, half) == noise(1, size), "READ of a frozen VM: wrong data")
    end.post(e.IBV_WR_RDMA_READ, [(half, size)], remote=remote)
    end.good()
    check(end.mr.read(size, half) == data, "READ of what was written to a frozen VM: wrong data")
    print("done while frozen", flush=True)
    wait_for_file("/tmp/thawed")
    crc = lines.ask(do="crc", offset=0, length=size)["crc"]
    check(crc == zlib.crc32(data), "the target does not see what was written while it was frozen")
    print("verified")


def flow(host, port, count):
    """Numbered messages, many under way."""
    end, lines, _ = reach(host, port)
    count, length = int(count), 4096
    endless = count == 0
    if endless:
        count = 1 << 40
    lines.send({"do": "sink", "count": count, "length": length})
    posted = done = 0
    while done < count:
        while posted < count and posted - done < DEPTH // 2:
            slot = posted % DEPTH
            end.mr.write(block(posted, length), length, slot * length)
            end.post(e.IBV_WR_SEND, [(slot * length, length)], number=posted)
            posted += 1
        for wc in end.good(1, timeout=300):
            check(wc.wr_id == done, f"completion {wc.wr_id} where {done} is due")
            done += 1
            if done % 100 == 0:
                print(f"done {done}", flush=True)
    answer = lines.receive()
    check(answer == {}, f"the target: {answer}")
    print(f"verified {count} messages")


def writes(host, port, count):
    """Numbered blocks, written and read back."""
    end, _, other = reach(host, port)
    count, length = int(count), 16384
    number = 0
    while count == 0 or number < count:
        remote = (other["address"] + number % 64 * length, other["rkey"])
        data = block(number, length)
        end.mr.write(data, length, 0)
        end.post(e.IBV_WR_RDMA_WRITE, [(0, length)], remote=remote)
        end.post(e.IBV_WR_RDMA_READ, [(length, length)], remote=remote)
        end.good(2, timeout=300)
        check(end.mr.read(length, length) == data, f"block {number} is not what was written")
        number += 1
        if number % 50 == 0:
            print(f"done {number}", flush=True)
    print(f"verified {number} blocks")


def many(count):
    """So many queue pairs and completion queues, each used once, then all destroyed."""
    count = int(count)
    device = Device()
    mr = MR(device.pd, 128 * count, ACCESS)
    cqs = [CQ(device.context, 16) for _ in range(count)]
    qps = [device.queue_pair(cq, depth=4, sges=1, inline=0) for cq in cqs]
    for number, qp in enumerate(qps):
        device.connect(qp, qps[number ^ 1].qp_num, device.gid)
    for number, qp in enumerate(qps):
        place = mr.buf + 128 * number
        mr.write(noise(number, 64), 64, 128 * number)
        qp.post_recv(RecvWR(wr_id=1, num_sge=1, sg=[SGE(place + 64, 64, mr.lkey)]))
    for number, qp in enumerate(qps):
        sg = [SGE(mr.buf + 128 * number, 64, mr.lkey)]
        qp.post_send(SendWR(wr_id=2, opcode=e.IBV_WR_SEND, num_sge=1, sg=sg, send_flags=e.IBV_SEND_SIGNALED))
    for number, cq in enumerate(cqs):
        seen = []
        until = time.monotonic() + 60
        while len(seen) < 2:
            for wc in cq.poll(2)[1]:
                check(wc.status == e.IBV_WC_SUCCESS, f"QP {number}: {status_name(wc.status)}")
                seen.append(wc.wr_id)
            check(time.monotonic() < until, f"QP {number}: completions {seen} after 60 s")
        check(sorted(seen) == [1, 2], f"QP {number}: completions {seen}")
        check(mr.read(64, 128 * number + 64) == noise(number ^ 1, 64), f"QP {number} received wrong data")
    print("all there", flush=True)
    wait_for_file("/tmp/counted")
    for qp in qps:
        qp.close()
    for cq in cqs:
        cq.close()
    mr.close()
    print("all gone")


def available():
    """What the guest has left, bytes."""
    with open("/proc/meminfo", encoding="ascii") as file:
        lines = dict(line.split(":") for line in file)
    return int(lines["MemAvailable"].split()[0]) * 1024


def scale(count):
    """So many queue pairs, each with a completion queue of its own, and what the first and the last of them cost."""
    count = int(count)
    device = Device()

    def create(what, make):
        before, took, made = available(), [], []
        for number in range(count):
            start = time.monotonic_ns()
            made.append(make(number))
            took.append(time.monotonic_ns() - start)
        some = count // 64
        # The lower quartile: what it takes when nobody else wants the processor.
        first, last = (sorted(part)[len(part) // 4] // 1000 for part in (took[:some], took[-some:]))
        print(f"{what} first {first} last {last} bytes {(before - available()) // count}", flush=True)
        return made

    cqs = create("cq", lambda _: CQ(device.context, 16))
    qps = create("qp", lambda number: device.queue_pair(cqs[number], depth=4, sges=1, inline=0))
    # They work: the last two, and those of one that lives beside the first.
    for a, b in ((0, count - 1), (count - 2, count // 2)):
        device.connect(qps[a], qps[b].qp_num, device.gid)
        device.connect(qps[b], qps[a].qp_num, device.gid)
        mr = MR(device.pd, 128, ACCESS)
        mr.write(noise(a, 64), 64, 0)
        qps[b].post_recv(RecvWR(wr_id=1, num_sge=1, sg=[SGE(mr.buf + 64, 64, mr.lkey)]))
        sg = [SGE(mr.buf, 64, mr.lkey)]
        qps[a].post_send(SendWR(wr_id=2, opcode=e.IBV_WR_SEND, num_sge=1, sg=sg, send_flags=e.IBV_SEND_SIGNALED))
        for cq in (cqs[a], cqs[b]):
            until = time.monotonic() + 60
            while not (polled := cq.poll(1)[1]):
                check(time.monotonic() < until, "no completion after 60 s")
            check(polled[0].status == e.IBV_WC_SUCCESS, status_name(polled[0].status))
        check(mr.read(64, 64) == noise(a, 64), "wrong data")
    print("all there", flush=True)
    wait_for_file("/tmp/counted")
    start = time.monotonic()
    for thing in qps + cqs:
        thing.close()
    print(f"all gone in {time.monotonic() - start:.1f} s", flush=True)


COMMANDS = {"target": target, "verify": verify, "onesided": onesided, "flow": flow, "writes": writes, "many": many, "scale": scale}

if __name__ == "__main__":
    try:
        COMMANDS[sys.argv[1]](*sys.argv[2:])
    except Failure as failure:
        sys.exit(f"rdma.py {sys.argv[1]}: {failure}")
