// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A capture of what goes over an interface of a host, by Wireshark's `dumpcap`.

use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::Duration;

use anyhow::{bail, ensure, Context, Result};
use rustix::process::Signal;

use super::{signal_child, spawn, wait_for, Bed, SHORT};
use crate::shell;

/// A capture that goes on until [`Self::finish`].
pub struct Capture {
    child: Child,
    file: PathBuf,
}

impl Capture {
    /// Starts to capture what `filter` (in the syntax of pcap) says, on the host of a VM.
    pub fn start(
        bed: &Bed,
        number: u8,
        interface: &str,
        filter: &str,
        file: &Path,
    ) -> Result<Self> {
        let log = file.with_extension("log");
        let _ = std::fs::remove_file(&log);
        let mut command = bed.host_prefix(number);
        ensure!(!command.is_empty(), "hosts are no network namespaces");
        // MiB that the kernel keeps meanwhile: no packet is to be lost.
        let words = [
            "dumpcap", "-q", "-B", "64", "-i", interface, "-f", filter, "-w",
        ];
        command.extend(words.map(str::to_owned));
        command.push(file.display().to_string());
        let mut capture = Capture {
            child: spawn(&command, &log)?,
            file: file.to_owned(),
        };
        let started = wait_for(SHORT, || {
            let said = shell::tail(&log, 2000);
            if let Some(status) = capture.child.try_wait()? {
                bail!("dumpcap ended ({status}): {said}");
            }
            Ok(said.contains("File: ").then_some(()))
        })?;
        started.context("dumpcap does not start")?;
        Ok(capture)
    }

    /// Ends it; the file is complete then.
    pub fn finish(mut self) -> Result<PathBuf> {
        // The kernel hands packets over in blocks.
        std::thread::sleep(Duration::from_secs(1));
        signal_child(&self.child, Signal::TERM)?;
        let child = &mut self.child;
        let ended = wait_for(SHORT, || Ok(child.try_wait()?))?;
        let status = ended.context("dumpcap does not end")?;
        ensure!(status.success(), "dumpcap ended with {status}");
        Ok(self.file.clone())
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
