// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The process's sockets, who may connect to them, and how the requests of operators come.
use std::fmt;
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{chown, FileTypeExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use log::debug;
use nix::sys::socket::{getsockopt, sockopt::AcceptConn};
use rustix::fs::Mode;
use rustix::net::sockopt::{set_socket_timeout, Timeout};
use rustix::net::{shutdown, Shutdown};
use rustix::process::umask;
use serde::Deserialize;
use vmm_sys_util::eventfd::EventFd;
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use crate::epoll_fd::{EpollFd, NO_EVENT};

/// Epoll data: the process ends.
const EXIT: u64 = 0;
/// Epoll data: a client connects.
const CLIENT: u64 = 1;
/// How long no client is accepted when the process has no file descriptors left.
const PAUSE: Duration = Duration::from_millis(200);

/// Who may connect to a socket.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Access {
    /// Permissions, at most 0o777; none: what the umask leaves.
    pub mode: Option<u32>,
    /// Owner; none: the user of the process.
    pub owner: Option<u32>,
    /// Group; none: that of the process.
    pub group: Option<u32>,
}

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

/// A socket that is bound. Its file is removed when this is dropped, if the process may do that.
#[derive(Debug)]
pub struct BoundSocket {
    path: PathBuf,
    listener: UnixListener,
    bound_by: BoundBy,
}

/// Who has bound a socket, and removes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BoundBy {
    Us,
    /// A client, for a device.
    Client,
    /// The service manager, which goes on listening at it.
    Manager,
}

impl BoundSocket {
    /// Binds a Unix socket at `path`, to which only those may connect whom `access` names. A socket
    /// file that nobody listens on any longer is replaced.
    ///
    /// # Errors
    /// If another process listens there, something that is not a socket is there, or the system
    /// refuses.
    pub fn bind(path: &Path, access: &Access) -> Result<Self, Error> {
        let listener = bind(path, access)?;
        Ok(Self {
            path: path.to_owned(),
            listener,
            bound_by: BoundBy::Us,
        })
    }

    /// A socket at `path` that a client has bound, who said who may connect to it, and removes it.
    #[must_use]
    pub fn of_client(path: &Path, listener: UnixListener) -> Self {
        Self {
            path: path.to_owned(),
            listener,
            bound_by: BoundBy::Client,
        }
    }

    /// A socket at `path` that the service manager has bound. It stays there, whatever is served.
    #[must_use]
    pub fn of_manager(path: &Path, listener: UnixListener) -> Self {
        Self {
            path: path.to_owned(),
            listener,
            bound_by: BoundBy::Manager,
        }
    }

    /// Whether it is there as long as the service manager wants it.
    #[must_use]
    pub fn is_of_manager(&self) -> bool {
        self.bound_by == BoundBy::Manager
    }

    /// Another process serves it from now on, which does not remove it.
    pub fn leave(mut self) {
        self.bound_by = BoundBy::Client;
    }

    /// What listens.
    #[must_use]
    pub fn as_listener(&self) -> &UnixListener {
        &self.listener
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What accepts connections: a file descriptor of its own.
    ///
    /// # Errors
    /// If the system has no file descriptors left.
    pub fn listener(&self) -> Result<UnixListener, Error> {
        self.listener
            .try_clone()
            .map_err(|source| self.error(source))
    }

    /// What the system said when this socket was to be served.
    #[must_use]
    pub fn error(&self, source: io::Error) -> Error {
        Error::Listen {
            path: self.path.clone(),
            source,
        }
    }
}

impl Drop for BoundSocket {
    fn drop(&mut self) {
        if self.bound_by != BoundBy::Us {
            return;
        }
        let path = self.path.display();
        match std::fs::remove_file(&self.path) {
            Ok(()) => {}
            // The directory is not that of the user that the process has become.
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
                log::info!("{path} stays until the next start, which replaces it: {e}");
            }
            Err(e) => log::warn!("cannot remove {path}: {e}"),
        }
    }
}

