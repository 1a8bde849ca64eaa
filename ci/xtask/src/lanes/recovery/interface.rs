// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guest's network interface, which the card belongs to, changes under traffic.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{ensure, Context, Result};

use super::traffic::{self, rping_to, Kind, Traffic};
use super::{nothing_left, nothing_stuck, wait_active_in};
use crate::lanes::tools::device_of;
use crate::lanes::{Case, Ground};
use crate::vm::{mac, wait_for, SHORT};

pub const CASES: &[Case] = &[
    Case {
        name: "interface: down and up",
        run: |ground| {
            link(ground, |ground, up| {
                let state = if up { "up" } else { "down" };
                let command = format!("ip link set eth0 {state}");
                ground.vm(2)?.sh(&command).map(drop)
            })
        },
    },
    Case {
        name: "interface: the host takes the link of the card down and up",
        run: |ground| {
            link(ground, |ground, up| {
                let device = ground.bed.device.as_ref().context("there is no device")?;
                device.set_link(2, up)
            })
        },
    },
    Case {
        name: "interface: the cable is pulled and put in",
        run: cable,
    },
    Case {
        name: "interface: MTU",
        run: |ground| {
            changes(ground, &["ip link set eth0 mtu 9000"])?;
            changes(
                ground,
                &["ip link set eth0 mtu 1280", "ip link set eth0 mtu 1500"],
            )
        },
    },
    Case {
        name: "interface: MAC address",
        run: mac_address,
    },
    Case {
        name: "interface: addresses",
        run: addresses,
    },
    Case {
        name: "interface: VLAN",
        run: vlan,
    },
    Case {
        name: "interface: renamed",
        run: |ground| {
            changes(ground, &["ip link set eth0 name fabric0"])?;
            changes(ground, &["ip link set fabric0 name eth0"])
        },
    },
    Case {
        name: "interface: moved to a network namespace and back",
        run: namespace,
    },
];

/// How long a change is left alone.
const WHILE: Duration = Duration::from_secs(2);

/// Changes vm2's interface by commands, one after the other, under traffic in both directions. What
/// becomes of that depends on the change, but it can be ended, nothing hangs, and at the end the
/// card works as before.
fn changes(ground: &mut Ground, commands: &[&str]) -> Result<()> {
    let running = [
        Traffic::start(ground, Kind::Rping, 2, 1)?,
        Traffic::start(ground, Kind::Perftest, 2, 1)?,
        Traffic::start(ground, Kind::Flow, 1, 2)?,
    ];
    for command in commands {
        ground.vm(2)?.sh(command)?;
        sleep(WHILE);
    }
    for traffic in running {
        traffic.stop(ground)?;
    }
    after(ground).with_context(|| format!("after {commands:?}"))
}

fn after(ground: &mut Ground) -> Result<()> {
    wait_active_in(ground, 2)?;
    traffic::rping(ground, 2, 1)?;
    traffic::rping(ground, 1, 2)?;
    nothing_stuck(ground)?;
    nothing_left(ground)
}

/// The port goes down and comes up by whatever means, under traffic in both directions.
// G-LINK-001, G-PST-001.
fn link(ground: &mut Ground, set: impl Fn(&mut Ground, bool) -> Result<()>) -> Result<()> {
    let running = [
        Traffic::start(ground, Kind::Rping, 2, 1)?,
        Traffic::start(ground, Kind::Perftest, 2, 1)?,
        Traffic::start(ground, Kind::Flow, 1, 2)?,
    ];
    set(ground, false)?;
    let down = wait_for(SHORT, || {
        let state = "grep -q DOWN /sys/class/infiniband/*/ports/1/state";
        Ok((ground.vm(2)?.run(state, SHORT)?.status == 0).then_some(()))
    })?;
    let received = received(ground)?;
    sleep(WHILE);
    let more = self::received(ground)?;
    set(ground, true)?;
    down.context("the port of vm2 does not go down")?;
    ensure!(
        received == more,
        "vm2 received {} messages through a port that is down",
        more.abs_diff(received)
    );
    for traffic in running {
        traffic.stop(ground)?;
    }
    after(ground)
}

