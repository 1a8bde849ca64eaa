// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Frames of one VM, each a UDP datagram, as QEMU's `-netdev dgram` has them: between this process
//! and a switch in another one. It is for tests and for networks in user space.
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;

use super::bursts::Bursts;

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
        socket.connect(remote)?;
        Ok(Arc::new(Self { socket }))
    }

    /// Frames go to and come from it in bursts.
    pub(super) fn bursts(&self) -> io::Result<Bursts> {
        Bursts::new(self.socket.try_clone()?, Vec::new())
    }
}

#[cfg(test)]
mod tests {
    use super::super::bursts::To;
    use super::*;

    fn send(bursts: &mut Bursts, len: usize) -> u64 {
        bursts.begin(To::Peer, len).unwrap().fill(1);
        bursts.end(len);
        bursts.flush()
    }

    fn received(bursts: &mut Bursts) -> Option<usize> {
        let mut space = vec![0; super::super::LONGEST];
        bursts.receive(&mut space).map(|came| came.bytes)
    }

    #[test]
    fn frames_come_and_go_and_nobody_else_sends_any() {
        let [free, switch] = [0, 1].map(|_| UdpSocket::bind("127.0.0.1:0").unwrap());
        let local = free.local_addr().unwrap();
        drop(free);
        let interface = Interface::open(local, switch.local_addr().unwrap()).unwrap();
        let mut frames = interface.bursts().unwrap();
        assert_eq!(send(&mut frames, 60), 0);
        assert_eq!(switch.recv(&mut [0; 100]).unwrap(), 60);
        let stranger = UdpSocket::bind("127.0.0.1:0").unwrap();
        stranger.send_to(&[2; 60], local).unwrap();
        switch.send_to(&[3; 61], local).unwrap();
        assert_eq!(received(&mut frames), Some(61));
        assert_eq!(received(&mut frames), None);
    }

    #[test]
    fn a_switch_may_come_later() {
        let [free, switch] = [0, 1].map(|_| UdpSocket::bind("127.0.0.1:0").unwrap());
        let [local, remote] = [&free, &switch].map(|socket| socket.local_addr().unwrap());
        drop((free, switch));
        let interface = Interface::open(local, remote).unwrap();
        let mut frames = interface.bursts().unwrap();
        send(&mut frames, 60);
        send(&mut frames, 60);
        assert_eq!(received(&mut frames), None);
        let switch = UdpSocket::bind(remote).unwrap();
        switch.send_to(&[4; 60], local).unwrap();
        assert_eq!(received(&mut frames), Some(60));
    }
}
