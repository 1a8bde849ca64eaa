// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Hosts, each a network namespace with a bridge: a TAP in it for a VM's network interface, and one
//! end of a veth, whose other end is in the bridge of a namespace between all of them. It takes root.

use std::process::Command;

use anyhow::{Context, Result};

use crate::shell;

/// The TAP of a VM's network interface, on its host.
pub const TAP: &str = "vm0";

/// Network namespaces, which go when this is dropped.
pub struct Hosts {
    between: Namespace,
    hosts: Vec<Namespace>,
}

struct Namespace(String);

impl Hosts {
    /// Makes so many; IP packets have so many bytes at most.
    pub fn start(count: u8, mtu: u16) -> Result<Self> {
        let name = format!("virtio-rdma-{}", std::process::id());
        let mut all = Self {
            between: Namespace::with_bridge(name.clone(), mtu)?,
            hosts: Vec::new(),
        };
        for number in 1..=count {
            let host = Namespace::with_bridge(format!("{name}-{number}"), mtu)?;
            let Namespace(other) = &host;
            all.between.ip(&format!(
                "link add host{number} mtu {mtu} type veth peer name wire netns {other} mtu {mtu}"
            ))?;
            let join = format!("link set host{number} master bridge up");
            all.between.ip(&join)?;
            host.ip("link set wire master bridge up")?;
            host.ip(&format!("tuntap add dev {TAP} mode tap vnet_hdr"))?;
            host.ip(&format!("link set {TAP} mtu {mtu} master bridge up"))?;
            all.hosts.push(host);
        }
        Ok(all)
    }

    /// Runs a command on a host; `number` counts from 1.
    pub fn run(&self, number: u8, command: &str) -> Result<()> {
        let mut words = self.prefix(number);
        words.extend(command.split_ascii_whitespace().map(str::to_owned));
        let (program, rest) = words.split_first().context("no command")?;
        shell::capture(Command::new(program).args(rest)).map(drop)
    }

    /// The words before those of a command that is to run on a host; `number` counts from 1.
    pub fn prefix(&self, number: u8) -> Vec<String> {
        let host = usize::from(number)
            .checked_sub(1)
            .and_then(|at| self.hosts.get(at));
        let words = host.map(|Namespace(name)| ["ip", "netns", "exec", name]);
        let words = words.into_iter().flatten();
        words.map(str::to_owned).collect()
    }
}

impl Namespace {
    fn with_bridge(name: String, mtu: u16) -> Result<Self> {
        // Perhaps one from before did not end well.
        let _ = shell::capture(Command::new("ip").args(["netns", "delete", &name]));
        shell::capture(Command::new("ip").args(["netns", "add", &name]))?;
        let namespace = Self(name);
        namespace.ip("link set lo up")?;
        namespace.ip("link add bridge type bridge mcast_snooping 0")?;
        namespace.ip(&format!("link set bridge mtu {mtu} up"))?;
        Ok(namespace)
    }

    fn ip(&self, words: &str) -> Result<()> {
        let mut command = Command::new("ip");
        command.args(["-netns", &self.0]);
        shell::capture(command.args(words.split_ascii_whitespace())).map(drop)
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = shell::capture(Command::new("ip").args(["netns", "delete", &self.0]));
    }
}