/// Messages that vm2 has received so far.
fn received(ground: &Ground) -> Result<u64> {
    let counted = &device_of(&ground.bed, 2)?["counters"]["rx_messages"];
    counted
        .as_u64()
        .context("no counters in the device's status")
}

/// The interface loses its carrier.
fn cable(ground: &mut Ground) -> Result<()> {
    link(ground, |ground, up| ground.vm_mut(2)?.set_link(up))
}

/// The card belongs to the interface that it has found, whatever address that has later.
fn mac_address(ground: &mut Ground) -> Result<()> {
    let (own, other) = (mac(2), "52:54:00:12:34:77");
    let set = |address: &str| format!("ip link set eth0 address {address}");
    changes(ground, &[&set(other)])?;
    changes(ground, &[&set(&own)])
}

fn addresses(ground: &mut Ground) -> Result<()> {
    for number in [1, 2] {
        ground
            .vm(number)?
            .sh(&format!("ip addr add 10.11.0.{number}/24 dev eth0"))?;
    }
    let pair = ground.pair(2, 1);
    rping_to(ground, pair, "10.11.0.2").context("over an address that was added")?;
    let pair = ground.pair(2, 1);
    let over_it = Traffic::start_to(ground, Kind::Rping, pair, "10.11.0.2")?;
    ground.vm(2)?.sh("ip addr del 10.11.0.2/24 dev eth0")?;
    sleep(WHILE);
    over_it.stop(ground)?;
    after(ground).context("after the address of its traffic was taken")?;
    ground.vm(1)?.sh("ip addr del 10.11.0.1/24 dev eth0")?;
    // IPv6, and the link-local address with all others.
    for number in [1, 2] {
        ground
            .vm(number)?
            .sh(&format!("ip addr add fd00::{number}/64 dev eth0"))?;
    }
    let pair = ground.pair(2, 1);
    rping_to(ground, pair, "fd00::2").context("over an address of IPv6 that was added")?;
    changes(ground, &["ip -6 addr flush dev eth0"])?;
    ground.vm(1)?.sh("ip addr del fd00::1/64 dev eth0")?;
    changes(
        ground,
        &[
            "ip addr flush dev eth0",
            "ip addr add 10.10.0.2/24 dev eth0",
        ],
    )
}

/// rdma_cm over a VLAN interface of the guests, beside and under other traffic.
fn vlan(ground: &mut Ground) -> Result<()> {
    for number in [1, 2] {
        ground.vm(number)?.sh(&format!(
            "modprobe 8021q && ip link add link eth0 name eth0.5 type vlan id 5 && \
             ip addr add 10.12.0.{number}/24 dev eth0.5 && ip link set eth0.5 up"
        ))?;
    }
    let result = over_vlan(ground);
    for number in [1, 2] {
        ground
            .vm(number)?
            .sh("if [ -e /sys/class/net/eth0.5 ]; then ip link del eth0.5; fi")?;
    }
    result?;
    after(ground)
}

fn over_vlan(ground: &mut Ground) -> Result<()> {
    for (server, client) in [(2, 1), (1, 2), (1, 1)] {
        let pair = ground.pair(server, client);
        rping_to(ground, pair, &format!("10.12.0.{server}"))
            .with_context(|| format!("over a VLAN, from vm{client} to vm{server}"))?;
    }
    traffic::rping(ground, 2, 1).context("beside the VLAN")?;
    let pair = ground.pair(2, 1);
    let over_it = Traffic::start_to(ground, Kind::Rping, pair, "10.12.0.2")?;
    ground.vm(2)?.sh("ip link del eth0.5")?;
    sleep(WHILE);
    over_it.stop(ground)
}

fn namespace(ground: &mut Ground) -> Result<()> {
    changes(
        ground,
        &[
            "ip netns add away && ip link set eth0 netns away",
            "ip -n away link set eth0 netns 1 && ip netns del away && ip link set eth0 up && \
             ip addr add 10.10.0.2/24 dev eth0",
        ],
    )
}
