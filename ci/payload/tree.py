#!/usr/bin/python3 -IS
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""tree.py DIRECTORY FILES: makes a tree like that of a kernel's sources, the same each time: FILES files of mostly a few KiB, the
odd one up to 1 MiB, in directories of different depths, with symbolic links; and beside it DIRECTORY.sums, for `sha256sum -c`."""
import hashlib
import os
import random
import sys


def main():
    top, count = sys.argv[1], int(sys.argv[2])
    chance = random.Random(5)
    text = chance.randbytes(1 << 20)
    os.mkdir(top)
    directories = ["."]
    sums = []
    for number in range(count):
        if number % 13 == 0:
            # Deep in places: each new one is in one of the last few.
            parent = chance.choice(directories[-5:] if chance.random() < 0.7 else directories)
            path = f"{parent}/dir{number}"
            if path.count("/") < 9:
                os.mkdir(f"{top}/{path}")
                directories.append(path)
        size = min(int(chance.lognormvariate(8.9, 1.3)), 1 << 20)
        start = chance.randrange(len(text) - size + 1)
        data = number.to_bytes(4, "little") + text[start : start + size]
        path = f"{chance.choice(directories)}/file{number}.c"
        with open(f"{top}/{path}", "wb") as file:
            file.write(data)
        sums.append(f"{hashlib.sha256(data).hexdigest()}  {path}\n")
        if number % 100 == 0:
            os.symlink(os.path.basename(path), f"{top}/{path}.link")
    with open(f"{top}.sums", "w", encoding="ascii") as file:
        file.writelines(sums)


main()
