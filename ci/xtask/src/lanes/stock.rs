// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Lane `tools`: the stock tools of libibverbs and librdmacm between two VMs, and perftest over
//! rdma_cm.

use std::time::Duration;

use anyhow::{ensure, Result};

use super::tools::Ready;
use super::{Case, Fixture, Lane};
use crate::images::{Image, Kernel};
use crate::vm::{FrontEnd, Hosts};

/// How long one run of a tool may take on a busy machine without KVM.
pub const LONG: Duration = Duration::from_secs(240);

/// The port of the tools that have no option for it.
const FIXED_PORT: u16 = 7174;

/// In which VMs server and client are.
pub type Ends = (u8, u8);

pub const USUAL: Ends = (2, 1);

/// The lane.
pub fn lane() -> Lane {
    let runs = || {
        Kernel::STABLE
            .iter()
            .map(|kernel| (*kernel, CASES.to_vec()))
            .collect()
    };
    Lane {
        name: "tools",
        about: "the stock tools of libibverbs and librdmacm between two VMs",
        with_device: true,
        vms: 2,
        memory: 1024,
        bare: 0,
        hosts: Hosts::One,
        front_end: FrontEnd::VhostUser,
        image: Image::Plain,
        runs,
    }
}

const CASES: &[Case] = &[
    Case {
        name: "ibv_rc_pingpong",
        run: |fixture| {
            pingpong(
                fixture,
                USUAL,
                "ibv_rc_pingpong",
                &["-c", "-c -e", "-c -s 65536"],
            )
        },
    },
    Case {
        name: "ibv_rc_pingpong with the extended post-send interface",
        run: |fixture| pingpong(fixture, USUAL, "ibv_rc_pingpong", &["-c -N"]),
    },
    // Not with events as well: the tool then takes an event whose completion it has polled already
    // for an error.
    Case {
        name: "ibv_rc_pingpong with completion time stamps",
        run: |fixture| pingpong(fixture, USUAL, "ibv_rc_pingpong", &["-c -t"]),
    },
    Case {
        name: "ibv_rc_pingpong with device memory",
        run: |fixture| pingpong(fixture, USUAL, "ibv_rc_pingpong", &["-c -j"]),
    },
    Case {
        name: "ibv_uc_pingpong",
        run: |fixture| {
            pingpong(
                fixture,
                USUAL,
                "ibv_uc_pingpong",
                &["-c", "-c -e", "-c -s 65536"],
            )
        },
    },
    Case {
        name: "ibv_ud_pingpong",
        run: |fixture| {
            pingpong(
                fixture,
                USUAL,
                "ibv_ud_pingpong",
                &["-c -s 1024", "-c -s 1024 -e"],
            )
        },
    },
    Case {
        name: "ibv_srq_pingpong",
        run: |fixture| {
            pingpong(
                fixture,
                USUAL,
                "ibv_srq_pingpong",
                &["-c", "-c -e", "-c -q 64"],
            )
        },
    },
    Case {
        name: "ibv_xsrq_pingpong",
        run: |fixture| pingpong(fixture, USUAL, "ibv_xsrq_pingpong", &["", "-e"]),
    },
    Case {
        name: "rping",
        run: |fixture| {
            [(2, 1), (1, 2), (1, 1)]
                .into_iter()
                .try_for_each(|ends| rping(fixture, ends))
        },
    },
    Case {
        name: "ucmatose",
        run: |fixture| ucmatose(fixture, USUAL),
    },
    Case {
        name: "udaddy",
        run: |fixture| udaddy(fixture, USUAL),
    },
    Case {
        name: "mckey",
        run: |fixture| {
            [(2, 1), (1, 2), (1, 1)]
                .into_iter()
                .try_for_each(|ends| mckey(fixture, ends))
        },
    },
    Case {
        name: "rstream",
        run: |fixture| rstream(fixture, USUAL),
    },
    Case {
        name: "cmtime",
        run: |fixture| cmtime(fixture, USUAL),
    },
    Case {
        name: "ib_send_bw -R",
        run: |fixture| send_bw(fixture, USUAL),
    },
];

/// Runs a ping-pong of libibverbs with each of the options.
pub fn pingpong(fixture: &mut Fixture, ends: Ends, tool: &str, options: &[&str]) -> Result<()> {
    for option in options {
        let pair = fixture.pair(ends.0, ends.1);
        let start = format!("{tool} -g $(/payload/gid) -p {} {option}", pair.port);
        let client = format!("{start} {}", pair.host());
        pair.run(&fixture.bed, &start, &client, LONG)?;
    }
    Ok(())
}

pub fn rping(fixture: &mut Fixture, ends: Ends) -> Result<()> {
    let host = fixture.pair(ends.0, ends.1).host();
    [64, 4096, 65000]
        .into_iter()
        .try_for_each(|size| rping_at(fixture, ends, &host, size))
}

/// With this address of the server, and so many bytes. Where packets are lost, a run whose end was lost
/// is made a second time.
pub fn rping_at(fixture: &mut Fixture, ends: Ends, host: &str, size: u32) -> Result<()> {
    let run = |fixture: &mut Fixture| {
        let pair = fixture.pair(ends.0, ends.1);
        let start = |side: &str| {
            let port = pair.port;
            format!("rping {side} -a {host} -p {port} -C 20 -V -S {size}")
        };
        let ready = Ready::Cm(pair.port);
        pair.run_when(ready, &fixture.bed, &start("-s"), &start("-c"), LONG)
    };
    match run(fixture) {
        Err(error) if fixture.lost_its_end(&error)? => {
            println!("         rping: once more, what ends the connection was lost");
            run(fixture).map(drop)
        }
        result => result.map(drop),
    }
}

