// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Lanes `wire`, `wire-switch` and `wire-tap`: VMs of two device processes, as on two hosts. The stock
//! tools, data that is verified, perftest, and storage, over IPv4 and IPv6, with both usual MTUs, without
//! and with lost packets; and what the lane `smoke` has. Then what the devices capture of their packets, as
//! Wireshark decodes it.
//!
//! Each combination is a case and a cell of the lane's table.

use anyhow::{ensure, Context, Result};

use super::columns::{Column, Columns, Loses};
use super::stock::{self, Ends, LONG, USUAL};
use super::storage::{Fio, Protocol, Storage};
use super::tools::Table;
use super::{roce, smoke, storage, Case, Fixture, Lane};
use crate::images::{Image, Kernel};
use crate::setup;
use crate::vm::{namespace, Capture, DeviceProcess, FrontEnd, Hosts, SHORT};

/// How long storage is worked on in a cell with blocks of a size, seconds.
const STORAGE_SECONDS: u64 = 30;
/// The same over IPv6.
const IPV6_STORAGE_SECONDS: u64 = 5;

const fn column(name: &'static str, lost: u32, mtu: Option<u16>) -> Column {
    Column {
        name,
        ends: USUAL,
        lost,
        mtu,
    }
}

/// What networks between devices have whose IP packets have so many bytes at most.
macro_rules! network {
    ($mtu:literal, $hosts:expr) => {
        Columns {
            all: &[
                column(concat!("MTU ", $mtu), 0, None),
                column(concat!("MTU ", $mtu, ", 1 % lost"), 100, None),
            ],
            set_up: |fixture, column| {
                if fixture.plan.hosts != $hosts {
                    fixture.plan.hosts = $hosts;
                    fixture.restart()?;
                }
                set_up(fixture, column)
            },
            skips: |_, _, _| None,
        }
    };
}

const VXLAN_1500: Columns = network!(1500, Hosts::Vxlan(1500));
const VXLAN_9000: Columns = network!(9000, Hosts::Vxlan(9000));
const SWITCH_1500: Columns = network!(1500, Hosts::Switch(1500));
const SWITCH_9000: Columns = network!(9000, Hosts::Switch(9000));

/// What interfaces of hosts have.
const TAPS: Columns = Columns {
    all: &[
        column("MTU 1500", 0, Some(1500)),
        column("MTU 9000", 0, Some(9000)),
        column("MTU 1500, 1 % lost", 100, Some(1500)),
        column("MTU 9000, 1 % lost", 100, Some(9000)),
    ],
    set_up,
    skips: |_, _, _| None,
};

/// VMs with VXLAN between their devices.
pub fn vxlan() -> Lane {
    Lane {
        name: "wire",
        about: "tools, perftest and storage between VMs of two device processes, with VXLAN between them",
        with_device: true,
        vms: 2,
        memory: 1024,
        bare: 0,
        hosts: Hosts::Vxlan(9000),
        front_end: FrontEnd::VhostUser,
        image: Image::Storage,
        runs: || runs(&[VXLAN_CASES, PACKETS, &short(VXLAN_1500_CASES)]),
    }
}

/// The same over a switch.
pub fn switch() -> Lane {
    Lane {
        name: "wire-switch",
        about: "the same between VMs of two device processes, with a switch between them",
        hosts: Hosts::Switch(1500),
        runs: || runs(&[SWITCH_CASES, PACKETS, &short(SWITCH_9000_CASES)]),
        ..vxlan()
    }
}

/// The same on hosts that are network namespaces, at TAPs in their bridges.
pub fn tap() -> Lane {
    Lane {
        name: "wire-tap",
        about: "the same between VMs on two hosts, which are network namespaces with bridges",
        hosts: Hosts::Tap(9000, ""),
        runs: || runs(&[TAP_CASES, INTERFACE_CASES, PACKETS]),
        ..vxlan()
    }
}

