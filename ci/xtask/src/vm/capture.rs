// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A capture of what goes over an interface of a host, by Wireshark's `dumpcap`, or of what a
//! device process sends and receives, by its own command.

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::Duration;

use anyhow::{bail, ensure, Context, Result};
use rustix::process::Signal;

use super::{signal_child, spawn, wait_for, Bed, DeviceProcess, SHORT};
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

    /// Starts to capture what a device process sends and receives, and what stays in it.
    pub fn of_device(device: &DeviceProcess, file: &Path) -> Result<Self> {
        let log = file.with_extension("log");
        for old in [file, &log] {
            let _ = std::fs::remove_file(old);
        }
        let mut command = ["sh", "-c", "exec \"$0\" capture \"$1\" >\"$2\""]
            .map(str::to_owned)
            .to_vec();
        let paths = [device.binary(), device.status_socket(), file];
        command.extend(paths.map(|path| path.display().to_string()));
        let mut capture = Capture {
            child: spawn(&command, &log)?,
            file: file.to_owned(),
        };
        // The file's header comes when the device captures.
        let started = wait_for(SHORT, || {
            if let Some(status) = capture.child.try_wait()? {
                let log = shell::tail(&log, 2000);
                bail!("the capture of a device ended ({status}): {log}");
            }
            let begun = std::fs::metadata(file).is_ok_and(|file| file.len() > 0);
            Ok(begun.then_some(()))
        })?;
        started.context("the capture of a device does not start")?;
        Ok(capture)
    }

    /// Ends it; the file is complete then.
    pub fn finish(mut self) -> Result<PathBuf> {
        // Packets are handed over in blocks.
        std::thread::sleep(Duration::from_secs(1));
        signal_child(&self.child, Signal::TERM)?;
        let child = &mut self.child;
        let ended = wait_for(SHORT, || Ok(child.try_wait()?))?;
        let status = ended.context("the capture does not end")?;
        // The device's command ends by the signal.
        let good = status.success() || status.signal() == Some(Signal::TERM.as_raw());
        ensure!(good, "the capture ended with {status}");
        Ok(self.file.clone())
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
