#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""rdma-core's own tests on one device, each in a process of its own: one that crashes or hangs loses itself alone.

  suite.py DEVICE [FIRST]          runs them from number FIRST (0 if not given) on

Runs in the guests of VM lanes, where Debian has the tests among the documentation of rdma-core. Vendors' tests are left
out. Writes JSON, a line each: {"total": N}, then {"start": NAME} and {"test": NAME, "outcome": O, "reason": R, "text": T,
"seconds": S} for each test, where O is ok, skip, fail, error, crash or timeout, and T is what there is to know about one of
the last four. Ends early if the tests do nothing but time out: the kernel is beyond help then."""
import faulthandler
import gc
import gzip
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import unittest

SOURCE = "/usr/share/doc/rdma-core/tests"
PLACE = "/tmp/rdma-core-suite"
VENDORS = re.compile(r"test_(mlx[45]|efa|cuda|irdma|hns|mana|bnxt|ionic|erdma)")
LIMIT = 60
# A process that does not even end when it is told to hangs in the kernel.
GRACE = 10
HOPELESS = 4


def unpack():
    """Puts the tests where they can be imported."""
    shutil.rmtree(PLACE, ignore_errors=True)
    os.makedirs(f"{PLACE}/tests")
    for name in os.listdir(SOURCE):
        if VENDORS.match(name) or not name.endswith((".py", ".py.gz")):
            continue
        opener = gzip.open if name.endswith(".gz") else open
        with opener(f"{SOURCE}/{name}", "rb") as packed:
            with open(f"{PLACE}/tests/{name.removesuffix('.gz')}", "wb") as file:
                shutil.copyfileobj(packed, file)


def load(device):
    """All tests, in the order of their names."""
    sys.path[:0] = [f"{PLACE}/tests", PLACE]
    sys.argv[1:] = ["--dev", device]
    from args_parser import parser

    parser.parse_args()
    import tests

    found = {}
    for module in tests.__test_modules__:
        for suite in unittest.defaultTestLoader.loadTestsFromModule(module):
            for test in suite:
                found[test.id()] = test
    return [found[name] for name in sorted(found)]


def last_line(text):
    """What a traceback says in the end."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def verdict(result):
    """Outcome, reason and text of a test that came to its end."""
    for outcome, found in (("error", result.errors), ("fail", result.failures)):
        if found:
            text = "\n".join(trace for _, trace in found)
            return outcome, last_line(found[0][1]), text
    if result.unexpectedSuccesses:
        return "fail", "unexpected success", ""
    if result.skipped:
        return "skip", result.skipped[0][1], ""
    return "ok", "", ""


def child(test, pipe, output):
    """Runs a test and reports its end."""
    os.setsid()
    for number in (1, 2):
        os.dup2(output, number)
    faulthandler.enable()
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    result = unittest.TestResult()
    test.run(result)
    with os.fdopen(pipe, "w", encoding="utf-8") as file:
        json.dump(verdict(result), file)
    # What goes wrong when its objects are destroyed counts as well.
    del test, result
    gc.collect()
    os._exit(0)


def wait(pid, until):
    """The status of a child that ends in time, or None."""
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        if time.monotonic() > until:
            return None
        time.sleep(0.005)


def kill(pid):
    """Kills a child and what it has started."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def run(tests, number):
    """Runs one test in a process of its own. Nobody but that process keeps the test, so that it can be destroyed there."""
    read_end, write_end = os.pipe()
    start = time.monotonic()
    with tempfile.TemporaryFile() as output:
        pid = os.fork()
        if pid == 0:
            test = tests[number]
            tests.clear()
            os.close(read_end)
            try:
                child(test, write_end, output.fileno())
            finally:
                os._exit(99)
        os.close(write_end)
        status = wait(pid, start + LIMIT + GRACE)
        seconds = time.monotonic() - start
        kill(pid)
        if status is None:
            wait(pid, time.monotonic() + GRACE)
        os.set_blocking(read_end, False)
        with os.fdopen(read_end, encoding="utf-8") as file:
            try:
                said = file.read() or ""
            except OSError:
                said = ""
        output.seek(0)
        printed = output.read().decode(errors="replace")
    if status is None:
        outcome, reason, text = "timeout", f"still there {LIMIT + GRACE} s after its start", ""
    elif os.WIFSIGNALED(status):
        outcome, reason, text = "crash", signal.strsignal(os.WTERMSIG(status)), ""
    elif status == 0 and said:
        outcome, reason, text = json.loads(said)
    elif seconds >= LIMIT:
        outcome, reason, text = "timeout", f"no end after {LIMIT} s", ""
    else:
        outcome, reason, text = "crash", f"ended with {os.waitstatus_to_exitcode(status)} and without a result", ""
    text = (text + "\n" + printed).strip() if outcome not in ("ok", "skip") else ""
    return {"outcome": outcome, "reason": reason, "text": text[-6000:], "seconds": round(seconds, 2)}


def say(**what):
    """Writes a line."""
    print(json.dumps(what), flush=True)


def main(device, first="0"):
    unpack()
    # Newer Pythons start processes in another way by default; the tests start some with what only a fork can pass on.
    multiprocessing.set_start_method("fork")
    tests = load(device)
    names = [test.id() for test in tests]
    say(total=len(names))
    in_a_row = 0
    for number in range(int(first), len(names)):
        name = names[number]
        say(start=name)
        with open("/dev/kmsg", "w", encoding="ascii") as kernel_log:
            kernel_log.write(f"suite.py: {device}: {name}\n")
        result = run(tests, number)
        say(test=name, **result)
        in_a_row = in_a_row + 1 if result["outcome"] == "timeout" else 0
        if in_a_row == HOPELESS:
            sys.exit(f"{HOPELESS} tests in a row timed out")


main(*sys.argv[1:])