/// With the other MTU: all but storage for long.
fn short(cases: &[Case]) -> Vec<Case> {
    let long = |case: &Case| case.name.ends_with(LONG_NVME) || case.name.ends_with(LONG_NFS);
    let ipv6 = |case: &Case| case.name.contains("IPv6");
    let cases = cases.iter().filter(|case| ipv6(case) || !long(case));
    cases.copied().collect()
}

/// The traffic of lane `smoke` comes first, with no packets lost on purpose.
fn runs(cases: &[&[Case]]) -> Vec<(Kernel, Vec<Case>)> {
    let cases: Vec<Case> = smoke::over_wire().chain(cases.concat()).collect();
    let kernels = Kernel::STABLE.iter();
    kernels.map(|kernel| (*kernel, cases.clone())).collect()
}

/// The cases, each in the columns that are named. Their names begin with what is given, those of their
/// rows do not.
macro_rules! cases {
    ($columns:ident, $prefix:literal) => {
        &[
            cases!($columns, $prefix, "ibv_rc_pingpong", Yes, |fixture, ends| stock::pingpong(
                fixture,
                ends,
                "ibv_rc_pingpong",
                &["-c -n 200", "-c -e -n 200", "-c -s 65536 -n 100", "-c -N -n 200", "-c -t -n 200",
                  "-c -j -n 200"]
            )),
            cases!($columns, $prefix, "ibv_uc_pingpong", No, |fixture, ends| stock::pingpong(
                fixture,
                ends,
                "ibv_uc_pingpong",
                &["-c -n 200", "-c -e -n 200", "-c -s 65536 -n 100"]
            )),
            cases!($columns, $prefix, "ibv_ud_pingpong", No, |fixture, ends| stock::pingpong(
                fixture,
                ends,
                "ibv_ud_pingpong",
                &["-c -s 1024", "-c -s 1024 -e"]
            )),
            cases!($columns, $prefix, "ibv_srq_pingpong", Yes, |fixture, ends| stock::pingpong(
                fixture,
                ends,
                "ibv_srq_pingpong",
                &["-c -n 200", "-c -e -n 200", "-c -q 64 -n 200"]
            )),
            cases!($columns, $prefix, "ibv_xsrq_pingpong", Yes, |fixture, ends| stock::pingpong(
                fixture,
                ends,
                "ibv_xsrq_pingpong",
                &["-n 200", "-e -n 200"]
            )),
            cases!($columns, $prefix, "rping", Yes, stock::rping),
            cases!($columns, $prefix, "ucmatose", Yes, stock::ucmatose),
            cases!($columns, $prefix, "udaddy", No, stock::udaddy),
            cases!($columns, $prefix, "mckey", No, stock::mckey),
            cases!($columns, $prefix, "rstream", Yes, stock::rstream),
            cases!($columns, $prefix, "cmtime", Yes, stock::cmtime),
            cases!($columns, $prefix, "ib_send_bw -R", Yes, stock::send_bw),
            cases!($columns, $prefix, "data arrives as it was sent", Yes, |fixture, _| {
                smoke::verified(fixture)
            }),
            cases!($columns, $prefix, "ibv_rc_pingpong, four at once", Yes, |fixture, _| {
                smoke::pingpong_at_once(fixture)
            }),
            cases!($columns, $prefix, "counters of lost packets", Yes, counters),
            cases!($columns, $prefix, "IPv6: ibv_rc_pingpong", Yes, pingpong_over_ipv6),
            cases!($columns, $prefix, "IPv6: rping", Yes, rping_over_ipv6),
            cases!($columns, $prefix, "IPv6: ucmatose, rstream", Yes, tools_over_ipv6),
            cases!($columns, $prefix, "IPv6: udaddy", No, udaddy_over_ipv6),
            cases!($columns, $prefix, "IPv6: perftest RC", Yes, |fixture, ends| perftest_over_ipv6(
                fixture, ends, &RC_OVER_IPV6
            )),
            cases!($columns, $prefix, "IPv6: perftest UD", No, |fixture, ends| perftest_over_ipv6(
                fixture, ends, &UD_OVER_IPV6
            )),
            cases!($columns, $prefix, "IPv6: perftest UC", No, uc_over_ipv6),
            cases!($columns, $prefix, "IPv6: NVMe over Fabrics", Yes, |fixture, _| storage_over_ipv6(
                fixture,
                Protocol::Nvme
            )),
            cases!($columns, $prefix, "IPv6: NFS over RDMA", Yes, |fixture, _| storage_over_ipv6(
                fixture,
                Protocol::Nfs
            )),
            cases!($columns, $prefix, "NVMe over Fabrics", Yes, |fixture, _| storage_over_ipv4(
                fixture,
                Protocol::Nvme
            )),
            cases!($columns, $prefix, "NFS over RDMA", Yes, |fixture, _| storage_over_ipv4(
                fixture,
                Protocol::Nfs
            )),
            cases!($columns, $prefix, perftest "send", "RC", Yes),
            cases!($columns, $prefix, perftest "send", "UC", No),
            cases!($columns, $prefix, perftest "send", "UD", No),
            cases!($columns, $prefix, perftest "send", "XRC", Yes),
            cases!($columns, $prefix, perftest "write", "RC", Yes),
            cases!($columns, $prefix, perftest "write", "UC", No),
            cases!($columns, $prefix, perftest "write", "XRC", Yes),
            cases!($columns, $prefix, perftest "read", "RC", Yes),
            cases!($columns, $prefix, perftest "read", "XRC", Yes),
            cases!($columns, $prefix, perftest "atomic", "RC", Yes),
            cases!($columns, $prefix, perftest "atomic", "XRC", Yes),
        ]
    };
    ($columns:ident, $prefix:literal, perftest $operation:literal, $transport:literal, $loses:ident) => {
        Case {
            name: concat!($prefix, "perftest: ", $operation, " ", $transport),
            run: |fixture| $columns.perftest(fixture, $operation, $transport, Loses::$loses),
        }
    };
    ($columns:ident, $prefix:literal, $name:literal, $loses:ident, $run:expr) => {
        Case {
            name: concat!($prefix, $name),
            run: |fixture| $columns.run(fixture, $name, Loses::$loses, $run),
        }
    };
}

