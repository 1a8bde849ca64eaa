// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A host that is no VM: the root of a guest image in namespaces of its own, so that it is the same
//! Debian on any machine. It takes root.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{bail, ensure, Context, Result};

use super::{spawn, wait_for, Output, SHORT};
use crate::shell;

/// The namespaces and all that runs in them. They go when this is dropped, and with the thread that
/// started them.
pub struct Chroot {
    child: Child,
    directory: PathBuf,
}

impl Chroot {
    /// Starts a script as the first process of the namespaces, with an empty directory for it to
    /// mount things on, and with more words; waits until it says "ready".
    pub fn start(script: &Path, directory: &Path, words: &[&OsStr], log: &Path) -> Result<Self> {
        fs::create_dir_all(directory)?;
        let mut command: Vec<String> = "unshare --mount --net --pid --ipc --uts --kill-child sh"
            .split(' ')
            .map(str::to_owned)
            .collect();
        let words = [script.as_os_str(), directory.as_os_str()]
            .into_iter()
            .chain(words.iter().copied());
        command.extend(words.map(|word| word.to_string_lossy().into_owned()));
        let _ = fs::remove_file(log);
        let mut chroot = Chroot {
            child: spawn(&command, log)?,
            directory: directory.to_owned(),
        };
        let ready = wait_for(SHORT, || {
            let text = fs::read_to_string(log)?;
            if let Some(status) = chroot.child.try_wait()? {
                bail!("{} ended ({status}): {text}", script.display());
            }
            Ok(text.lines().any(|line| line == "ready").then_some(()))
        })?;
        ready.with_context(|| {
            let log = shell::tail(log, 2000);
            format!("{} does not become ready: {log}", script.display())
        })?;
        Ok(chroot)
    }

    /// Runs a shell command there.
    pub fn run(&self, command: &str, timeout: Duration) -> Result<Output> {
        let process = self.child.id();
        let output = Command::new("nsenter")
            .args(["--mount", "--net", "--ipc", "--uts", "--root", "--target"])
            .arg(process.to_string())
            .arg(format!("--pid=/proc/{process}/ns/pid_for_children"))
            .args(["env", "-i", "-C", "/", "HOME=/root", "LC_ALL=C.UTF-8"])
            .args(["PATH=/usr/sbin:/usr/bin:/sbin:/bin", "timeout", "-k", "5"])
            .arg(timeout.as_secs().to_string())
            .args(["bash", "-c", &format!("exec 2>&1\n{command}")])
            .stdin(Stdio::null())
            .output()
            .context("cannot run nsenter")?;
        let status = output.status;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        // Of timeout(1).
        ensure!(
            !matches!(status.code(), Some(124 | 137)),
            "no end after {timeout:?} of `{command}`; it had written:\n{text}"
        );
        // A command that did not run at all has written nothing to where its output goes.
        let error = String::from_utf8_lossy(&output.stderr);
        let ended = status.code().or(status.signal().map(|signal| -signal));
        Ok(Output {
            status: ended.unwrap_or(-1),
            text: text + &error,
        })
    }
}

impl Drop for Chroot {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_dir(&self.directory);
    }
}
