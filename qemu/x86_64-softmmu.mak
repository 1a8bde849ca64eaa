# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# The devices in the QEMU that build.sh makes: a q35 machine with the virtio devices our guests use, and no more, which halves
# the time to build it.
CONFIG_Q35=y
CONFIG_PCIE_PORT=y
CONFIG_ISA_DEBUG=y
CONFIG_VTD=y
CONFIG_VIRTIO_PCI=y
CONFIG_VIRTIO_9P=y
CONFIG_VIRTIO_BLK=y
CONFIG_VIRTIO_NET=y
CONFIG_VIRTIO_RNG=y
CONFIG_VIRTIO_SERIAL=y
CONFIG_VHOST_USER_RDMA=y
