// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The status socket: whoever connects gets the state of all VMs as one line of JSON.
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use log::{debug, error, warn};

use crate::rnic::Adapter;
use crate::vhost_user;

/// How long a client may take to read.
const TIMEOUT: Duration = Duration::from_secs(5);
/// How long a client waits for an answer.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(30);

/// Why the status of a running process cannot be told.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nobody answers there.
    #[error("cannot ask for the status at {path}")]
    Ask {
        /// The socket.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The answer is no JSON.
    #[error("{path} answered, but not with a status")]
    Answer {
        /// The socket.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: serde_json::Error,
    },
}

/// Asks the process behind `path` for its status; returns it as JSON text.
///
/// # Errors
/// If nobody answers, or with something else.
pub fn query(path: &Path, pretty: bool) -> Result<String, Error> {
    let mut text = String::new();
    UnixStream::connect(path)
        .and_then(|mut stream| {
            stream.set_read_timeout(Some(CLIENT_TIMEOUT))?;
            stream.read_to_string(&mut text)
        })
        .map_err(|source| Error::Ask {
            path: path.to_owned(),
            source,
        })?;
    let answer = |source| Error::Answer {
        path: path.to_owned(),
        source,
    };
    let value: serde_json::Value = serde_json::from_str(&text).map_err(answer)?;
    if pretty {
        serde_json::to_string_pretty(&value)
    } else {
        serde_json::to_string(&value)
    }
    .map_err(answer)
}

/// A status socket that is served.
pub struct StatusServer {
    path: PathBuf,
    exit: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl StatusServer {
    /// Gives the status of `adapter` to everyone who connects to the socket `path`.
    ///
    /// # Errors
    /// If the socket cannot be bound, or the system has no threads left.
    pub fn start(path: &Path, adapter: Arc<Adapter>) -> Result<Self, vhost_user::Error> {
        let listener = vhost_user::bind(path)?;
        let exit = Arc::new(AtomicBool::new(false));
        let told = exit.clone();
        let thread = std::thread::Builder::new()
            .name("status".into())
            .spawn(move || serve(&listener, &adapter, &told))
            .map_err(|source| vhost_user::Error::Listen {
                path: path.to_owned(),
                source,
            })?;
        Ok(Self {
            path: path.to_owned(),
            exit,
            thread,
        })
    }

    /// Stops listening and removes the socket.
    pub fn stop(self) {
        self.exit.store(true, Ordering::Release);
        // A connection wakes the thread, which then sees that it is to end.
        if UnixStream::connect(&self.path).is_ok() && self.thread.join().is_err() {
            error!("the status thread panicked");
        }
        if let Err(e) = std::fs::remove_file(&self.path) {
            warn!("cannot remove {}: {e}", self.path.display());
        }
    }
}

fn serve(listener: &UnixListener, adapter: &Adapter, exit: &AtomicBool) {
    for stream in listener.incoming() {
        if exit.load(Ordering::Acquire) {
            return;
        }
        let told = stream.and_then(|mut stream| {
            stream.set_write_timeout(Some(TIMEOUT))?;
            // In one piece: it is formatted in very many.
            let status = format!("{}\n", adapter.status());
            stream.write_all(status.as_bytes())?;
            stream.shutdown(Shutdown::Both)
        });
        if let Err(e) = told {
            debug!("the status was not read: {e}");
            if e.raw_os_error() == Some(libc::EMFILE) {
                std::thread::sleep(Duration::from_millis(200));
            }
        }
    }
}
