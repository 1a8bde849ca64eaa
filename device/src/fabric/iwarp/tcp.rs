// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! TCP of the host's kernel: sockets that never wait.
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};

use nix::errno::Errno;
use nix::sys::socket::sockopt::{KeepAlive, ReuseAddr, TcpMaxSeg, TcpNoDelay};
use nix::sys::socket::{
    bind, connect, getsockopt, setsockopt, socket, AddressFamily, SockFlag, SockType,
    SockaddrStorage,
};
use virtio_rdma_spec::command::status;

/// Segments of TCP are at least so long.
const LEAST_SEGMENT: usize = 536;

fn open(of: IpAddr) -> nix::Result<OwnedFd> {
    let family = match of {
        IpAddr::V4(_) => AddressFamily::Inet,
        IpAddr::V6(_) => AddressFamily::Inet6,
    };
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    socket(family, SockType::Stream, flags, None)
}

/// A socket at which connections come in.
///
/// # Errors
/// If the system refuses.
pub(crate) fn listen(at: SocketAddr, backlog: u32) -> io::Result<TcpListener> {
    let socket = open(at.ip())?;
    setsockopt(&socket, ReuseAddr, &true)?;
    bind(socket.as_raw_fd(), &SockaddrStorage::from(at))?;
    rustix::net::listen(&socket, i32::try_from(backlog).unwrap_or(i32::MAX))?;
    Ok(socket.into())
}

/// A socket that begins to connect.
///
/// # Errors
/// If the system refuses.
pub(crate) fn begin_connect(from: IpAddr, to: SocketAddr) -> io::Result<TcpStream> {
    let socket = open(from)?;
    bind(
        socket.as_raw_fd(),
        &SockaddrStorage::from(SocketAddr::new(from, 0)),
    )?;
    match connect(socket.as_raw_fd(), &SockaddrStorage::from(to)) {
        Ok(()) | Err(Errno::EINPROGRESS) => Ok(socket.into()),
        Err(error) => Err(error.into()),
    }
}

/// Sets what a connection needs. Returns how long a segment is, bytes.
///
/// # Errors
/// If the system refuses.
pub(crate) fn set_up(socket: &TcpStream) -> io::Result<usize> {
    setsockopt(socket, TcpNoDelay, &true)?;
    setsockopt(socket, KeepAlive, &true)?;
    let segment = getsockopt(socket, TcpMaxSeg)?;
    Ok(usize::try_from(segment)
        .unwrap_or_default()
        .max(LEAST_SEGMENT))
}

/// `status` of a connection that failed so.
pub(crate) fn status_of(error: &io::Error) -> u16 {
    match error.kind() {
        io::ErrorKind::ConnectionRefused => status::ECONNREFUSED,
        io::ErrorKind::TimedOut => status::ETIMEDOUT,
        io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable => status::EHOSTUNREACH,
        _ => status::ECONNRESET,
    }
}