/// Where clients are answered.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum Address {
    /// At a Unix socket.
    Path(PathBuf),
    /// At a TCP port of the loopback interface.
    Port(SocketAddr),
}

/// It is no address where they may be.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("'{0}' is neither the path of a socket nor a loopback address such as 127.0.0.1:9471")]
pub struct BadAddress(String);

impl FromStr for Address {
    type Err = BadAddress;

    fn from_str(text: &str) -> Result<Self, BadAddress> {
        if text.contains('/') {
            return Ok(Self::Path(text.into()));
        }
        let port = text.parse().ok();
        let port = port.filter(|at: &SocketAddr| at.ip().is_loopback());
        port.map(Self::Port)
            .ok_or_else(|| BadAddress(text.to_owned()))
    }
}

impl TryFrom<String> for Address {
    type Error = BadAddress;

    fn try_from(text: String) -> Result<Self, BadAddress> {
        text.parse()
    }
}

impl Address {
    /// The socket, if it is one.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::Path(path) => Some(path),
            Self::Port(_) => None,
        }
    }
}

/// An address that is listened at.
#[derive(Debug)]
pub enum Bound {
    /// A socket.
    Socket(BoundSocket),
    /// A TCP port.
    Port(TcpListener),
}

impl Bound {
    /// Listens at a TCP port.
    ///
    /// # Errors
    /// If another process does, or the system refuses.
    pub fn at(port: SocketAddr) -> Result<Self, Error> {
        let listener = TcpListener::bind(port).map_err(|source| Error::Listen {
            path: port.to_string().into(),
            source,
        })?;
        Ok(Self::Port(listener))
    }
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Socket(socket) => write!(f, "{}", socket.path().display()),
            Self::Port(listener) => match listener.local_addr() {
                Ok(address) => write!(f, "{address}"),
                Err(_) => write!(f, "a TCP port"),
            },
        }
    }
}

/// What a thread that serves clients waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrival {
    /// A client connects.
    Client,
    /// The time is over.
    Time,
    /// The process ends.
    Exit,
}

/// Waits for clients of a listener, and for the end.
#[derive(Debug)]
pub struct Door(EpollFd);

impl Door {
    /// Waits for clients of `listener`, until `exit` is written to.
    ///
    /// # Errors
    /// If the system has no file descriptors left.
    pub fn new(listener: &impl AsRawFd, exit: &EventFd) -> io::Result<Self> {
        let epoll = EpollFd::new()?;
        epoll.add(exit, EXIT)?;
        epoll.add(listener, CLIENT)?;
        Ok(Self(epoll))
    }

    /// Waits, for `timeout` milliseconds at most (-1: for ever).
    ///
    /// # Errors
    /// If the system refuses.
    pub fn wait(&self, timeout: i32) -> io::Result<Arrival> {
        let mut space = [NO_EVENT; 2];
        let events = self.0.wait(timeout, &mut space)?;
        if events.iter().any(|event| event.data == EXIT) {
            return Ok(Arrival::Exit);
        }
        Ok(match events {
            [] => Arrival::Time,
            _ => Arrival::Client,
        })
    }

    /// Has each client answered by `answer`, until the end.
    pub fn serve(&self, mut answer: impl FnMut() -> io::Result<()>) {
        loop {
            let result = self.wait(-1).and_then(|arrival| {
                if arrival == Arrival::Client {
                    answer()?;
                }
                Ok(arrival)
            });
            match result {
                Ok(Arrival::Exit) => return,
                Ok(_) => {}
                Err(error) => pass_over(&error),
            }
        }
    }
}

/// A client was not answered. If the process has no file descriptors left, not for ever.
pub fn pass_over(error: &io::Error) {
    debug!("a client was not answered: {error}");
    if error.raw_os_error() == Some(libc::EMFILE) {
        std::thread::sleep(PAUSE);
    }
}

