// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Sockets: one per VM, each served by a thread of its own, one front end after the other.
use std::io;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::thread::JoinHandle;

use log::{error, info, Level};
use vhost::vhost_user::{Error as VhostUserError, Listener};
use vhost_user_backend::Error as DaemonError;
use vmm_sys_util::eventfd::{EventFd, EFD_NONBLOCK};

use super::backend::{lock, Backend, Connection, Daemon};
use crate::adapter::Adapter;
use crate::engine::vm::Warn;
use crate::epoll_fd::{EpollFd, NO_EVENT};
use crate::error::sentence;
use crate::heap;
use crate::rnic::RnicSettings;
use crate::sandbox::{Kind, Sandbox};
use crate::socket::{self, BoundSocket};
use crate::virtio::VirtioDevice;
use crate::warnings::Named;

const EXIT: u64 = 0;
const SOCKET: u64 = 1;

/// A socket that is served.
pub struct Server {
    socket: BoundSocket,
    exit: EventFd,
    stopping: Arc<AtomicBool>,
    connection: Connection,
    thread: JoinHandle<()>,
}

impl Server {
    /// Serves VMs on `socket`: for each front end that connects, an rnic of `settings` is attached.
    /// Its threads are confined by `sandbox`.
    ///
    /// # Errors
    /// If the system has no threads or file descriptors left.
    pub fn start(
        socket: BoundSocket,
        adapter: Arc<Adapter>,
        settings: RnicSettings,
        sandbox: &Sandbox,
    ) -> Result<Self, socket::Error> {
        let failed = |source| socket.error(source);
        let listener = socket.listener()?;
        let exit = EventFd::new(EFD_NONBLOCK).map_err(failed)?;
        let stopping = Arc::new(AtomicBool::new(false));
        let connection = Connection::default();
        let log = settings.log.of(&socket.path().display().to_string());
        let server = Listening {
            path: socket.path().to_owned(),
            listener: listener.into(),
            exit: exit.try_clone().map_err(failed)?,
            stopping: stopping.clone(),
            connection: connection.clone(),
            adapter,
            settings,
            log: Arc::new(log),
        };
        let thread = sandbox
            // Those of a session inherit what confines it.
            .spawn(Kind::FrontEnd, "vhost-user".into(), move || server.run())
            .map_err(failed)?;
        Ok(Self {
            socket,
            exit,
            stopping,
            connection,
            thread,
        })
    }

    /// Disconnects the front end, and stops serving the socket.
    pub fn end(self) -> BoundSocket {
        let path = self.socket.path().display();
        self.stopping.store(true, Ordering::SeqCst);
        if let Err(e) = self.exit.write(1) {
            error!("cannot stop listening on {path}: {e}");
            return self.socket;
        }
        // A session that begins after this sees `stopping`.
        if let Some(connection) = &*lock(&self.connection) {
            connection.shutdown();
        }
        if self.thread.join().is_err() {
            error!("the thread of {path} panicked");
        }
        self.socket
    }
}

/// What the thread of a socket works with.
struct Listening {
    path: PathBuf,
    listener: Listener,
    exit: EventFd,
    stopping: Arc<AtomicBool>,
    connection: Connection,
    adapter: Arc<Adapter>,
    settings: RnicSettings,
    log: Arc<Named>,
}

/// Why a session ended.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    #[error("a request was refused")]
    Refused(#[source] io::Error),
    #[error("the protocol was violated")]
    Protocol(#[source] VhostUserError),
    #[error("the system refused")]
    System(#[from] io::Error),
    #[error("{0}")]
    Daemon(DaemonError),
    #[error("a panic")]
    Panic,
}

impl SessionError {
    /// Whether it ends this session and may not end the next.
    fn is_of_the_front_end(&self) -> bool {
        matches!(self, Self::Refused(_) | Self::Protocol(_))
    }
}

impl From<DaemonError> for SessionError {
    fn from(error: DaemonError) -> Self {
        match error {
            DaemonError::HandleRequest(VhostUserError::ReqHandlerError(error)) => {
                Self::Refused(error)
            }
            DaemonError::HandleRequest(error) => Self::Protocol(error),
            DaemonError::WaitDaemon(_) => Self::Panic,
            error => Self::Daemon(error),
        }
    }
}

impl Listening {
    fn run(mut self) {
        info!("{}: listening", self.path.display());
        loop {
            match self.wait() {
                Ok(true) => {
                    // A panic would be a bug. It must not cost the next VM its socket.
                    let session = catch_unwind(AssertUnwindSafe(|| self.session()));
                    *lock(&self.connection) = None;
                    let path = self.path.display();
                    match session {
                        Ok(Ok(())) => {
                            let what = format_args!("the front end disconnected");
                            self.log.log(Level::Info, what);
                        }
                        Ok(Err(SessionError::Panic)) | Err(_) => {
                            error!("{path}: disconnected by a panic");
                        }
                        Ok(Err(e)) => {
                            let reason = sentence(&e);
                            self.log.warn(format_args!("disconnected: {reason}"));
                            if !e.is_of_the_front_end() {
                                pause();
                            }
                        }
                    }
                    heap::give_back();
                }
                Ok(false) => return,
                Err(e) => {
                    error!("{}: cannot accept a connection: {e}", self.path.display());
                    pause();
                }
            }
        }
    }

    /// Waits for a connection; false: the process ends.
    fn wait(&self) -> io::Result<bool> {
        let epoll = EpollFd::new()?;
        epoll.add(&self.exit, EXIT)?;
        epoll.add(&self.listener, SOCKET)?;
        loop {
            let mut space = [NO_EVENT; 2];
            let events = epoll.wait(-1, &mut space)?;
            if events.iter().any(|event| event.data == EXIT) {
                return Ok(false);
            }
            if !events.is_empty() {
                return Ok(true);
            }
        }
    }

    /// Serves the front end that has connected until it is gone, is refused something, violates the
    /// protocol, or the process ends.
    fn session(&mut self) -> Result<(), SessionError> {
        let name = self.path.display().to_string();
        let (log, limits) = (self.log.clone(), self.settings.limits);
        let backend = Backend::new(&name, log, limits, self.connection.clone(), || {
            VirtioDevice::new(self.adapter.attach(self.settings.clone()))
        })?;
        let mut session = Session {
            daemon: None,
            backend,
        };
        let daemon = session.daemon.insert(session.backend.daemon()?);
        {
            // Until it is known, a request that is refused waits, and so does `Server::end`.
            let mut connection = lock(&self.connection);
            if self.stopping.load(Ordering::SeqCst) {
                return Ok(());
            }
            // It does not wait: the front end is there, and nobody else accepts.
            daemon.start(&mut self.listener)?;
            *connection = daemon.shutdown_handle();
        }
        let what = format_args!("a front end connected");
        self.log.log(Level::Info, what);
        match daemon.wait() {
            Err(DaemonError::HandleRequest(VhostUserError::Disconnected)) => Ok(()),
            result => Ok(result?),
        }
    }
}

/// A front end that is served. Dropped when it is gone: returns when its threads have ended, and
/// the VM is detached.
struct Session {
    daemon: Option<Daemon>,
    backend: Arc<Backend>,
}

impl Drop for Session {
    fn drop(&mut self) {
        self.backend.end();
        self.daemon = None;
        self.backend.with_device(VirtioDevice::detach);
    }
}

/// Out of file descriptors or threads, most likely: not for ever.
fn pause() {
    std::thread::sleep(std::time::Duration::from_millis(200));
}