const VXLAN_CASES: &[Case] = cases!(VXLAN_9000, "");
const VXLAN_1500_CASES: &[Case] = cases!(VXLAN_1500, "MTU 1500: ");
const SWITCH_CASES: &[Case] = cases!(SWITCH_1500, "");
const SWITCH_9000_CASES: &[Case] = cases!(SWITCH_9000, "MTU 9000: ");
const TAP_CASES: &[Case] = cases!(TAPS, "");

/// The cases of storage, which take longest.
const LONG_NVME: &str = "NVMe over Fabrics";
const LONG_NFS: &str = "NFS over RDMA";

/// What the interfaces of hosts have to do with it.
const INTERFACE_CASES: &[Case] = &[
    Case {
        name: "the port follows the interface of its host",
        run: follows,
    },
    Case {
        name: "in a VLAN",
        run: in_vlan,
    },
];

fn follows(fixture: &mut Fixture) -> Result<()> {
    let port = "/sys/class/infiniband/*/ports/1";
    let events = fixture.vm(1)?.spawn("stdbuf -oL ibv_asyncwatch")?;
    events.wait_text(SHORT, |text| text.contains("async event FD"))?;
    for (change, state, event) in [
        ("down", "DOWN", "IBV_EVENT_PORT_ERR"),
        ("up", "ACTIVE", "IBV_EVENT_PORT_ACTIVE"),
    ] {
        let bed = &fixture.bed;
        bed.on_host(1, &format!("ip link set {} {change}", namespace::TAP))?;
        until(fixture, 1, &format!("grep -q {state} {port}/state"))?;
        events.wait_text(SHORT, |text| text.contains(event))?;
    }
    drop(events);
    for mtu in [9000, 1500, 9000] {
        set_mtu(fixture, 1, mtu)?;
    }
    set_mtu(fixture, 2, 9000)?;
    stock::rping(fixture, USUAL)
}

