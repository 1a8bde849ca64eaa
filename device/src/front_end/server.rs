// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Sockets: one per VM, each served by a thread of its own, one front end after the other.
use std::fmt;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixListener;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use log::{error, info, Level};
use vmm_sys_util::eventfd::{EventFd, EFD_NONBLOCK};

use super::lock;
use crate::adapter::Adapter;
use crate::engine::vm::Warn;
use crate::epoll_fd::{EpollFd, NO_EVENT};
use crate::heap;
use crate::rnic::RnicSettings;
use crate::sandbox::{Kind, Sandbox};
use crate::socket::{self, BoundSocket};
use crate::warnings::Named;

const EXIT: u64 = 0;
const SOCKET: u64 = 1;

/// What ends a connection.
pub(crate) type ShutDown = Box<dyn Fn() + Send>;

/// The connection of a socket's front end, as soon as there is one.
#[derive(Default)]
pub(crate) struct Connection {
    stopping: AtomicBool,
    shut_down: Mutex<Option<ShutDown>>,
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").finish_non_exhaustive()
    }
}

impl Connection {
    /// A front end is connected by `connect`, which returns what ends that. False: nobody is,
    /// because the process ends.
    pub(crate) fn begin<E>(
        &self,
        connect: impl FnOnce() -> Result<Option<ShutDown>, E>,
    ) -> Result<bool, E> {
        // Until it is known, a request that is refused waits, and so does `Server::end`.
        let mut shut_down = lock(&self.shut_down);
        if self.stopping.load(Ordering::SeqCst) {
            return Ok(false);
        }
        *shut_down = connect()?;
        Ok(true)
    }

    /// Ends the connection.
    pub(crate) fn shut_down(&self) {
        if let Some(shut_down) = &*lock(&self.shut_down) {
            shut_down();
        }
    }

    fn end(&self) {
        *lock(&self.shut_down) = None;
    }
}

/// Whose VMs a socket serves, one after the other.
#[derive(Debug, Clone)]
pub(crate) struct Vm {
    /// The socket.
    pub(crate) path: PathBuf,
    /// What the RNICs are attached to.
    pub(crate) adapter: Arc<Adapter>,
    /// What they are.
    pub(crate) settings: RnicSettings,
    /// For lines of the log about them.
    pub(crate) log: Arc<Named>,
    /// The connection of the one that is served.
    pub(crate) connection: Arc<Connection>,
}

/// Why a session ended.
#[derive(Debug)]
pub(crate) enum Ended {
    /// The front end has disconnected, or the process ends.
    Disconnected,
    /// This is what the front end has done, and the next one may not.
    ByFrontEnd(String),
    /// This is what the system lacks, for the next session as well.
    BySystem(String),
    /// A panic.
    ByPanic,
}

/// A protocol, as the thread of a socket speaks it with front ends.
pub(crate) trait Protocol: Send + 'static {
    /// What the thread is called.
    const NAME: &'static str;

    /// Where front ends connect.
    fn listener(&self) -> &impl AsRawFd;

    /// Serves the front end that has connected until it is gone, is refused something, violates the
    /// protocol, or the process ends. The connection is to be made by [`Connection::begin`].
    fn serve(&mut self, vm: &Vm) -> Ended;
}

/// A socket that is served.
#[derive(Debug)]
pub struct Server {
    socket: BoundSocket,
    exit: EventFd,
    connection: Arc<Connection>,
    thread: JoinHandle<()>,
}

impl Server {
    /// Serves VMs on `socket`, by what `protocol` makes of its listener: for each front end that
    /// connects, an rnic of `settings` is attached. Its threads are confined by `sandbox`.
    ///
    /// # Errors
    /// If the system has no threads or file descriptors left.
    pub(crate) fn start<P: Protocol>(
        socket: BoundSocket,
        adapter: Arc<Adapter>,
        settings: RnicSettings,
        sandbox: &Sandbox,
        protocol: impl FnOnce(UnixListener) -> P,
    ) -> Result<Self, socket::Error> {
        let failed = |source| socket.error(source);
        let listener = socket.listener()?;
        let exit = EventFd::new(EFD_NONBLOCK).map_err(failed)?;
        let connection = Arc::new(Connection::default());
        let log = settings.log.of(&socket.path().display().to_string());
        let listening = Listening {
            vm: Vm {
                path: socket.path().to_owned(),
                adapter,
                settings,
                log: Arc::new(log),
                connection: connection.clone(),
            },
            exit: exit.try_clone().map_err(failed)?,
            protocol: protocol(listener),
        };
        let thread = sandbox
            // Those of a session inherit what confines it.
            .spawn(Kind::FrontEnd, P::NAME.into(), move || listening.run())
            .map_err(failed)?;
        Ok(Self {
            socket,
            exit,
            connection,
            thread,
        })
    }

    /// Accepts no front end any longer. One that is connected stays.
    pub fn close(&self) {
        self.stop_listening();
    }

    /// Returns whether that was possible.
    fn stop_listening(&self) -> bool {
        self.connection.stopping.store(true, Ordering::SeqCst);
        let told = self.exit.write(1);
        if let Err(e) = &told {
            let path = self.socket.path().display();
            error!(device:% = path; "cannot stop listening on {path}: {e}");
        }
        told.is_ok()
    }

    /// Disconnects the front end, and stops serving the socket.
    pub fn end(self) -> BoundSocket {
        let path = self.socket.path().display();
        if !self.stop_listening() {
            return self.socket;
        }
        // A session that begins after this sees `stopping`.
        self.connection.shut_down();
        if self.thread.join().is_err() {
            error!(device:% = path; "the thread of {path} panicked");
        }
        self.socket
    }
}

/// What the thread of a socket works with.
struct Listening<P> {
    vm: Vm,
    exit: EventFd,
    protocol: P,
}

impl<P: Protocol> Listening<P> {
    fn run(mut self) {
        let path = self.vm.path.display();
        info!(device:% = path; "{path}: listening");
        loop {
            match self.wait() {
                Ok(true) => {
                    // A panic would be a bug. It must not cost the next VM its socket.
                    let session = || self.protocol.serve(&self.vm);
                    let ended = catch_unwind(AssertUnwindSafe(session)).unwrap_or(Ended::ByPanic);
                    self.vm.connection.end();
                    self.tell(&ended);
                    if let Ended::BySystem(_) = ended {
                        pause();
                    }
                    heap::give_back();
                }
                Ok(false) => return,
                Err(e) => {
                    let path = self.vm.path.display();
                    error!(device:% = path; "{path}: cannot accept a connection: {e}");
                    pause();
                }
            }
        }
    }

    fn tell(&self, ended: &Ended) {
        let log = &self.vm.log;
        match ended {
            Ended::Disconnected => {
                log.log(Level::Info, format_args!("the front end disconnected"));
            }
            Ended::ByFrontEnd(reason) | Ended::BySystem(reason) => {
                log.warn(format_args!("disconnected: {reason}"));
            }
            Ended::ByPanic => {
                let path = self.vm.path.display();
                error!(device:% = path; "{path}: disconnected by a panic");
            }
        }
    }

    /// Waits for a connection; false: the process ends.
    fn wait(&self) -> io::Result<bool> {
        let epoll = EpollFd::new()?;
        epoll.add(&self.exit, EXIT)?;
        epoll.add(self.protocol.listener(), SOCKET)?;
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
}

/// Out of file descriptors or threads, most likely: not for ever.
fn pause() {
    std::thread::sleep(std::time::Duration::from_millis(200));
}
