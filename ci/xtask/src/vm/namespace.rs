// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A network namespace with a bridge, and for each VM a TAP in it: the network of a host whose VMs
//! are at a Linux bridge. It takes root.

use std::process::Command;

use anyhow::Result;

use crate::shell;

/// A network namespace, which goes when it is dropped.
pub struct Namespace {
    name: String,
}

/// The TAP of a VM's network interface.
pub fn tap(number: u8) -> String {
    format!("vm{number}")
}

impl Namespace {
    /// Makes one with TAPs for so many VMs; IP packets have so many bytes at most.
    pub fn start(vms: u8, mtu: u16) -> Result<Self> {
        let name = format!("virtio-rdma-{}", std::process::id());
        // Perhaps a bed before had it, and did not end well.
        let _ = shell::capture(Command::new("ip").args(["netns", "delete", &name]));
        shell::capture(Command::new("ip").args(["netns", "add", &name]))?;
        let namespace = Self { name };
        let mtu = mtu.to_string();
        namespace.ip("link set lo up")?;
        namespace.ip("link add bridge type bridge mcast_snooping 0")?;
        for vm in (1..=vms).map(tap) {
            namespace.ip(&format!("tuntap add dev {vm} mode tap vnet_hdr"))?;
            namespace.ip(&format!("link set {vm} mtu {mtu} master bridge up"))?;
        }
        namespace.ip(&format!("link set bridge mtu {mtu} up"))?;
        Ok(namespace)
    }

    fn ip(&self, words: &str) -> Result<()> {
        let mut command = Command::new("ip");
        command.args(["-netns", &self.name]);
        shell::capture(command.args(words.split_ascii_whitespace())).map(drop)
    }

    /// The words before those of a command that is to run in it.
    pub fn prefix(&self) -> Vec<String> {
        let words = ["ip", "netns", "exec", &self.name];
        words.map(str::to_owned).to_vec()
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = shell::capture(Command::new("ip").args(["netns", "delete", &self.name]));
    }
}