/// Interfaces of the guests in a VLAN. Who is in one takes no frames without its tag.
fn in_vlan(fixture: &mut Fixture) -> Result<()> {
    const VLAN: u8 = 5;
    let address = |number: u8| format!("10.{VLAN}.0.{number}");
    for number in [1, 2] {
        let own = address(number);
        fixture.vm(number)?.sh(&format!(
            "ip link add link eth0 name vlan{VLAN} type vlan id {VLAN} && \
             ip addr add {own}/24 dev vlan{VLAN} && ip link set vlan{VLAN} up"
        ))?;
        let gid = format!("ffff:0a{VLAN:02x}:000{number}");
        let there = format!("grep -q {gid} /sys/class/infiniband/*/ports/1/gids/*");
        until(fixture, number, &there)?;
    }
    let result = stock::rping_at(fixture, USUAL, &address(USUAL.0), 65000);
    for number in [1, 2] {
        let delete = format!("ip link delete vlan{VLAN}");
        fixture.vm(number)?.sh(&delete)?;
    }
    result
}

/// Waits until a command succeeds in a VM.
fn until(fixture: &Fixture, number: u8, seen: &str) -> Result<()> {
    let wait = format!("for i in $(seq 100); do {seen} && exit; sleep 0.1; done; exit 1");
    fixture.vm(number)?.sh(&wait).map(drop)
}

/// Sets the longest IP packet of a VM's interface, at both ends.
fn set_mtu(fixture: &Fixture, number: u8, mtu: u16) -> Result<()> {
    let bed = &fixture.bed;
    bed.on_host(number, &format!("ip link set {} mtu {mtu}", namespace::TAP))?;
    fixture
        .vm(number)?
        .sh(&format!("ip link set eth0 mtu {mtu}"))?;
    let payload = if mtu < 4176 { 1024 } else { 4096 };
    let seen = format!("ibv_devinfo | grep -q 'active_mtu:.*{payload}'");
    until(fixture, number, &seen)
}

/// The devices of both hosts.
fn devices<'a>(fixture: &'a Fixture<'_>) -> Result<[&'a DeviceProcess; 2]> {
    let bed = &fixture.bed;
    let devices = bed.device.as_ref().zip(bed.others.first());
    devices
        .map(<[_; 2]>::from)
        .context("there are no two devices")
}

/// Has packets lost, of so many bytes at most, as the column says: each device loses them of what
/// it sends.
fn set_up(fixture: &mut Fixture, column: &Column) -> Result<()> {
    if let Some(mtu) = column.mtu {
        for number in [1, 2] {
            set_mtu(fixture, number, mtu)?;
        }
    }
    let faults = match column.lost {
        0 => "off".to_owned(),
        lost => format!("seed=1,loss={}", f64::from(lost) / 1e4),
    };
    let mut devices = devices(fixture)?.into_iter();
    devices.try_for_each(|device| device.set_faults_out(1, &faults))
}

/// Gives each VM its IPv6 address; that of the server.
fn ipv6(fixture: &Fixture, server: u8) -> Result<String> {
    let address = |number| format!("fd10::{number}");
    for number in [1, 2] {
        let add = format!("ip -6 addr replace {}/64 dev eth0 nodad", address(number));
        fixture.vm(number)?.sh(&add)?;
        let there = "grep -q ^fd10: /sys/class/infiniband/*/ports/1/gids/*";
        until(fixture, number, there)?;
    }
    Ok(address(server))
}

