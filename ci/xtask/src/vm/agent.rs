// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The host's side of the control channel: runs commands in a guest through
//! `qemu/images/guest/agent`.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};
use serde::Deserialize;
use serde_json::json;

/// What a command left behind.
#[derive(Clone, Debug)]
pub struct Output {
    /// Its exit status; negative: the signal that ended it.
    pub status: i32,
    /// What it wrote, standard output and error together.
    pub text: String,
}

/// What the agent sends.
#[derive(Deserialize)]
#[serde(untagged)]
enum Message {
    Boot { boot: String },
    Output { id: u64, out: String },
    Exit { id: u64, exit: i32, length: usize },
}

#[derive(Default)]
struct State {
    /// The boot whose agent spoke last.
    boot: Option<String>,
    jobs: HashMap<u64, JobState>,
    next: u64,
    /// The connection; none any more when QEMU is gone.
    stream: Option<Arc<UnixStream>>,
}

#[derive(Default)]
struct JobState {
    text: String,
    end: Option<End>,
}

#[derive(Clone, Copy)]
enum End {
    Exited(i32),
    /// It ended, and the channel did not bring all that it wrote.
    Incomplete {
        sent: usize,
    },
    /// The guest went away under it.
    Lost,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    /// Sends a line of JSON.
    fn send(&self, message: &serde_json::Value) -> Result<()> {
        let stream = self.lock().stream.clone().context("the VM is gone")?;
        let line = message.to_string() + "\n";
        // One write per line, so that lines of several threads do not mix.
        (&*stream)
            .write_all(line.as_bytes())
            .context("the VM is gone")
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `ready` gives something; None when the time is over.
    fn wait<T>(
        &self,
        timeout: Duration,
        mut ready: impl FnMut(&mut State) -> Option<T>,
    ) -> Option<T> {
        let deadline = Instant::now() + timeout;
        let mut state = self.lock();
        loop {
            if let Some(value) = ready(&mut state) {
                return Some(value);
            }
            let left = deadline.checked_duration_since(Instant::now())?;
            state = self
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

/// A connection to a guest's agent.
pub struct Agent {
    path: PathBuf,
    shared: Arc<Shared>,
}

impl Agent {
    /// Connects to the chardev socket of the control port. The agent need not be there yet.
    pub fn connect(path: &Path) -> Result<Self> {
        let agent = Agent {
            path: path.to_owned(),
            shared: Arc::new(Shared::default()),
        };
        agent.open()?;
        Ok(agent)
    }

    fn open(&self) -> Result<()> {
        let stream = Arc::new(UnixStream::connect(&self.path)?);
        self.shared.lock().stream = Some(stream.clone());
        let shared = self.shared.clone();
        std::thread::spawn(move || read(&stream, &shared));
        Ok(())
    }

    /// Connects anew; commands that run go on. What the guest is sending at that moment is lost.
    pub fn connect_again(&self) -> Result<()> {
        if let Some(old) = self.shared.lock().stream.take() {
            old.shutdown(Shutdown::Both)?;
        }
        self.open()
    }

    /// Waits for the agent of another boot than `not`, and returns that boot's id.
    pub fn wait_boot(&self, not: Option<&str>, timeout: Duration) -> Result<String> {
        let booted = self.shared.wait(timeout, |state| match &state.boot {
            _ if state.stream.is_none() => Some(None),
            Some(boot) if Some(boot.as_str()) != not => Some(Some(boot.clone())),
            _ => None,
        });
        match booted {
            Some(Some(boot)) => Ok(boot),
            Some(None) => bail!("QEMU is gone"),
            None => bail!("the guest was not up after {timeout:?}"),
        }
    }

    /// Starts a shell command.
    pub fn spawn(&self, command: &str) -> Result<Job> {
        let id = {
            let mut state = self.shared.lock();
            state.next += 1;
            let id = state.next;
            state.jobs.insert(id, JobState::default());
            id
        };
        let job = Job {
            id,
            command: command.to_owned(),
            shared: self.shared.clone(),
        };
        self.shared.send(&json!({ "id": id, "run": command }))?;
        Ok(job)
    }
}

fn read(stream: &Arc<UnixStream>, shared: &Shared) {
    for line in BufReader::new(&**stream).split(b'\n') {
        let Ok(line) = line else { break };
        // A guest that is reset in the middle of a line leaves half of it.
        let Ok(message) = serde_json::from_slice::<Message>(&line) else {
            continue;
        };
        let mut state = shared.lock();
        match message {
            Message::Boot { boot } => {
                if state.boot.as_ref().is_some_and(|old| *old != boot) {
                    lose(&mut state);
                }
                state.boot = Some(boot);
            }
            Message::Output { id, out } => {
                if let Some(job) = state.jobs.get_mut(&id) {
                    job.text.push_str(&out);
                }
            }
            Message::Exit { id, exit, length } => {
                if let Some(job) = state.jobs.get_mut(&id) {
                    let whole = job.text.chars().count() == length;
                    job.end = Some(if whole {
                        End::Exited(exit)
                    } else {
                        End::Incomplete { sent: length }
                    });
                }
            }
        }
        drop(state);
        shared.changed.notify_all();
    }
    let mut state = shared.lock();
    // Otherwise there is another connection by now, or there will be.
    if state
        .stream
        .as_ref()
        .is_some_and(|current| Arc::ptr_eq(current, stream))
    {
        state.stream = None;
        lose(&mut state);
    }
    drop(state);
    shared.changed.notify_all();
}

fn lose(state: &mut State) {
    for job in state.jobs.values_mut() {
        job.end.get_or_insert(End::Lost);
    }
}

/// How the error begins of a command that did not end in time.
pub const NO_END: &str = "no end after";

/// A command in a guest. Dropping it kills it if it still runs.
pub struct Job {
    id: u64,
    command: String,
    shared: Arc<Shared>,
}

impl Job {
    /// Waits for the end. It is killed if that does not come in time.
    pub fn wait(&self, timeout: Duration) -> Result<Output> {
        let id = self.id;
        let ended = self.shared.wait(timeout, |state| {
            let job = state.jobs.get(&id)?;
            Some((job.end?, job.text.clone()))
        });
        match ended {
            Some((End::Exited(status), text)) => Ok(Output { status, text }),
            Some((End::Incomplete { sent }, text)) => bail!(
                "the control channel lost output of `{}`: {sent} characters were sent, {} came:\n{text}",
                self.command,
                text.chars().count()
            ),
            Some((End::Lost, text)) => bail!(
                "the guest went away under `{}`; it had written:\n{text}",
                self.command
            ),
            None => {
                self.kill(9)?;
                bail!(
                    "{NO_END} {timeout:?} of `{}`; it had written:\n{}",
                    self.command,
                    self.text()
                )
            }
        }
    }

    /// Waits until `found` says yes to what it has written; an error if it ends or the time is over
    /// before.
    pub fn wait_text(&self, timeout: Duration, found: impl Fn(&str) -> bool) -> Result<()> {
        let id = self.id;
        let answer = self.shared.wait(timeout, |state| {
            let job = state.jobs.get(&id)?;
            if found(&job.text) {
                Some(true)
            } else {
                job.end.map(|_| false)
            }
        });
        match answer {
            Some(true) => Ok(()),
            Some(false) => bail!(
                "`{}` ended too early; it had written:\n{}",
                self.command,
                self.text()
            ),
            None => bail!(
                "`{}` did not get there in {timeout:?}; it had written:\n{}",
                self.command,
                self.text()
            ),
        }
    }

    /// What it has written so far.
    pub fn text(&self) -> String {
        self.shared
            .lock()
            .jobs
            .get(&self.id)
            .map(|job| job.text.clone())
            .unwrap_or_default()
    }

    /// True while it runs.
    pub fn running(&self) -> bool {
        self.shared
            .lock()
            .jobs
            .get(&self.id)
            .is_some_and(|job| job.end.is_none())
    }

    /// Sends a signal to its process group.
    pub fn kill(&self, signal: i32) -> Result<()> {
        self.shared.send(&json!({ "id": self.id, "kill": signal }))
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if self.running() {
            // A VM that is gone has taken its commands along.
            let _ = self.kill(9);
        }
        self.shared.lock().jobs.remove(&self.id);
    }
}