/// A client that has connected.
pub trait Client: Read {
    /// How long it is waited for when it is read from; not zero.
    ///
    /// # Errors
    /// If the system refuses.
    fn set_read_timeout(&self, time: Duration) -> io::Result<()>;
}

impl Client for UnixStream {
    fn set_read_timeout(&self, time: Duration) -> io::Result<()> {
        UnixStream::set_read_timeout(self, Some(time))
    }
}

impl Client for TcpStream {
    fn set_read_timeout(&self, time: Duration) -> io::Result<()> {
        TcpStream::set_read_timeout(self, Some(time))
    }
}

/// A client that may pass a file descriptor with its request.
#[derive(Debug)]
pub struct Passing<'a> {
    client: &'a UnixStream,
    /// The last one that came.
    passed: Option<File>,
}

impl<'a> Passing<'a> {
    /// A client that has passed none yet.
    #[must_use]
    pub fn new(client: &'a UnixStream) -> Self {
        let passed = None;
        Self { client, passed }
    }

    /// A socket that it passed, if it listens.
    #[must_use]
    pub fn listener(self) -> Option<UnixListener> {
        let passed = OwnedFd::from(self.passed?);
        let listens = getsockopt(&passed, AcceptConn).is_ok_and(|listens| listens);
        let listener = UnixListener::from(passed);
        // Of another family, it has no address here.
        (listens && listener.local_addr().is_ok()).then_some(listener)
    }
}

impl Read for Passing<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let (count, passed) = self.client.recv_with_fd(bytes)?;
        self.passed = passed.or(self.passed.take());
        Ok(count)
    }
}

impl Client for Passing<'_> {
    fn set_read_timeout(&self, time: Duration) -> io::Result<()> {
        UnixStream::set_read_timeout(self.client, Some(time))
    }
}

/// What a client wants: its request up to the point where it is `whole`, or as much of it as it sent
/// in `time`, or a little more than `most` bytes. Nothing, if it sends none.
///
/// # Errors
/// If the connection fails.
pub fn read_request(
    client: &mut impl Client,
    time: Duration,
    most: usize,
    whole: impl Fn(&[u8]) -> bool,
) -> io::Result<Vec<u8>> {
    let deadline = Instant::now() + time;
    let mut request = Vec::new();
    let mut bytes = [0; 512];
    while request.len() <= most && !whole(&request) {
        let left = deadline.saturating_duration_since(Instant::now());
        // Zero would be no time-out.
        client.set_read_timeout(left.max(Duration::from_millis(1)))?;
        match client.read(&mut bytes) {
            Ok(0) => break,
            Ok(n) => request.extend(bytes.iter().take(n)),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e)
                if matches!(
                    e.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
                ) => {}
            Err(e) => return Err(e),
        }
        if Instant::now() >= deadline {
            break;
        }
    }
    Ok(request)
}

