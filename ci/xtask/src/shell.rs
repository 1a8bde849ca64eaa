// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Running host commands, saying what is done and how long it took.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};

/// The top of the repository.
pub fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).unwrap_or(here).to_path_buf()
}

/// `target/` in the repository: reports, logs and what is built for guests.
pub fn target() -> PathBuf {
    root().join("target")
}

/// Where cargo puts what it builds.
pub fn cargo_target() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(dir) => root().join(dir),
        None => target(),
    }
}

/// The cargo that runs us.
pub fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root());
    command
}

/// `program`, as root: by sudo if we are not.
pub fn as_root(program: impl AsRef<OsStr>) -> Command {
    if is_root() {
        Command::new(program)
    } else {
        let mut command = Command::new("sudo");
        command.arg("--").arg(program);
        command
    }
}

/// True if we are root.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Gives what root made at `path` to the user who runs us.
pub fn own(path: &Path) -> Result<()> {
    if is_root() {
        return Ok(());
    }
    let owner = format!(
        "{}:{}",
        rustix::process::getuid().as_raw(),
        rustix::process::getgid().as_raw()
    );
    capture(as_root("chown").arg("-R").arg(owner).arg(path)).map(drop)
}

/// Removes a file or a tree, whoever owns it.
pub fn remove(path: &Path) -> Result<()> {
    if path.symlink_metadata().is_err() {
        return Ok(());
    }
    capture(as_root("rm").arg("-rf").arg("--").arg(path)).map(drop)
}

/// Prints a line about what is going on.
pub fn say(text: impl std::fmt::Display) {
    println!("==> {text}");
}

/// A duration for people.
pub fn human(time: Duration) -> String {
    if time.as_secs() >= 100 {
        format!("{} min {:02} s", time.as_secs() / 60, time.as_secs() % 60)
    } else {
        format!("{:.1} s", time.as_secs_f64())
    }
}

/// Runs a step, saying that it starts and how long it took.
pub fn step<T>(what: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    say(format_args!("{what} ..."));
    let start = Instant::now();
    let result = work().with_context(|| format!("{what} failed"))?;
    say(format_args!("{what}: done in {}", human(start.elapsed())));
    Ok(result)
}

/// Runs a command with its output in `target/logs/NAME.log`. The error has the end of that log.
pub fn logged(name: &str, command: &mut Command) -> Result<()> {
    let (status, log) = run_with_log(name, command)?;
    ensure!(
        status.success(),
        "{}: {status}; the end of {}:\n{}",
        command.get_program().to_string_lossy(),
        log.display(),
        tail(&log, 4000)
    );
    Ok(())
}

fn run_with_log(name: &str, command: &mut Command) -> Result<(std::process::ExitStatus, PathBuf)> {
    let log = target().join("logs").join(format!("{name}.log"));
    fs::create_dir_all(log.parent().unwrap_or(Path::new(".")))?;
    let out = File::create(&log).with_context(|| format!("cannot create {}", log.display()))?;
    let status = command
        .stdin(Stdio::null())
        .stdout(out.try_clone()?)
        .stderr(out)
        .status()
        .with_context(|| format!("cannot run {}", command.get_program().to_string_lossy()))?;
    Ok((status, log))
}

/// Runs a command and returns its standard output; an error has its standard error.
pub fn capture(command: &mut Command) -> Result<String> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot run {}", command.get_program().to_string_lossy()))?;
    if !output.status.success() {
        bail!(
            "{}: {}\n{}",
            command.get_program().to_string_lossy(),
            output.status,
            String::from_utf8_lossy(&output.stderr).trim_end()
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The last `bytes` of a text file, from the start of a line.
pub fn tail(path: &Path, bytes: u64) -> String {
    let read = || -> std::io::Result<String> {
        let mut file = File::open(path)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(bytes)))?;
        let mut data = Vec::new();
        file.read_to_end(&mut data)?;
        let text = String::from_utf8_lossy(&data).into_owned();
        Ok(match text.split_once('\n') {
            Some((_, rest)) if length > bytes => rest.to_owned(),
            _ => text,
        })
    };
    read().unwrap_or_default()
}

/// A word quoted for a shell where that is needed.
pub fn quote(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=+,./:@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', "'\\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted_only_where_needed() {
        assert_eq!(quote("-device"), "-device");
        assert_eq!(quote("a b"), "'a b'");
        assert_eq!(quote("it's"), "'it'\\''s'");
        assert_eq!(quote(""), "''");
    }

    #[test]
    fn times_are_for_people() {
        assert_eq!(human(Duration::from_millis(1250)), "1.2 s");
        assert_eq!(human(Duration::from_secs(125)), "2 min 05 s");
    }
}