pub fn ucmatose(fixture: &mut Fixture, ends: Ends) -> Result<()> {
    let host = fixture.pair(ends.0, ends.1).host();
    ucmatose_at(fixture, ends, &host)
}

/// With this address of the server.
pub fn ucmatose_at(fixture: &mut Fixture, ends: Ends, host: &str) -> Result<()> {
    for options in ["-c 1 -C 10 -S 100", "-c 16 -C 4 -S 4096"] {
        let pair = fixture.pair(ends.0, ends.1);
        let port = pair.port;
        let start = |side: &str| format!("ucmatose {side} {host} -p {port} {options}");
        let (client, server) = pair.run_when(
            Ready::Cm(port),
            &fixture.bed,
            &start("-b"),
            &start("-s"),
            LONG,
        )?;
        good_status(&client)?;
        good_status(&server)?;
    }
    Ok(())
}

pub fn udaddy(fixture: &mut Fixture, ends: Ends) -> Result<()> {
    let host = fixture.pair(ends.0, ends.1).host();
    udaddy_at(fixture, ends, &host)
}

/// With this address of the server.
pub fn udaddy_at(fixture: &mut Fixture, ends: Ends, host: &str) -> Result<()> {
    for options in ["-c 1 -C 10 -S 100", "-c 8 -C 4 -S 1024"] {
        let pair = fixture.pair(ends.0, ends.1);
        let start = |side: &str| format!("udaddy {side} {host} {options}");
        let (client, server) = pair.run_when(
            Ready::Cm(FIXED_PORT),
            &fixture.bed,
            &start("-b"),
            &start("-s"),
            LONG,
        )?;
        good_status(&client)?;
        good_status(&server)?;
    }
    Ok(())
}

pub fn mckey(fixture: &mut Fixture, ends: Ends) -> Result<()> {
    mckey_of(fixture, ends, 1)
}

/// The sender destroys its queue pair as soon as it has posted, without waiting for completions.
/// Soft-RoCE drops what it has not sent by then: such a sender may have to run several times until all
/// that the receiver waits for has come.
pub fn mckey_of(fixture: &mut Fixture, (receiver, sender): Ends, times: u32) -> Result<()> {
    let pair = fixture.pair(receiver, sender);
    // The receiver says in time that it has joined only if its lines are not held back.
    let start = |number: u8, side: &str| {
        format!("stdbuf -oL mckey -m 239.7.7.{receiver} -b 10.10.0.{number} {side} -C 10 -S 1000")
    };
    let says = Ready::Says("joined dgid");
    let receiving = pair.serve_when(says, &fixture.bed, &start(receiver, ""))?;
    let vm = fixture.bed.vm(sender)?;
    for nth in 1..=times {
        let sent = vm.run(&start(sender, "-s"), LONG)?;
        ensure!(sent.status == 0, "the sender failed:\n{}", sent.text);
        good_status(&sent.text)?;
        let long = if nth == times { 120 } else { 3 };
        let complete = |said: &str| said.contains("data transfers complete");
        let came = receiving.wait_text(Duration::from_secs(long), complete);
        if came.is_ok() || nth == times {
            came?;
            break;
        }
    }
    let received = receiving.wait(LONG)?;
    ensure!(
        received.status == 0,
        "the receiver failed:\n{}",
        received.text
    );
    good_status(&received.text)
}

pub fn rstream(fixture: &mut Fixture, ends: Ends) -> Result<()> {
    let host = fixture.pair(ends.0, ends.1).host();
    rstream_at(fixture, ends, &host)
}

/// With this address of the server.
pub fn rstream_at(fixture: &mut Fixture, ends: Ends, host: &str) -> Result<()> {
    for options in [
        "-S 64 -I 500 -C 1",
        "-S 65536 -I 20 -C 10",
        "-S 1048576 -I 5 -C 4",
    ] {
        // Not asynchronously (-T a): the tool then takes the end of the connection behind the last
        // message for an error.
        for test in ["-T v", "-T v -T b"] {
            let pair = fixture.pair(ends.0, ends.1);
            let port = pair.port;
            let start = |side: &str| format!("rstream {side} {host} -p {port} {options} {test}");
            let (text, _) = pair.run_when(
                Ready::Cm(port),
                &fixture.bed,
                &start("-b"),
                &start("-s"),
                LONG,
            )?;
            ensure!(
                text.contains("custom"),
                "no result from rstream {options} {test}:\n{text}"
            );
        }
    }
    Ok(())
}

pub fn cmtime(fixture: &mut Fixture, ends: Ends) -> Result<()> {
    let pair = fixture.pair(ends.0, ends.1);
    let (host, port) = (pair.host(), pair.port);
    let start = |side: &str| format!("cmtime {side} {host} -p {port} -c 50");
    // It listens with rdma_cm first, and then on the same port of TCP, where the two ends agree on
    // what comes next.
    pair.run(&fixture.bed, &start("-b"), &start("-s"), LONG)
        .map(drop)
}

pub fn send_bw(fixture: &mut Fixture, ends: Ends) -> Result<()> {
    let text = fixture.perftest_by_cm(ends, "ib_send_bw", "-R -a -n 20", LONG)?;
    let sizes = super::tools::Table::parse(&text)?.sizes();
    ensure!(
        sizes.last() == Some(&(8 << 20)),
        "the table ends at {:?}:\n{text}",
        sizes.last()
    );
    Ok(())
}

/// What the tools of librdmacm say last.
fn good_status(text: &str) -> Result<()> {
    ensure!(text.contains("return status 0"), "no good end:\n{text}");
    Ok(())
}
