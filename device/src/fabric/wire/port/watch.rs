// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Interfaces of the host, as they go down and up and change their MTU. The kernel says that something
//! has changed (rtnetlink(7)); what that is, is asked for (netdevice(7)).
use std::io;
use std::net::UdpSocket;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::errno::Errno;
use nix::sys::socket::{
    bind, recv, socket, AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType,
};

use super::super::path_mtu_within;
use super::kernel::{any_socket, state};

/// The group of messages about interfaces.
const INTERFACES: u32 = 1;

/// What an interface is like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InterfaceState {
    /// It is there, taken up, and somebody is at its other end.
    pub up: bool,
    /// The path MTU that fits it (`mtu`).
    pub active_mtu: u8,
}

/// Watches interfaces of the host.
#[derive(Debug)]
pub struct Watch {
    changes: OwnedFd,
    questions: UdpSocket,
    /// Their numbers in this process, their names, and how they were found last.
    interfaces: Vec<(u32, String, Option<InterfaceState>)>,
}

impl Watch {
    /// Watches these, from now on.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn new(interfaces: impl IntoIterator<Item = (u32, String)>) -> io::Result<Self> {
        let changes = socket(
            AddressFamily::Netlink,
            SockType::Raw,
            SockFlag::SOCK_CLOEXEC,
            SockProtocol::NetlinkRoute,
        )?;
        bind(changes.as_raw_fd(), &NetlinkAddr::new(0, INTERFACES))?;
        let interfaces = interfaces.into_iter();
        Ok(Self {
            changes,
            questions: any_socket()?,
            interfaces: interfaces
                .map(|(number, name)| (number, name, None))
                .collect(),
        })
    }

    /// Tells how each interface is, and again whenever that changes. Returns if the kernel tells of no
    /// changes any longer.
    ///
    /// # Errors
    /// Why it does not.
    pub fn run(mut self, mut tell: impl FnMut(u32, &str, InterfaceState)) -> io::Result<()> {
        loop {
            self.look(&mut tell);
            self.wait()?;
        }
    }

    /// Tells of those that are not as they were.
    fn look(&mut self, tell: &mut impl FnMut(u32, &str, InterfaceState)) {
        for (number, name, known) in &mut self.interfaces {
            let mut now = InterfaceState {
                up: false,
                active_mtu: known.map_or(0, |known| known.active_mtu),
            };
            // One that is gone has no MTU: it keeps what it had.
            if let Ok((up, mtu)) = state(&self.questions, name) {
                now.up = up;
                now.active_mtu = path_mtu_within(mtu);
            }
            if *known != Some(now) {
                *known = Some(now);
                tell(*number, name, now);
            }
        }
    }

    /// Waits for a change.
    fn wait(&self) -> io::Result<()> {
        let mut flags = MsgFlags::empty();
        let mut message = [0; 4096];
        loop {
            match recv(self.changes.as_raw_fd(), &mut message, flags) {
                // All of them that are there.
                Ok(_) => flags = MsgFlags::MSG_DONTWAIT,
                // More has changed than there was room for.
                Err(Errno::ENOBUFS | Errno::EAGAIN) => return Ok(()),
                Err(Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use virtio_rdma_spec::verbs::mtu;

    use super::*;

    #[test]
    fn how_interfaces_are_is_told_once() {
        let names = [(3, "lo".to_owned()), (5, "no-such-one".to_owned())];
        let mut watch = Watch::new(names).unwrap();
        let mut told = Vec::new();
        for _ in 0..2 {
            watch.look(&mut |number, name, state| told.push((number, name.to_owned(), state)));
        }
        let state = |up, active_mtu| InterfaceState { up, active_mtu };
        let expected = [
            (3, "lo".to_owned(), state(true, mtu::MTU_4096)),
            (5, "no-such-one".to_owned(), state(false, 0)),
        ];
        assert_eq!(told, expected);
        // One that went keeps its MTU.
        watch.interfaces[0].1 = "gone".to_owned();
        let mut told = Vec::new();
        watch.look(&mut |number, _, state| told.push((number, state)));
        assert_eq!(told, [(3, state(false, mtu::MTU_4096))]);
    }
}
