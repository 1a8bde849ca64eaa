// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Lanes `rxe-interop` and `rxe-tap`: our device in vm1 and Soft-RoCE (rxe) in vm2, with a switch
//! between them, or on hosts that are network namespaces;
//! each as server and as client, and with lost packets. In the latter also with our device's VXLAN,
//! whose other end is the `vxlan` device of the other host's kernel.
//!
//! Each combination is a case and a cell of the lane's table.

use anyhow::{ensure, Context, Result};

use super::columns::{Column, Columns, Loses};
use super::stock::{self, Ends};
use super::storage::{self, Fio};
use super::{Case, Fixture, Lane};
use crate::images::{Image, Kernel};
use crate::vm::{host_address, namespace, Bed, FrontEnd, Hosts};

/// The VM with our device, and that with rxe.
const OURS: u8 = 1;
const RXE: u8 = 2;

const COLUMNS: Columns = Columns {
    all: &WAYS,
    set_up,
    skips,
};

/// With the kernel's VXLAN.
const VXLAN: Columns = Columns {
    all: &WAYS,
    set_up: set_up_vxlan,
    skips,
};

/// MTU of the network between hosts with VXLAN, which is that of the VMs' network interfaces, too.
const VXLAN_MTU: u16 = 9000;

const WAYS: [Column; 4] = [
    Column {
        name: "rxe is server",
        ends: (RXE, OURS),
        lost: 0,
        mtu: None,
    },
    Column {
        name: "rxe is client",
        ends: (OURS, RXE),
        lost: 0,
        mtu: None,
    },
    Column {
        name: "rxe is server, 1 % lost",
        ends: (RXE, OURS),
        lost: 100,
        mtu: None,
    },
    Column {
        name: "rxe is client, 1 % lost",
        ends: (OURS, RXE),
        lost: 100,
        mtu: None,
    },
];

/// What Soft-RoCE does not get by with, against itself neither (docs/interop.md).
fn skips(fixture: &Fixture, name: &str, column: &Column) -> Option<&'static str> {
    let hangs = name.ends_with(NVME)
        && fixture.kernel == Kernel::Backports
        && column.ends.1 == RXE
        && column.lost != 0;
    hangs.then_some("Soft-RoCE 7.x hangs, as it does against itself")
}

/// The lane.
pub fn lane() -> Lane {
    let runs = || {
        let cases = |kernel: &Kernel| (*kernel, CASES.to_vec());
        Kernel::STABLE.iter().map(cases).collect()
    };
    Lane {
        name: "rxe-interop",
        about: "our device in one VM and Soft-RoCE in another: stock tools and perftest",
        with_device: true,
        vms: 2,
        memory: 1024,
        bare: 0,
        hosts: Hosts::Switch(1500),
        front_end: FrontEnd::VhostUser,
        image: Image::Storage,
        runs,
    }
}

/// A case for a tool.
macro_rules! tool {
    ($name:expr, $run:expr) => {
        tool!(COLUMNS, $name, $run)
    };
    ($columns:ident, $name:expr, $run:expr) => {
        Case {
            name: $name,
            run: |fixture| $columns.run(fixture, $name, Loses::Yes, $run),
        }
    };
}

/// A case for a tool that does not count on lost packets.
macro_rules! unreliable {
    ($name:literal, $run:expr) => {
        unreliable!(COLUMNS, $name, $run)
    };
    ($columns:ident, $name:literal, $run:expr) => {
        Case {
            name: $name,
            run: |fixture| $columns.run(fixture, $name, Loses::No, $run),
        }
    };
}

/// A case for an operation of perftest and a transport, which consists of one for each variant.
macro_rules! perftest {
    ($operation:literal, $transport:literal, $loses:ident) => {
        Case {
            name: concat!("perftest: ", $operation, " ", $transport),
            run: |fixture| COLUMNS.perftest(fixture, $operation, $transport, Loses::$loses),
        }
    };
}

const NVME: &str = "NVMe over Fabrics";

