// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a service manager such as systemd has for the process, and what it is told: sockets that it
//! has bound (`sd_listen_fds(3)`), when the process is ready, when it ends, and that it lives
//! (`sd_notify(3)`).
//!
//! Notifications go by a socket that is open before the process gives up opening any, so no crate
//! for them will do: those open one for each.
use std::cell::Cell;
use std::env;
use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use listenfd::ListenFd;
use log::warn;

/// Why what the service manager passed is of no use.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It cannot be told anything.
    #[error("cannot reach the service manager at NOTIFY_SOCKET")]
    Notify(#[source] io::Error),
    /// A file descriptor is no socket that listens, or has no path.
    #[error("file descriptor {0} that was passed is no Unix socket with a path")]
    NoSocket(usize, #[source] Option<io::Error>),
    /// A socket is not one of the configuration.
    #[error("the socket {0} was passed, but nothing is to be served there")]
    NotWanted(PathBuf),
}

/// The service manager that has started this process, if one has.
#[derive(Debug, Default)]
pub struct Manager {
    reports: Arc<Reports>,
    sockets: Vec<(PathBuf, UnixListener)>,
    watchdog: Option<Duration>,
    /// When it was told last that the process lives.
    told_alive: Cell<Option<Instant>>,
}

/// What it is told.
#[derive(Debug, Default)]
pub struct Reports {
    socket: Option<UnixDatagram>,
    /// The last notification was lost.
    lost: AtomicBool,
    /// The process is about to end.
    ending: AtomicBool,
}

impl Reports {
    /// The process has so many devices.
    pub fn serves(&self, devices: usize) {
        if self.ending.load(Ordering::Relaxed) {
            return;
        }
        let devices = match devices {
            1 => "1 device".to_owned(),
            more => format!("{more} devices"),
        };
        self.tell(&format!("STATUS=Serving {devices}"));
    }

    fn tell(&self, what: &str) {
        let Some(socket) = &self.socket else {
            return;
        };
        let result = socket.send(what.as_bytes());
        let was_lost = self.lost.swap(result.is_err(), Ordering::Relaxed);
        if let (Err(error), false) = (result, was_lost) {
            warn!("cannot tell the service manager: {error}");
        }
    }
}

impl Manager {
    /// What the environment says of it.
    ///
    /// # Errors
    /// If it cannot be reached, or has passed what is not a socket.
    pub fn from_environment() -> Result<Self, Error> {
        let name = env::var_os("NOTIFY_SOCKET").filter(|name| !name.is_empty());
        let socket = name.as_deref().map(connect).transpose();
        let reports = Reports {
            socket: socket.map_err(Error::Notify)?,
            ..Reports::default()
        };
        Ok(Self {
            reports: Arc::new(reports),
            sockets: passed()?,
            watchdog: watchdog(|name| env::var(name).ok()),
            told_alive: Cell::new(None),
        })
    }

    /// The socket at `path`, if it has bound it. The caller has it from now on.
    pub fn take_socket(&mut self, path: &Path) -> Option<UnixListener> {
        let at = self.sockets.iter().position(|(bound, _)| bound == path)?;
        Some(self.sockets.swap_remove(at).1)
    }

    /// All sockets have been taken that it has bound.
    ///
    /// # Errors
    /// If one is left.
    pub fn check_sockets(&self) -> Result<(), Error> {
        match self.sockets.first() {
            Some((path, _)) => Err(Error::NotWanted(path.clone())),
            None => Ok(()),
        }
    }

    /// For others who tell it something.
    #[must_use]
    pub fn reports(&self) -> Arc<Reports> {
        self.reports.clone()
    }

    /// The process serves.
    pub fn ready(&self) {
        self.reports.tell("READY=1");
    }

    /// The process ends: at once, or when work requests have completed, in so much time at most.
    pub fn stopping(&self, drain: Duration) {
        let status = match drain {
            Duration::ZERO => "Ending".to_owned(),
            most => format!("Completing what VMs have posted, for {most:?} at most"),
        };
        self.reports.ending.store(true, Ordering::Relaxed);
        self.reports.tell(&format!("STOPPING=1\nSTATUS={status}"));
    }

    /// The process lives: it is told if it is time to. Returns how long until it is again; none, if it
    /// does not want to hear.
    pub fn alive(&self) -> Option<Duration> {
        // Half of the time after which it does something about it, as sd_watchdog_enabled(3) says.
        let interval = self.watchdog? / 2;
        let since = self.told_alive.get().map(|told| told.elapsed());
        if let Some(left) = since.and_then(|since| interval.checked_sub(since)) {
            return Some(left);
        }
        self.told_alive.set(Some(Instant::now()));
        self.reports.tell("WATCHDOG=1");
        Some(interval)
    }
}

/// A socket of the service manager; one whose name begins with @ has no file.
fn connect(name: &OsStr) -> io::Result<UnixDatagram> {
    let socket = UnixDatagram::unbound()?;
    // It would rather not hear than be waited for.
    socket.set_nonblocking(true)?;
    match name.as_bytes().strip_prefix(b"@") {
        Some(name) => socket.connect_addr(&SocketAddr::from_abstract_name(name)?)?,
        None => socket.connect(name)?,
    }
    Ok(socket)
}

/// The first file descriptor that is passed.
const FIRST: usize = 3;

/// The sockets that were passed, by their paths.
fn passed() -> Result<Vec<(PathBuf, UnixListener)>, Error> {
    let mut passed = ListenFd::from_env();
    let mut sockets = Vec::new();
    for at in 0..passed.len() {
        let bad = |error| Error::NoSocket(FIRST + at, error);
        let socket = passed.take_unix_listener(at);
        let socket = socket.map_err(|error| bad(Some(error)))?;
        let socket = socket.ok_or_else(|| bad(None))?;
        let address = socket.local_addr().map_err(|error| bad(Some(error)))?;
        let path = address.as_pathname().ok_or_else(|| bad(None))?;
        sockets.push((path.to_owned(), socket));
    }
    Ok(sockets)
}

/// After how long without a sign of life it does something, by what `of` says of its variables.
fn watchdog(of: impl Fn(&str) -> Option<String>) -> Option<Duration> {
    let own = std::process::id().to_string();
    if of("WATCHDOG_PID").is_some_and(|id| id != own) {
        return None;
    }
    let time = of("WATCHDOG_USEC")?.parse().ok().filter(|time| *time != 0);
    time.map(Duration::from_micros)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watchdog_is_for_this_process() {
        let own = std::process::id().to_string();
        let of = |time: Option<&'static str>, id: Option<String>| {
            watchdog(|name| match name {
                "WATCHDOG_USEC" => time.map(str::to_owned),
                _ => id.clone(),
            })
        };
        let second = Some(Duration::from_secs(1));
        assert_eq!(of(Some("1000000"), None), second);
        assert_eq!(of(Some("1000000"), Some(own)), second);
        assert_eq!(of(Some("1000000"), Some("1".to_owned())), None);
        assert_eq!(of(Some("0"), None), None);
        assert_eq!(of(Some("soon"), None), None);
        assert_eq!(of(None, None), None);
    }
}
