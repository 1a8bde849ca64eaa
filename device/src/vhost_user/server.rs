// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Sockets: one per VM, each served by a thread of its own, one front end after the other.
use std::io;
use std::net::Shutdown;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use log::{error, info, warn};
use vhost::vhost_user::{BackendReqHandler, Error as VhostUserError};
use vmm_sys_util::eventfd::{EventFd, EFD_NONBLOCK};

use super::backend::{Backend, FIRST_KICK_TOKEN};
use crate::adapter::Adapter;
use crate::epoll_fd::{EpollFd, NO_EVENT};
use crate::error::sentence;
use crate::heap;
use crate::rnic::RnicSettings;
use crate::virtio::VirtioDevice;

const EXIT: u64 = 0;
const SOCKET: u64 = 1;

/// Why a socket cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Another process listens on the socket.
    #[error("another process listens on {0}")]
    InUse(PathBuf),
    /// The path exists and is not a socket.
    #[error("{0} exists and is not a socket")]
    NotSocket(PathBuf),
    /// The system refused.
    #[error("cannot listen on {path}")]
    Listen {
        /// The socket.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
}

/// Binds a unix socket at `path`. A socket file that nobody listens on any longer is replaced.
///
/// # Errors
/// If another process listens there, something that is not a socket is there, or the system
/// refuses.
pub fn bind(path: &Path) -> Result<UnixListener, Error> {
    let listen = |source| Error::Listen {
        path: path.to_owned(),
        source,
    };
    match std::fs::symlink_metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(listen(e)),
        Ok(metadata) if !metadata.file_type().is_socket() => {
            return Err(Error::NotSocket(path.to_owned()))
        }
        Ok(_) => match UnixStream::connect(path) {
            Ok(_) => return Err(Error::InUse(path.to_owned())),
            Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {
                std::fs::remove_file(path).map_err(listen)?
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(listen(e)),
        },
    }
    UnixListener::bind(path).map_err(listen)
}

/// A socket that is served.
pub struct Server {
    path: PathBuf,
    exit: EventFd,
    connection: Arc<Mutex<Option<UnixStream>>>,
    thread: JoinHandle<()>,
}

impl Server {
    /// Serves VMs on the socket `path`: for each front end that connects, an rnic of `settings` is
    /// attached.
    ///
    /// # Errors
    /// If the socket cannot be bound, or the system has no threads or file descriptors left.
    pub fn start(
        path: &Path,
        adapter: Arc<Adapter>,
        settings: RnicSettings,
    ) -> Result<Self, Error> {
        let listener = bind(path)?;
        let started = || -> io::Result<Self> {
            listener.set_nonblocking(true)?;
            let exit = EventFd::new(EFD_NONBLOCK)?;
            let connection = Arc::new(Mutex::new(None));
            let server = Listening {
                path: path.to_owned(),
                listener,
                exit: exit.try_clone()?,
                connection: connection.clone(),
                adapter,
                settings,
            };
            let thread = std::thread::Builder::new()
                .name("vhost-user".into())
                .spawn(move || server.run())?;
            Ok(Self {
                path: path.to_owned(),
                exit,
                connection,
                thread,
            })
        };
        started().map_err(|source| {
            let _ = std::fs::remove_file(path);
            Error::Listen {
                path: path.to_owned(),
                source,
            }
        })
    }

    /// Disconnects the front end, stops listening, removes the socket.
    pub fn stop(self) {
        if let Err(e) = self.exit.write(1) {
            error!("cannot stop listening on {}: {e}", self.path.display());
            return;
        }
        // A thread that waits for the rest of a message does not look at the event.
        if let Some(connection) = self
            .connection
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .as_ref()
        {
            let _ = connection.shutdown(Shutdown::Both);
        }
        if self.thread.join().is_err() {
            error!("the thread of {} panicked", self.path.display());
        }
        if let Err(e) = std::fs::remove_file(&self.path) {
            warn!("cannot remove {}: {e}", self.path.display());
        }
    }
}

/// What the thread of a socket works with.
struct Listening {
    path: PathBuf,
    listener: UnixListener,
    exit: EventFd,
    connection: Arc<Mutex<Option<UnixStream>>>,
    adapter: Arc<Adapter>,
    settings: RnicSettings,
}