const CASES: &[Case] = &[
    tool!("ibv_rc_pingpong", |fixture, ends| reliable_pingpong(
        fixture,
        ends,
        "ibv_rc_pingpong",
        &["-c -n 200", "-c -e -n 200", "-c -s 65536 -n 100"]
    )),
    unreliable!("ibv_uc_pingpong", |fixture, ends| stock::pingpong(
        fixture,
        ends,
        "ibv_uc_pingpong",
        &["-c -n 200", "-c -e -n 200", "-c -s 65536 -n 100"]
    )),
    unreliable!("ibv_ud_pingpong", |fixture, ends| stock::pingpong(
        fixture,
        ends,
        "ibv_ud_pingpong",
        &["-c -s 1024", "-c -s 1024 -e"]
    )),
    tool!("ibv_srq_pingpong", |fixture, ends| reliable_pingpong(
        fixture,
        ends,
        "ibv_srq_pingpong",
        &["-c -n 200", "-c -e -n 200", "-c -q 64 -n 200"]
    )),
    tool!("rping", stock::rping),
    tool!("ucmatose", stock::ucmatose),
    unreliable!("udaddy", stock::udaddy),
    unreliable!("mckey", |fixture, ends| {
        let times = if ends.1 == RXE { 30 } else { 1 };
        stock::mckey_of(fixture, ends, times)
    }),
    tool!("rstream", stock::rstream),
    tool!("cmtime", stock::cmtime),
    tool!("ib_send_bw -R", stock::send_bw),
    tool!(NVME, nvme),
    perftest!("send", "RC", Yes),
    perftest!("send", "UC", No),
    perftest!("send", "UD", No),
    perftest!("write", "RC", Yes),
    perftest!("write", "UC", No),
    perftest!("read", "RC", Yes),
    perftest!("atomic", "RC", Yes),
];

/// What is sent through the kernel's VXLAN, last in their lane: the VMs are started anew for them.
const VXLAN_CASES: &[Case] = &[
    tool!(VXLAN, "kernel's vxlan: ibv_rc_pingpong", |fixture, ends| {
        reliable_pingpong(
            fixture,
            ends,
            "ibv_rc_pingpong",
            &["-c -n 200", "-c -s 65536 -n 100"],
        )
    }),
    unreliable!(VXLAN, "kernel's vxlan: ibv_uc_pingpong", |fixture, ends| {
        stock::pingpong(
            fixture,
            ends,
            "ibv_uc_pingpong",
            &["-c -n 200", "-c -s 65536 -n 100"],
        )
    }),
    unreliable!(VXLAN, "kernel's vxlan: ibv_ud_pingpong", |fixture, ends| {
        stock::pingpong(fixture, ends, "ibv_ud_pingpong", &["-c -s 1024"])
    }),
    tool!(VXLAN, "kernel's vxlan: rping", stock::rping),
    unreliable!(VXLAN, "kernel's vxlan: mckey", |fixture, ends| {
        let times = if ends.1 == RXE { 30 } else { 1 };
        stock::mckey_of(fixture, ends, times)
    }),
    tool!(VXLAN, "kernel's vxlan: ib_send_bw -R", stock::send_bw),
    tool!(VXLAN, "kernel's vxlan: NVMe over Fabrics", nvme),
];

/// A ping-pong that ends with a message. Where the acknowledgement of that is lost, Soft-RoCE does not
/// send it again for a queue pair that is gone, and our end gives up: once in a hundred runs at 1 % lost
/// (docs/interop.md). Where packets are lost, what ended so is tried a second time.
fn reliable_pingpong(
    fixture: &mut Fixture,
    ends: Ends,
    tool: &str,
    options: &[&str],
) -> Result<()> {
    for option in options {
        let run = |fixture: &mut Fixture| stock::pingpong(fixture, ends, tool, &[option]);
        match run(fixture) {
            Err(error) if gave_up(&error) && fixture.loses_packets()? => {
                println!("         {tool} {option}: once more after RETRY_EXC_ERR");
                run(fixture)?;
            }
            result => result?,
        }
    }
    Ok(())
}

/// Whether a tool said that its peer did not answer.
fn gave_up(error: &anyhow::Error) -> bool {
    format!("{error:#}").contains("transport retry counter exceeded")
}

/// Blocks that the client of NVMe over Fabrics reads and writes at a time, how long, and how many MiB.
const BLOCKS: [u32; 2] = [4 << 10, 64 << 10];
const STORAGE_SECONDS: u64 = 10;
const STORAGE_SIZE: u32 = 16;