/// What was lost is counted where users and monitors look.
fn counters(fixture: &mut Fixture, ends: Ends) -> Result<()> {
    let sums = |fixture: &Fixture| -> Result<[u64; 2]> {
        let mut sums = [0; 2];
        for number in [1, 2] {
            let vm = fixture.vm(number)?;
            for (name, sum) in ["retrans_pkts", "out_of_sequence"].iter().zip(&mut sums) {
                let counters = "/sys/class/infiniband/*/ports/1/hw_counters";
                let count = vm.sh(&format!("cat {counters}/{name}"))?;
                *sum += count.trim().parse::<u64>()?;
                // Elsewhere under the same name.
                vm.sh(&format!("rdma statistic show link | grep -q ' {name} '"))?;
            }
        }
        Ok(sums)
    };
    let [again_before, missing_before] = sums(fixture)?;
    stock::pingpong(fixture, ends, "ibv_rc_pingpong", &["-c -s 65536 -n 200"])?;
    let [again, missing] = sums(fixture)?;
    let (again, missing) = (again - again_before, missing - missing_before);
    let first = fixture.bed.device.as_ref().context("no device")?;
    let faults = first.status()?["workers"][0]["wire"]["faults"].to_string();
    // A peer that is slow to answer is asked again, too, though nothing was lost.
    let right = if faults.contains("loss") {
        again != 0 && missing != 0
    } else {
        missing == 0
    };
    ensure!(
        right,
        "{again} packets were sent again and {missing} were out of sequence, with {faults}"
    );
    Ok(())
}

/// The index of the GID of a VM's IPv6 address, for a shell there.
const IPV6_GID: &str = "$(basename $(grep -l ^fd10: /sys/class/infiniband/*/ports/1/gids/*))";

fn pingpong_over_ipv6(fixture: &mut Fixture, ends: Ends) -> Result<()> {
    ipv6(fixture, ends.0)?;
    let gid = IPV6_GID;
    for options in ["-c -n 200", "-c -s 65536 -n 100"] {
        let pair = fixture.pair(ends.0, ends.1);
        let start = format!("ibv_rc_pingpong -g {gid} -p {} {options}", pair.port);
        // The tool itself listens on IPv4.
        let client = format!("{start} {}", pair.host());
        pair.run(&fixture.bed, &start, &client, LONG)?;
    }
    Ok(())
}

fn rping_over_ipv6(fixture: &mut Fixture, ends: Ends) -> Result<()> {
    let host = ipv6(fixture, ends.0)?;
    stock::rping_at(fixture, ends, &host, 4096)
}

/// Not `cmtime`, whose ends meet by IPv4, nor `mckey`: the kernel has RoCEv2's groups in IPv4 alone.
fn tools_over_ipv6(fixture: &mut Fixture, ends: Ends) -> Result<()> {
    let host = ipv6(fixture, ends.0)?;
    stock::ucmatose_at(fixture, ends, &host)?;
    stock::rstream_at(fixture, ends, &host)
}

fn udaddy_over_ipv6(fixture: &mut Fixture, ends: Ends) -> Result<()> {
    let host = ipv6(fixture, ends.0)?;
    stock::udaddy_at(fixture, ends, &host)
}

/// Tools of perftest and what they are told.
const RC_OVER_IPV6: [&str; 8] = [
    "ib_send_bw -c RC -s 65536",
    "ib_send_lat -c RC -s 1024",
    "ib_write_bw -c RC -s 65536",
    "ib_write_lat -c RC -s 1024",
    "ib_read_bw -c RC -s 65536",
    "ib_read_lat -c RC -s 1024",
    "ib_atomic_bw -c RC",
    "ib_atomic_lat -c RC",
];
const UD_OVER_IPV6: [&str; 2] = ["ib_send_bw -c UD -s 1024", "ib_send_lat -c UD -s 1024"];
/// Those without rdma_cm, which perftest has not for UC.
const UC_OVER_IPV6: [&str; 4] = [
    "ib_send_bw -c UC -s 65536",
    "ib_send_lat -c UC -s 1024",
    "ib_write_bw -c UC -s 65536",
    "ib_write_lat -c UC -s 1024",
];

