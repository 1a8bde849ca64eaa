// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The device process of a bed: started with one socket per VM, asked for its status.

use std::io::Read;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::Duration;

use anyhow::{bail, Context, Result};
use serde_json::Value;

use super::{spawn, wait_for};

/// A running `vhost-device-rdma`.
pub struct Device {
    child: Child,
    status: PathBuf,
    log: PathBuf,
    command: Vec<String>,
}

impl Device {
    /// Starts the process with a socket and a MAC address for each VM.
    pub fn start(
        binary: &Path,
        sockets: &[(PathBuf, String)],
        status: &Path,
        log: &Path,
    ) -> Result<Self> {
        let mut command = vec![binary.display().to_string()];
        for (socket, mac) in sockets {
            command.push("--socket-path".to_owned());
            command.push(format!("{},mac={mac}", socket.display()));
        }
        command.push("--status-socket".to_owned());
        command.push(status.display().to_string());
        let mut device = Device {
            child: spawn(&command, log)?,
            status: status.to_owned(),
            log: log.to_owned(),
            command,
        };
        for (socket, _) in sockets {
            wait_for(Duration::from_secs(10), || {
                device.check()?;
                Ok(socket.exists().then_some(()))
            })?
            .with_context(|| format!("the device did not make {}", socket.display()))?;
        }
        Ok(device)
    }

    /// The command line it was started with.
    pub fn command(&self) -> &[String] {
        &self.command
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its log file.
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// An error if the process has ended.
    pub fn check(&mut self) -> Result<()> {
        if let Some(status) = self.child.try_wait()? {
            bail!(
                "the device ended ({status}); the end of its log:\n{}",
                crate::shell::tail(&self.log, 3000)
            );
        }
        Ok(())
    }

    /// What it says of itself and its VMs.
    pub fn status(&self) -> Result<Value> {
        let read = || -> Result<Value> {
            let mut stream = UnixStream::connect(&self.status)?;
            stream.set_read_timeout(Some(Duration::from_secs(20)))?;
            // No request comes: the device need not wait for one.
            stream.shutdown(Shutdown::Write)?;
            let mut text = String::new();
            stream.read_to_string(&mut text)?;
            Ok(serde_json::from_str(&text)?)
        };
        read().context("no status from the device")
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