/// Sends all of `bytes` to a client, in `time` at most.
///
/// # Errors
/// If the client does not read it in that time, or the connection fails.
pub fn send_all(
    client: &mut (impl Write + AsFd),
    mut bytes: &[u8],
    time: Duration,
) -> io::Result<()> {
    let deadline = Instant::now() + time;
    while !bytes.is_empty() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        // Zero would be no time-out.
        let left = left.max(Duration::from_millis(1));
        set_socket_timeout(&*client, Timeout::Send, Some(left))?;
        match client.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(sent) => bytes = bytes.get(sent..).unwrap_or_default(),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// The client that a thread answers, for others who end that.
#[derive(Debug, Default)]
pub struct Answering(Mutex<Answered>);

#[derive(Debug, Default)]
struct Answered {
    /// Nobody is answered any longer.
    over: bool,
    client: Option<OwnedFd>,
}

impl Answering {
    /// Has `answer` answer `client`, if that is not over.
    ///
    /// # Errors
    /// That of `answer`.
    pub fn answer(
        &self,
        client: OwnedFd,
        answer: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<()> {
        {
            let mut answered = self.lock();
            if answered.over {
                return Ok(());
            }
            answered.client = Some(client);
        }
        let result = answer();
        self.lock().client = None;
        result
    }

    /// Disconnects the client, so that nothing waits for it, and has no other one answered.
    pub fn end(&self) {
        let mut answered = self.lock();
        answered.over = true;
        if let Some(client) = &answered.client {
            // It may have gone.
            let _ = shutdown(client, Shutdown::Both);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Answered> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn bind(path: &Path, access: &Access) -> Result<UnixListener, Error> {
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
    let listener = match access.mode {
        // Not by chmod: the socket would be open to more people until then.
        Some(mode) => {
            let before = umask(Mode::from_raw_mode(!mode & 0o777));
            let listener = UnixListener::bind(path);
            umask(before);
            listener
        }
        None => UnixListener::bind(path),
    }
    .map_err(listen)?;
    if access.owner.is_some() || access.group.is_some() {
        if let Err(source) = chown(path, access.owner, access.group) {
            let _ = std::fs::remove_file(path);
            return Err(listen(source));
        }
    }
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;
    use std::thread;
    use vmm_sys_util::tempdir::TempDir;

    /// More than a socket holds.
    const LONG: usize = 4 << 20;

    #[test]
    fn a_whole_answer_has_a_time() {
        let (mut client, mut reader) = UnixStream::pair().unwrap();
        // It reads, but not nearly as fast as that.
        let slow = thread::spawn(move || {
            let mut bytes = [0; 16];
            while reader.read(&mut bytes).unwrap() != 0 {
                thread::sleep(Duration::from_millis(1));
            }
        });
        let begun = Instant::now();
        let sent = send_all(&mut client, &vec![0; LONG], Duration::from_millis(100));
        assert_eq!(sent.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert!(begun.elapsed() < Duration::from_secs(5));
        // What is on its way would take it long.
        client.shutdown(std::net::Shutdown::Both).unwrap();
        drop(client);
        drop(slow);
        let (mut client, mut reader) = UnixStream::pair().unwrap();
        let reads = thread::spawn(move || {
            let mut all = Vec::new();
            reader.read_to_end(&mut all).unwrap();
            all.len()
        });
        send_all(&mut client, &vec![0; LONG], Duration::from_secs(20)).unwrap();
        drop(client);
        assert_eq!(reads.join().unwrap(), LONG);
    }

    #[test]
    fn a_client_that_is_answered_does_not_hold_up_the_end() {
        let answering = Answering::default();
        let (client, _reader) = UnixStream::pair().unwrap();
        let send = || {
            let long = Duration::from_secs(60);
            send_all(&mut &client, &vec![0; LONG], long)
        };
        let begun = Instant::now();
        thread::scope(|scope| {
            let known = client.try_clone().unwrap().into();
            let answered = scope.spawn(|| answering.answer(known, send));
            thread::sleep(Duration::from_millis(20));
            answering.end();
            assert!(answered.join().unwrap().is_err());
        });
        assert!(begun.elapsed() < Duration::from_secs(20));
        // Others are not begun with.
        let other = client.into();
        answering.answer(other, || panic!("answered")).unwrap();
    }

    #[test]
    fn a_socket_has_the_permissions_that_it_is_to_have() {
        let directory = TempDir::new().unwrap();
        let path = directory.as_path().join("socket");
        let metadata = |access| {
            let socket = BoundSocket::bind(&path, &access).unwrap();
            let metadata = std::fs::metadata(&path).unwrap();
            drop(socket);
            assert!(!path.exists());
            (metadata.mode() & 0o7777, metadata.uid(), metadata.gid())
        };
        let own = metadata(Access::default());
        for mode in [0o600, 0o660, 0o777] {
            let access = Access {
                mode: Some(mode),
                // Nobody can give a socket away, but to himself.
                owner: Some(own.1),
                group: Some(own.2),
            };
            assert_eq!(metadata(access), (mode, own.1, own.2));
        }
        assert_eq!(metadata(Access::default()), own);
    }
}
