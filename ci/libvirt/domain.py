#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""domain.py NUMBER [--guest] [--vfio-user]: prints the XML of docs/libvirt/domain.xml, or of
domain-vfio-user.xml, for a VM of the lane `libvirt`.

All that is marked "card" there stays as it is, but the VM is emulated, and smaller. With --guest it
boots a guest of the bed: from the files that `namespaces` puts beside the disk of the document, which
it has instead; a share brings the driver, and a channel the commands that the guest is to run."""

import os
import sys
import xml.etree.ElementTree as ElementTree

HERE = os.path.dirname(os.path.abspath(__file__))
# The QEMU of trixie-backports, where `namespaces` has it.
STOCK = "/opt/qemu-stock/qemu-system-x86_64"
IMAGES = "/var/lib/libvirt/images"
# As the launcher has them (ci/xtask/src/vm).
KERNEL_WORDS = "console=ttyS0 quiet panic=1 no_timer_check tsc=reliable mitigations=off audit=0"


def emulate(domain):
    """Without KVM, as the launcher does it."""
    domain.set("type", "qemu")
    memory = domain.find("memory")
    memory.set("unit", "MiB")
    memory.text = "512"
    # With room for another processor, TCG makes atomic instructions atomic for those who share the memory.
    vcpu = domain.find("vcpu")
    vcpu.set("current", "1")
    vcpu.text = "2"
    cpu = domain.find("cpu")
    cpu.set("mode", "maximum")
    # TCG runs `rep movsb` very slowly, and guests use it where ERMS is offered.
    for name in ["erms", "fsrm"]:
        ElementTree.SubElement(cpu, "feature", policy="disable", name=name)


def boot_guest(domain, number):
    """A guest that runs commands."""
    system = domain.find("os")
    system.remove(system.find("boot"))
    for name, value in [
        ("kernel", f"{IMAGES}/vmlinuz"),
        ("initrd", f"{IMAGES}/initrd.img"),
        ("cmdline", f"{KERNEL_WORDS} vr.number={number}"),
    ]:
        ElementTree.SubElement(system, name).text = value
    devices = domain.find("devices")
    for tag in ["disk", "serial", "console"]:
        devices.remove(devices.find(tag))
    more = f"""<devices>
        <disk type='file' device='disk'>
          <driver name='qemu' type='raw'/><source file='{IMAGES}/root.img'/><target dev='vda' bus='virtio'/><readonly/>
        </disk>
        <disk type='file' device='disk'>
          <driver name='qemu' type='raw'/><source file='{IMAGES}/modules.img'/><target dev='vdb' bus='virtio'/><readonly/>
        </disk>
        <filesystem type='mount' accessmode='passthrough'>
          <source dir='/payload'/><target dir='payload'/><readonly/>
        </filesystem>
        <serial type='file'><source path='/var/log/libvirt/qemu/vm{number}-console.log'/></serial>
        <channel type='unix'>
          <source mode='bind' path='/run/vm{number}-control'/>
          <target type='virtio' name='control'/>
        </channel>
      </devices>"""
    devices.extend(ElementTree.fromstring(more))


def main():
    number = int(sys.argv[1])
    by_vfio_user = "--vfio-user" in sys.argv[2:]
    document = "domain-vfio-user.xml" if by_vfio_user else "domain.xml"
    with open(os.path.join(HERE, document), encoding="utf-8") as file:
        text = file.read().replace("vm1", f"vm{number}").replace("34:01", f"34:{number:02x}")
    ElementTree.register_namespace("qemu", "http://libvirt.org/schemas/domain/qemu/1.0")
    domain = ElementTree.fromstring(text)
    emulate(domain)
    if by_vfio_user:
        devices = domain.find("devices")
        devices.find("emulator").text = STOCK
        # It comes without boot ROMs.
        ElementTree.SubElement(devices.find("interface"), "rom", enabled="no")
    if "--guest" in sys.argv[2:]:
        boot_guest(domain, number)
    print(ElementTree.tostring(domain, encoding="unicode"))


main()