/// A device in the memory of one VM, written and read again by the other, with checksums.
fn nvme(fixture: &mut Fixture, (server, client): Ends) -> Result<()> {
    let stop = |fixture: &Fixture| -> Result<()> {
        fixture.vm(client)?.sh("/payload/storage-client stop")?;
        let stop = "/payload/storage-server stop";
        fixture.vm(server)?.sh(stop).map(drop)
    };
    stop(fixture)?;
    let address = storage::address(server);
    let serve = format!("/payload/storage-server nvme memory {address} rdma");
    fixture.vm(server)?.sh(&serve)?;
    let connect = format!("/payload/storage-client nvme {address} rdma");
    let said = fixture.vm(client)?.sh(&connect)?;
    let device = said.lines().last().unwrap_or_default();
    for block in BLOCKS {
        let fio = Fio {
            vm: client,
            jobs: 1,
            size: STORAGE_SIZE,
            ..Fio::new(device.to_owned(), block, STORAGE_SECONDS)
        };
        let [reads, writes] = fio.run(fixture)?.total;
        ensure!(reads > 0 && writes > 0, "{reads} reads, {writes} writes");
    }
    stop(fixture)
}

/// The same on hosts whose bridges have TAPs of the VMs: packets are lost by our device.
pub fn at_taps() -> Lane {
    Lane {
        name: "rxe-tap",
        about: "the same on two hosts, which are network namespaces with bridges; and in VXLAN",
        hosts: Hosts::Tap(1500, ""),
        runs: || {
            let cases = |kernel: &Kernel| (*kernel, [CASES, VXLAN_CASES].concat());
            Kernel::STABLE.iter().map(cases).collect()
        },
        ..lane()
    }
}

/// Makes vm2 one with rxe alone, and loses packets from now on as the column says.
fn set_up(fixture: &mut Fixture, column: &Column) -> Result<()> {
    make_rxe(fixture)?;
    if let Some(switch) = &fixture.bed.switch {
        switch.steer(RXE, false);
        switch.lose(column.lost);
        return Ok(());
    }
    // When the other device ends, its VM gets RoCEv2.
    fixture.bed.others.clear();
    lose(fixture, column)
}

/// The same on hosts with VXLAN between them, of our device on one, and of the kernel on the other.
fn set_up_vxlan(fixture: &mut Fixture, column: &Column) -> Result<()> {
    let hosts = Hosts::TapVxlan(VXLAN_MTU);
    if fixture.plan.hosts != hosts {
        fixture.plan.hosts = hosts;
        fixture.restart()?;
    }
    make_rxe(fixture)?;
    let bed = &mut fixture.bed;
    if !bed.others.is_empty() {
        // It has the UDP port that the kernel is to have.
        bed.others.clear();
        use_kernel_vxlan(bed)?;
    }
    lose(fixture, column)
}

/// Gives the host of vm2 a `vxlan` device: what the VM sends for RoCEv2 goes there, and what comes
/// by it to the VM. All else goes by the network between the hosts, as before.
fn use_kernel_vxlan(bed: &Bed) -> Result<()> {
    let (own, other) = (host_address(RXE), host_address(OURS));
    let tap = namespace::TAP;
    let mtu = VXLAN_MTU - 50;
    for command in [
        format!("ip link add vx0 type vxlan id 1 dstport 4789 local {own} remote {other}"),
        format!("ip link set vx0 mtu {mtu} master bridge up"),
        // The addresses of VMs are at the other port.
        "bridge link set dev vx0 learning off flood off mcast_flood off bcast_flood off isolated on"
            .to_owned(),
        "bridge link set dev wire isolated on".to_owned(),
        format!("tc qdisc add dev {tap} clsact"),
        format!(
            "tc filter add dev {tap} ingress protocol ip u32 match ip protocol 17 0xff \
             match ip dport 4791 0xffff action mirred egress redirect dev vx0"
        ),
    ] {
        bed.on_host(RXE, &command)?;
    }
    Ok(())
}

/// Makes vm2 one with rxe alone.
fn make_rxe(fixture: &Fixture) -> Result<()> {
    let vm = fixture.vm(RXE)?;
    vm.sh("! grep -q ^virtio_rdma /proc/modules || rmmod virtio_rdma")?;
    vm.sh("test -e /sys/class/infiniband/rxe0 || \
         { modprobe rdma_rxe && rdma link add rxe0 type rxe netdev eth0; }")?;
    vm.sh("/payload/wait-active rxe0").map(drop)
}

/// Our device loses packets as the column says, both ways: rxe loses none.
fn lose(fixture: &Fixture, column: &Column) -> Result<()> {
    let device = fixture.bed.device.as_ref().context("no device")?;
    let faults = match column.lost {
        0 => "off".to_owned(),
        lost => format!("seed=1,loss={}", f64::from(lost) / 1e4),
    };
    device.set_faults(usize::from(OURS), &faults)
}
