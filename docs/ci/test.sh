#!/bin/sh
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# An example of a test with RDMA between two VMs: it runs in both. VM is the number of this one; the
# other one has the address 10.10.0.N. Replace the two commands by those of your software.
set -eu
case $VM in
1)
    ibv_devinfo -d vrdma0
    ibv_rc_pingpong -d vrdma0 -g 1 -c
    ;;
2)
    # The server may come later than this.
    for try in 1 2 3 4 5 6 7 8 9 10; do
        ibv_rc_pingpong -d vrdma0 -g 1 -c 10.10.0.1 && exit 0
        sleep 1
    done
    exit 1
    ;;
esac
