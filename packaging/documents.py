#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The documents, for where less is beside them than in the repository.

    documents.py PACKAGE DIRECTORY    copies those of a Debian package to a directory
    documents.py                      a preprocessor of mdBook (book.toml)

Links to what is not there lead to the pages of the project instead."""

import json
import os
import posixpath
import re
import shutil
import sys
from glob import glob

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Those of a package, and their names there. The first one is laid out as in the repository.
PACKAGES = {
    "vhost-device-rdma": {
        path: path
        for pattern in ["README.md", "SECURITY.md", "device/README.md", "docs/*.md", "docs/*/*"]
        for path in sorted(glob(pattern, root_dir=ROOT))
        if path != "docs/SUMMARY.md"
    },
    "libvirtio-rdma1": {"guest-driver/provider/README.md": "README.md"},
    "virtio-rdma-dkms": {"guest-driver/kernel/README.md": "README.md"},
}
# Up to the end of the target, which has no spaces.
LINK = re.compile(r"(\]\()([^)\s]+)(?=\))")


def project():
    """Where the pages of the project are, as the packages say."""
    with open(f"{ROOT}/packaging/debian/control") as control:
        return re.search(r"^Homepage: (\S+)$", control.read(), re.M)[1]


def led(text, path, there, folders=()):
    """The text of the document at `path`, with links to what is `there`, which has the names there
    of paths of the repository, and to `folders`; all others lead to the project."""

    def target(match):
        link, mark, anchor = match[2].partition("#")
        if not link or "://" in link or link.startswith("mailto:"):
            return match[0]
        to = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
        if to in there or to in folders:
            beside = posixpath.dirname(there[path]) or "."
            new = posixpath.relpath(there.get(to, to), beside)
        else:
            kind = "tree" if os.path.isdir(f"{ROOT}/{to}") else "blob"
            new = f"{project()}/{kind}/HEAD/{to}"
        return match[1] + new + mark + anchor

    return LINK.sub(target, text)


def copy(package, directory):
    there = PACKAGES[package]
    folders = {posixpath.dirname(name) for path, name in there.items() if path == name}
    for path, name in there.items():
        to = f"{directory}/{name}"
        os.makedirs(os.path.dirname(to), exist_ok=True)
        if path.endswith(".md"):
            with open(f"{ROOT}/{path}") as document, open(to, "w") as copied:
                copied.write(led(document.read(), path, there, folders))
        else:
            shutil.copyfile(f"{ROOT}/{path}", to)
        os.chmod(to, 0o644)


def book():
    """mdBook's pages are those of docs/, and it copies what else is there."""
    _, whole = json.load(sys.stdin)
    paths = glob("docs/**", root_dir=ROOT, recursive=True)
    there = {path: path for path in paths if os.path.isfile(f"{ROOT}/{path}")}

    def pages(items):
        for item in items:
            chapter = item.get("Chapter") if isinstance(item, dict) else None
            if chapter:
                path = chapter.get("source_path") or chapter.get("path")
                if path:
                    chapter["content"] = led(chapter["content"], f"docs/{path}", there)
                pages(chapter["sub_items"])

    pages(whole.get("items") or whole.get("sections"))
    json.dump(whole, sys.stdout)


if sys.argv[1:2] == ["supports"]:
    sys.exit()
elif len(sys.argv) == 3:
    copy(*sys.argv[1:])
else:
    book()
