// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Frames of one VM, each a UDP datagram, as QEMU's `-netdev dgram` has them: between this process
//! and a switch in another one. It is for tests and for networks in user space.
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;

use super::{receive_buffer, Fate};

/// A VM's own interface.
#[derive(Debug)]
pub struct Interface {
    /// It takes datagrams of the switch alone.
    socket: UdpSocket,
}

impl Interface {
    /// Opens it at address `local`, with the switch at `remote`.
    ///
    /// # Errors
    /// If the system refuses the socket.
    pub fn open(local: SocketAddr, remote: SocketAddr) -> io::Result<Arc<Self>> {
        let socket = UdpSocket::bind(local)?;
        socket.set_nonblocking(true)?;
        socket.connect(remote)?;
        receive_buffer(&socket)?;
        Ok(Arc::new(Self { socket }))
    }

    pub(super) fn socket(&self) -> &UdpSocket {
        &self.socket
    }

    pub(super) fn send(&self, frame: &[u8]) -> Fate {
        match self.socket.send(frame) {
            Ok(_) => Fate::Sent,
            Err(_) => Fate::Refused,
        }
    }

    /// Reads the next frame into `space`, if there is one. Returns its length, bytes.
    pub(super) fn receive(&self, space: &mut [u8]) -> Option<usize> {
        loop {
            match self.socket.recv(space) {
                Ok(length) => return Some(length),
                // There is no switch, or was none when we sent: it may come.
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
                Err(_) => return None,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_and_go_and_nobody_else_sends_any() {
        let switch = UdpSocket::bind("127.0.0.1:0").unwrap();
        let free = UdpSocket::bind("127.0.0.1:0").unwrap();
        let local = free.local_addr().unwrap();
        drop(free);
        let interface = Interface::open(local, switch.local_addr().unwrap()).unwrap();
        let mut space = [0; 100];
        assert_eq!(interface.send(&[1; 60]), Fate::Sent);
        assert_eq!(switch.recv(&mut space).unwrap(), 60);
        let stranger = UdpSocket::bind("127.0.0.1:0").unwrap();
        stranger.send_to(&[2; 60], local).unwrap();
        switch.send_to(&[3; 61], local).unwrap();
        assert_eq!(interface.receive(&mut space), Some(61));
        assert_eq!(space[..61], [3; 61]);
        assert_eq!(interface.receive(&mut space), None);
    }

    #[test]
    fn a_switch_may_come_later() {
        let [free, switch] = [0, 1].map(|_| UdpSocket::bind("127.0.0.1:0").unwrap());
        let [local, remote] = [&free, &switch].map(|socket| socket.local_addr().unwrap());
        drop((free, switch));
        let interface = Interface::open(local, remote).unwrap();
        let mut space = [0; 100];
        interface.send(&[1; 60]);
        interface.send(&[1; 60]);
        assert_eq!(interface.receive(&mut space), None);
        let switch = UdpSocket::bind(remote).unwrap();
        switch.send_to(&[4; 60], local).unwrap();
        assert_eq!(interface.receive(&mut space), Some(60));
    }
}