/// Connects to the server's IPv6 address by rdma_cm.
fn perftest_over_ipv6(fixture: &mut Fixture, ends: Ends, tools: &[&str]) -> Result<()> {
    let host = ipv6(fixture, ends.0)?;
    for tool in tools {
        let arguments = "-R --ipv6-addr -n 100";
        let text = fixture.perftest_by_cm_at(ends, &host, tool, arguments, LONG)?;
        Table::parse(&text).with_context(|| format!("no table from {tool}:\n{text}"))?;
    }
    Ok(())
}

/// Has the GIDs of the IPv6 addresses: the tools themselves meet by IPv4.
fn uc_over_ipv6(fixture: &mut Fixture, ends: Ends) -> Result<()> {
    ipv6(fixture, ends.0)?;
    for tool in UC_OVER_IPV6 {
        let pair = fixture.pair(ends.0, ends.1);
        let start = format!("{tool} -F -x {IPV6_GID} -p {} -n 100", pair.port);
        let client = format!("{start} {}", pair.host());
        let (text, _) = pair.run(&fixture.bed, &start, &client, LONG)?;
        Table::parse(&text).with_context(|| format!("no table from {tool}:\n{text}"))?;
    }
    Ok(())
}

fn storage_over_ipv4(fixture: &mut Fixture, protocol: Protocol) -> Result<()> {
    let server = storage::address(storage::SERVER);
    work_on(fixture, protocol, server, STORAGE_SECONDS)
}

fn storage_over_ipv6(fixture: &mut Fixture, protocol: Protocol) -> Result<()> {
    let server = ipv6(fixture, storage::SERVER)?;
    work_on(fixture, protocol, server, IPV6_STORAGE_SECONDS)
}

/// Writes storage of the second VM from the first, with checksums, and reads it again.
fn work_on(fixture: &mut Fixture, protocol: Protocol, server: String, seconds: u64) -> Result<()> {
    let storage = Storage::with_same_mtu(fixture, protocol, server)?;
    for block in [4 << 10, 1 << 20] {
        let fio = Fio::new(storage.fio_file(fixture)?, block, seconds);
        let rates = fio.run(fixture)?;
        let [reads, writes] = rates.total;
        ensure!(reads > 0 && writes > 0, "fio did nothing: {rates:?}");
    }
    storage.tear_down(fixture)
}

/// What devices capture.
const PACKETS: &[Case] = &[Case {
    name: "packets in Wireshark",
    run: packets,
}];

/// All transports and operations, and packets that are lost, sent again and come twice.
fn packets(fixture: &mut Fixture) -> Result<()> {
    setup::packages(&["tshark"])?;
    let mut seen = roce::Seen::default();
    for lossy in [false, true] {
        let mut captures = Vec::new();
        for (device, number) in devices(fixture)?.into_iter().zip(1..) {
            let faults = match lossy {
                false => "off".to_owned(),
                // Each loses and repeats others.
                true => format!("seed={number},loss=2%,duplicate=2%"),
            };
            device.set_faults_out(1, &faults)?;
            let name = format!("roce-{number}{}.pcapng", if lossy { "-lossy" } else { "" });
            let file = fixture.logs().join(name);
            captures.push(Capture::of_device(device, &file)?);
        }
        let result = roce::send_all(fixture, lossy);
        for device in devices(fixture)? {
            device.set_faults(1, "off")?;
        }
        result?;
        for capture in captures {
            seen.add(roce::check(&capture.finish()?)?);
        }
    }
    println!("         {}", seen.summary());
    seen.expect(
        &roce::ALL,
        &[
            "taken",
            "faults: lost",
            "faults: repeated",
            "again: sent",
            "came before",
            "asks what is missing",
            "dropped: ",
        ],
    )
}
