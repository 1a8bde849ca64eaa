// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guest's network interface, which the card belongs to, changes under traffic.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{ensure, Context, Result};

use super::traffic::{self, rping_to, Kind, Traffic};
use super::{nothing_left, nothing_stuck, wait_active_in};
use crate::lanes::tools::device_of;
use crate::lanes::{Case, Fixture};
use crate::vm::{mac, wait_for, SHORT};

pub const CASES: &[Case] = &[
    Case {
        name: "interface: down and up",
        run: |fixture| {
            link(fixture, |fixture, up| {
                let state = if up { "up" } else { "down" };
                let command = format!("ip link set eth0 {state}");
                fixture.vm(2)?.sh(&command).map(drop)
            })
        },
    },
    Case {
        name: "interface: the host takes the link of the card down and up",
        run: |fixture| {
            link(fixture, |fixture, up| {
                let device = fixture.bed.device.as_ref().context("there is no device")?;
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
        run: |fixture| {
            changes(fixture, &["ip link set eth0 mtu 9000"])?;
            changes(
                fixture,
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
        run: |fixture| {
            changes(fixture, &["ip link set eth0 name fabric0"])?;
            changes(fixture, &["ip link set fabric0 name eth0"])
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
fn changes(fixture: &mut Fixture, commands: &[&str]) -> Result<()> {
    let running = [
        Traffic::start(fixture, Kind::Rping, 2, 1)?,
        Traffic::start(fixture, Kind::Perftest, 2, 1)?,
        Traffic::start(fixture, Kind::Flow, 1, 2)?,
    ];
    for command in commands {
        fixture.vm(2)?.sh(command)?;
        sleep(WHILE);
    }
    for traffic in running {
        traffic.stop(fixture)?;
    }
    after(fixture).with_context(|| format!("after {commands:?}"))
}

fn after(fixture: &mut Fixture) -> Result<()> {
    wait_active_in(fixture, 2)?;
    traffic::rping(fixture, 2, 1)?;
    traffic::rping(fixture, 1, 2)?;
    nothing_stuck(fixture)?;
    nothing_left(fixture)
}

/// The port goes down and comes up by whatever means, under traffic in both directions.
// G-LINK-001, G-PST-001.
fn link(fixture: &mut Fixture, set: impl Fn(&mut Fixture, bool) -> Result<()>) -> Result<()> {
    let running = [
        Traffic::start(fixture, Kind::Rping, 2, 1)?,
        Traffic::start(fixture, Kind::Perftest, 2, 1)?,
        Traffic::start(fixture, Kind::Flow, 1, 2)?,
    ];
    set(fixture, false)?;
    let down = wait_for(SHORT, || {
        let state = "grep -q DOWN /sys/class/infiniband/*/ports/1/state";
        Ok((fixture.vm(2)?.run(state, SHORT)?.status == 0).then_some(()))
    })?;
    let received = received(fixture)?;
    sleep(WHILE);
    let more = self::received(fixture)?;
    set(fixture, true)?;
    down.context("the port of vm2 does not go down")?;
    ensure!(
        received == more,
        "vm2 received {} messages through a port that is down",
        more.abs_diff(received)
    );
    for traffic in running {
        traffic.stop(fixture)?;
    }
    after(fixture)
}

/// Messages that vm2 has received so far.
fn received(fixture: &Fixture) -> Result<u64> {
    let counted = &device_of(&fixture.bed, 2)?["counters"]["rx_messages"];
    counted
        .as_u64()
        .context("no counters in the device's status")
}

/// The interface loses its carrier.
fn cable(fixture: &mut Fixture) -> Result<()> {
    link(fixture, |fixture, up| fixture.vm_mut(2)?.set_link(up))
}

/// The card belongs to the interface that it has found, whatever address that has later.
fn mac_address(fixture: &mut Fixture) -> Result<()> {
    let (own, other) = (mac(2), "52:54:00:12:34:77");
    let set = |address: &str| format!("ip link set eth0 address {address}");
    changes(fixture, &[&set(other)])?;
    changes(fixture, &[&set(&own)])
}

fn addresses(fixture: &mut Fixture) -> Result<()> {
    for number in [1, 2] {
        fixture
            .vm(number)?
            .sh(&format!("ip addr add 10.11.0.{number}/24 dev eth0"))?;
    }
    let pair = fixture.pair(2, 1);
    rping_to(fixture, pair, "10.11.0.2").context("over an address that was added")?;
    let pair = fixture.pair(2, 1);
    let over_it = Traffic::start_to(fixture, Kind::Rping, pair, "10.11.0.2")?;
    fixture.vm(2)?.sh("ip addr del 10.11.0.2/24 dev eth0")?;
    sleep(WHILE);
    over_it.stop(fixture)?;
    after(fixture).context("after the address of its traffic was taken")?;
    fixture.vm(1)?.sh("ip addr del 10.11.0.1/24 dev eth0")?;
    // IPv6, and the link-local address with all others.
    for number in [1, 2] {
        fixture
            .vm(number)?
            .sh(&format!("ip addr add fd00::{number}/64 dev eth0"))?;
    }
    let pair = fixture.pair(2, 1);
    rping_to(fixture, pair, "fd00::2").context("over an address of IPv6 that was added")?;
    changes(fixture, &["ip -6 addr flush dev eth0"])?;
    fixture.vm(1)?.sh("ip addr del fd00::1/64 dev eth0")?;
    changes(
        fixture,
        &[
            "ip addr flush dev eth0",
            "ip addr add 10.10.0.2/24 dev eth0",
        ],
    )
}

/// rdma_cm over a VLAN interface of the guests, beside and under other traffic.
fn vlan(fixture: &mut Fixture) -> Result<()> {
    for number in [1, 2] {
        fixture.vm(number)?.sh(&format!(
            "modprobe 8021q && ip link add link eth0 name eth0.5 type vlan id 5 && \
             ip addr add 10.12.0.{number}/24 dev eth0.5 && ip link set eth0.5 up"
        ))?;
    }
    let result = over_vlan(fixture);
    for number in [1, 2] {
        fixture
            .vm(number)?
            .sh("if [ -e /sys/class/net/eth0.5 ]; then ip link del eth0.5; fi")?;
    }
    result?;
    after(fixture)
}

fn over_vlan(fixture: &mut Fixture) -> Result<()> {
    for (server, client) in [(2, 1), (1, 2), (1, 1)] {
        let pair = fixture.pair(server, client);
        rping_to(fixture, pair, &format!("10.12.0.{server}"))
            .with_context(|| format!("over a VLAN, from vm{client} to vm{server}"))?;
    }
    traffic::rping(fixture, 2, 1).context("beside the VLAN")?;
    let pair = fixture.pair(2, 1);
    let over_it = Traffic::start_to(fixture, Kind::Rping, pair, "10.12.0.2")?;
    fixture.vm(2)?.sh("ip link del eth0.5")?;
    sleep(WHILE);
    over_it.stop(fixture)
}

fn namespace(fixture: &mut Fixture) -> Result<()> {
    changes(
        fixture,
        &[
            "ip netns add away && ip link set eth0 netns away",
            "ip -n away link set eth0 netns 1 && ip netns del away && ip link set eth0 up && \
             ip addr add 10.10.0.2/24 dev eth0",
        ],
    )
}
