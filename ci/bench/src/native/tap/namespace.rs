// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A network namespace in place of a host.
use std::fs::File;
use std::process::Command;

use anyhow::{ensure, Context, Result};
use nix::sched::{setns, CloneFlags};

use crate::native::wire::MTU;

/// A network namespace with a bridge.
pub struct Namespace {
    name: String,
}

impl Namespace {
    pub fn new(name: String) -> Result<Self> {
        ip(&["netns", "add", &name])?;
        let namespace = Self { name };
        namespace.ip("link set lo up")?;
        namespace.ip("link add bridge type bridge mcast_snooping 0")?;
        namespace.ip(&format!("link set bridge mtu {MTU} up"))?;
        Ok(namespace)
    }

    /// What it is called.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Runs `ip` there.
    pub fn ip(&self, words: &str) -> Result<()> {
        let prefix = ["-netns", &self.name];
        let words: Vec<_> = prefix
            .into_iter()
            .chain(words.split_ascii_whitespace())
            .collect();
        ip(&words)
    }

    /// Does something in it: sockets that are opened, and processes that are started, stay there.
    pub fn within<T>(&self, action: impl FnOnce() -> Result<T>) -> Result<T> {
        let own = File::open("/proc/thread-self/ns/net")?;
        let path = format!("/run/netns/{}", self.name);
        let other = File::open(&path).with_context(|| format!("cannot open {path}"))?;
        setns(&other, CloneFlags::CLONE_NEWNET)?;
        let result = action();
        setns(&own, CloneFlags::CLONE_NEWNET)?;
        result
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        if let Err(error) = ip(&["netns", "delete", &self.name]) {
            eprintln!("{error:#}");
        }
    }
}

fn ip(words: &[&str]) -> Result<()> {
    let done = Command::new("ip").args(words).output();
    let output = done.context("cannot run ip, which is in iproute2")?;
    ensure!(
        output.status.success(),
        "ip {}: {}",
        words.join(" "),
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(())
}