/// Why a session ended.
#[derive(Debug, thiserror::Error)]
enum SessionError {
    #[error("the protocol was violated")]
    Protocol(#[source] VhostUserError),
    #[error("the system refused")]
    System(#[from] io::Error),
}

impl Listening {
    fn run(self) {
        info!("{}: listening", self.path.display());
        loop {
            match self.accept() {
                Ok(Some(stream)) => {
                    info!("{}: a front end connected", self.path.display());
                    // A panic would be a bug. It must not cost the next VM its socket.
                    let session = catch_unwind(AssertUnwindSafe(|| self.session(stream)));
                    match session {
                        Ok(Ok(())) => info!("{}: the front end disconnected", self.path.display()),
                        Ok(Err(e)) => {
                            warn!("{}: disconnected: {}", self.path.display(), sentence(&e));
                        }
                        Err(_) => error!("{}: disconnected by a panic", self.path.display()),
                    }
                    *self
                        .connection
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner) = None;
                    heap::give_back();
                }
                Ok(None) => return,
                Err(e) => {
                    error!("{}: cannot accept a connection: {e}", self.path.display());
                    // Out of file descriptors, most likely: not for ever.
                    std::thread::sleep(std::time::Duration::from_millis(200));
                }
            }
        }
    }

    /// The next connection; `None`: the process ends.
    fn accept(&self) -> io::Result<Option<UnixStream>> {
        let epoll = EpollFd::new()?;
        epoll.add(&self.exit, EXIT)?;
        epoll.add(&self.listener, SOCKET)?;
        loop {
            let mut space = [NO_EVENT; 2];
            let events = epoll.wait(-1, &mut space)?;
            if events.iter().any(|event| event.data == EXIT) {
                return Ok(None);
            }
            match self.listener.accept() {
                Ok((stream, _)) => return Ok(Some(stream)),
                Err(e)
                    if matches!(
                        e.kind(),
                        io::ErrorKind::WouldBlock | io::ErrorKind::ConnectionAborted
                    ) => {}
                Err(e) => return Err(e),
            }
        }
    }

    /// Serves one front end until it is gone, violates the protocol, or the process ends.
    fn session(&self, stream: UnixStream) -> Result<(), SessionError> {
        stream.set_nonblocking(false)?;
        *self
            .connection
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = Some(stream.try_clone()?);
        let epoll = Arc::new(EpollFd::new()?);
        epoll.add(&self.exit, EXIT)?;
        epoll.add(&stream, SOCKET)?;

        let rnic = self.adapter.attach(self.settings.clone());
        let backend = Backend::new(VirtioDevice::new(rnic), epoll.clone());
        let backend = Arc::new(Mutex::new(backend));
        let _attached = Attached(&backend);
        let requests = BackendReqHandler::from_stream(stream, backend.clone());
        serve(&epoll, &backend, requests, &self.path)
    }
}

/// A VM that is attached; detaches it when dropped.
struct Attached<'a>(&'a Mutex<Backend>);

impl Drop for Attached<'_> {
    fn drop(&mut self) {
        lock(self.0).device.detach();
    }
}

fn lock(backend: &Mutex<Backend>) -> std::sync::MutexGuard<'_, Backend> {
    backend.lock().unwrap_or_else(PoisonError::into_inner)
}

fn serve(
    epoll: &EpollFd,
    backend: &Mutex<Backend>,
    mut requests: BackendReqHandler<Mutex<Backend>>,
    path: &Path,
) -> Result<(), SessionError> {
    let mut space = [NO_EVENT; 16];
    loop {
        let timeout = if lock(backend).device.has_more_commands() {
            0
        } else {
            -1
        };
        for event in epoll.wait(timeout, &mut space)? {
            match event.data {
                EXIT => return Ok(()),
                SOCKET => match requests.handle_request() {
                    Ok(()) => {}
                    // The front end was told, and may go on.
                    Err(VhostUserError::ReqHandlerError(e)) => {
                        warn!("{}: a request was refused: {e}", path.display());
                    }
                    Err(VhostUserError::SocketRetry(_)) => {}
                    Err(VhostUserError::Disconnected | VhostUserError::SocketBroken(_)) => {
                        return Ok(())
                    }
                    Err(e) => return Err(SessionError::Protocol(e)),
                },
                token => {
                    if let Some(index) = token
                        .checked_sub(FIRST_KICK_TOKEN)
                        .and_then(|i| u16::try_from(i).ok())
                    {
                        lock(backend).device.notified(index);
                    }
                }
            }
        }
        let device = &mut lock(backend).device;
        if device.has_more_commands() {
            device.notified(virtio_rdma_spec::config::CONTROL_QUEUE);
        }
    }
}
