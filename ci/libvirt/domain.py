#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""domain.py NUMBER: prints the XML of docs/libvirt/domain.xml for a VM of the lane `libvirt`.

All that is marked "card" there stays as it is. The VM is emulated, smaller, and boots from the disks
of its host, read-only; a share brings the driver, and a channel the commands that it is to run."""

import os
import sys
import xml.etree.ElementTree as ElementTree

DOCUMENT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "domain.xml")
# As the launcher has them (ci/xtask/src/vm).
KERNEL_WORDS = "console=ttyS0 quiet panic=1 no_timer_check tsc=reliable mitigations=off audit=0"


def main():
    number = int(sys.argv[1])
    with open(DOCUMENT, encoding="utf-8") as file:
        text = file.read().replace("vm1", f"vm{number}").replace("34:01", f"34:{number:02x}")
    ElementTree.register_namespace("qemu", "http://libvirt.org/schemas/domain/qemu/1.0")
    domain = ElementTree.fromstring(text)

    domain.set("type", "qemu")
    memory = domain.find("memory")
    memory.set("unit", "MiB")
    memory.text = "512"
    # With room for another processor, TCG makes atomic instructions atomic for those who share the memory.
    vcpu = domain.find("vcpu")
    vcpu.set("current", "1")
    vcpu.text = "2"

    system = domain.find("os")
    system.remove(system.find("boot"))
    for name, value in [
        ("kernel", "/var/lib/libvirt/images/vmlinuz"),
        ("initrd", "/var/lib/libvirt/images/initrd.img"),
        ("cmdline", f"{KERNEL_WORDS} vr.number={number}"),
    ]:
        ElementTree.SubElement(system, name).text = value

    cpu = domain.find("cpu")
    cpu.set("mode", "maximum")
    # TCG runs `rep movsb` very slowly, and guests use it where ERMS is offered.
    for name in ["erms", "fsrm"]:
        ElementTree.SubElement(cpu, "feature", policy="disable", name=name)

    devices = domain.find("devices")
    for tag in ["disk", "serial", "console"]:
        devices.remove(devices.find(tag))
    more = f"""<devices>
        <disk type='block' device='disk'>
          <driver name='qemu' type='raw'/><source dev='/dev/vda'/><target dev='vda' bus='virtio'/><readonly/>
        </disk>
        <disk type='block' device='disk'>
          <driver name='qemu' type='raw'/><source dev='/dev/vdb'/><target dev='vdb' bus='virtio'/><readonly/>
        </disk>
        <filesystem type='mount' accessmode='passthrough'>
          <source dir='/srv/payload'/><target dir='payload'/><readonly/>
        </filesystem>
        <serial type='file'><source path='/var/log/libvirt/qemu/vm{number}-console.log'/></serial>
        <channel type='unix'>
          <source mode='bind' path='/var/lib/libvirt/qemu/channel/vm{number}-control'/>
          <target type='virtio' name='control'/>
        </channel>
      </devices>"""
    devices.extend(ElementTree.fromstring(more))
    print(ElementTree.tostring(domain, encoding="unicode"))


main()
