// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The sandbox: what the process gives up once its sockets are bound, so that somebody who takes it
//! over from a VM has as little as possible.
//!
//! [`Sandbox::enter`] is for the whole process, while it has one thread: the user (`identity`),
//! capabilities and new privileges, limits of resources. [`Sandbox::confine`] is for each thread,
//! as soon as it has opened what it needs: files and networks by Landlock (`files`), system calls
//! by seccomp (`system_calls`). A thread that a confined one starts is confined like it.
//!
//! Nothing here knows what the threads do. Which calls they need is in the lists of
//! `system_calls`.
#![forbid(unsafe_code)]

mod files;
mod identity;
mod privileges;
mod resources;
mod system_calls;

use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

use landlock::RulesetCreated;
use serde::Deserialize;

pub use identity::Identity;
use system_calls::Filters;

/// How strict the sandbox is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// A system call that is not listed ends the process.
    #[default]
    On,
    /// A system call that is not listed is logged by the kernel, and carried out.
    Log,
    /// There is none, for debuggers and profilers.
    Off,
}

/// What kind of thread is confined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Moves data of all VMs.
    Worker,
    /// Serves a front end: its requests and its commands. It may start threads of its kind.
    FrontEnd,
    /// Serves the operator: the main thread, the status socket, the watchdog.
    Control,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Worker, Self::FrontEnd, Self::Control];
}

/// What the sandbox is to be.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// How strict it is.
    pub mode: Mode,
    /// The user to become, and nobody else. None: one without privileges, if the process is root.
    pub user: Option<Identity>,
    /// Directories in which files may be removed.
    pub directories: Vec<PathBuf>,
    /// File descriptors that are enough.
    pub descriptors: u64,
    /// More that may be of use later, if the system allows them.
    pub more_descriptors: u64,
    /// It makes and takes TCP connections.
    pub connections: bool,
}

/// Why there is no sandbox.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The process cannot become another user.
    #[error("cannot become user {0}")]
    User(Identity, #[source] nix::Error),
    /// Privileges cannot be given up.
    #[error("cannot give up privileges")]
    Privileges(#[source] rustix::io::Errno),
    /// Limits of resources cannot be set.
    #[error("cannot limit resources")]
    Resources(#[source] rustix::io::Errno),
    /// The system refuses to restrict files.
    #[error("cannot restrict access to files")]
    Files(#[source] landlock::RulesetError),
    /// The list of system calls cannot be compiled or installed.
    #[error("cannot restrict system calls")]
    SystemCalls(#[source] seccompiler::Error),
    /// No descriptors are left.
    #[error("cannot confine a thread")]
    Descriptors(#[source] io::Error),
}

/// What confines the threads of this process. The default confines nothing.
#[derive(Debug, Clone, Default)]
pub struct Sandbox(Option<Arc<Confinement>>);

#[derive(Debug)]
struct Confinement {
    files: RulesetCreated,
    filters: Filters,
    /// What the kernel lacks was logged.
    told: AtomicBool,
}

impl Sandbox {
    /// Gives up what the whole process is not to have, and prepares what its threads are not to
    /// have. To be called while there is one thread, when all sockets are bound.
    ///
    /// # Errors
    /// If the system refuses something that it offers.
    pub fn enter(settings: &Settings) -> Result<Self, Error> {
        let on = settings.mode != Mode::Off;
        // Directories are opened, and limits raised, with the privileges that there are.
        let confinement = on.then(|| Self::prepare(settings)).transpose()?;
        if on {
            resources::limit(settings.descriptors, settings.more_descriptors)
                .map_err(Error::Resources)?;
            privileges::forget_bounding_set();
        }
        match settings.user {
            Some(user) => user.assume().map_err(|error| Error::User(user, error))?,
            None if on => identity::leave_root(),
            None => {}
        }
        if on {
            privileges::give_up().map_err(Error::Privileges)?;
        } else {
            log::warn!("there is no sandbox: give --sandbox off for debugging only");
        }
        Ok(Self(confinement.map(Arc::new)))
    }

    fn prepare(settings: &Settings) -> Result<Confinement, Error> {
        Ok(Confinement {
            files: files::rules(&settings.directories, settings.connections)
                .map_err(Error::Files)?,
            filters: Filters::new(settings.mode, settings.connections)
                .map_err(Error::SystemCalls)?,
            told: AtomicBool::new(false),
        })
    }

    /// Confines the calling thread, for good.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn confine(&self, kind: Kind) -> Result<(), Error> {
        let Some(confinement) = &self.0 else {
            return Ok(());
        };
        let files = confinement.files.try_clone().map_err(Error::Descriptors)?;
        let status = files.restrict_self().map_err(Error::Files)?;
        if !confinement.told.swap(true, Ordering::Relaxed) {
            files::tell(&status);
        }
        let filters = &confinement.filters;
        filters.install(kind).map_err(Error::SystemCalls)
    }

    /// Starts a thread that is confined before it does anything else.
    ///
    /// # Errors
    /// If there is no thread left, or it cannot be confined.
    pub fn spawn(
        &self,
        kind: Kind,
        name: String,
        work: impl FnOnce() + Send + 'static,
    ) -> io::Result<JoinHandle<()>> {
        self.spawn_after(kind, name, || Ok(()), |()| work())
    }

    /// The same, but after it has done `first`, with the result of that.
    ///
    /// # Errors
    /// The same, or that of `first`.
    pub fn spawn_after<F>(
        &self,
        kind: Kind,
        name: String,
        first: impl FnOnce() -> io::Result<F> + Send + 'static,
        work: impl FnOnce(F) + Send + 'static,
    ) -> io::Result<JoinHandle<()>> {
        let sandbox = self.clone();
        let (told, begun) = sync_channel(1);
        let thread = Builder::new().name(name).spawn(move || {
            let begun = first().and_then(|first| {
                sandbox.confine(kind).map_err(io::Error::other)?;
                Ok(first)
            });
            // The starter waits for it, so that neither can fail.
            match begun {
                Ok(first) => {
                    let _ = told.send(Ok(()));
                    work(first);
                }
                Err(error) => drop(told.send(Err(error))),
            }
        })?;
        begun.recv().map_err(io::Error::other)??;
        Ok(thread)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_sandbox_threads_do_what_they_like() {
        let sandbox = Sandbox::default();
        sandbox.confine(Kind::Control).unwrap();
        let status = || std::fs::read_to_string("/proc/thread-self/status");
        let work = move |before| {
            for status in [before, status().unwrap()] {
                assert!(status.contains("Seccomp:\t0"), "{status}");
            }
        };
        let thread = sandbox.spawn_after(Kind::Worker, "thread".into(), status, work);
        thread.unwrap().join().unwrap();
    }

    #[test]
    fn a_thread_that_cannot_begin_is_an_error() {
        let first = || Err::<(), _>(io::Error::from(io::ErrorKind::NotFound));
        let started = Sandbox::default().spawn_after(Kind::Worker, "thread".into(), first, |()| ());
        assert_eq!(started.unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
