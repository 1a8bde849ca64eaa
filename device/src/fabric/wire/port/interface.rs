// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A VM's own interface: plain frames of it alone. They are those of an interface of the host, or
//! each is a UDP datagram, as QEMU's `-netdev dgram` has them, between this process and a switch in
//! another one, which is for tests and for networks in user space.
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use super::bursts::{Bursts, Came, To};
use super::tap::{Tap, TapEnd, TapError};
use super::{Arrived, Burst, Segment};

/// A VM's own interface.
#[derive(Debug)]
pub enum Interface {
    /// It takes datagrams of the switch alone.
    Datagrams(UdpSocket),
    /// At an interface of the host.
    Tap(Tap),
}

impl Interface {
    /// Opens it at an interface of the host.
    ///
    /// # Errors
    /// Those of [`Tap::join`].
    pub fn join(interface: &str) -> Result<Arc<Self>, TapError> {
        Ok(Arc::new(Self::Tap(Tap::join(interface)?)))
    }

    /// Opens it at address `local`, with the switch at `remote`.
    ///
    /// # Errors
    /// If the system refuses the socket.
    pub fn open(local: SocketAddr, remote: SocketAddr) -> io::Result<Arc<Self>> {
        let socket = UdpSocket::bind(local)?;
        socket.connect(remote)?;
        Ok(Arc::new(Self::Datagrams(socket)))
    }

    /// The way in and out for a worker.
    pub(super) fn end(&self) -> io::Result<InterfaceEnd> {
        Ok(match self {
            Self::Datagrams(socket) => {
                InterfaceEnd::Datagrams(Bursts::new(socket.try_clone()?, Vec::new())?)
            }
            Self::Tap(tap) => InterfaceEnd::Tap(tap.end()?),
        })
    }
}

/// A worker's end of an interface.
#[derive(Debug)]
pub(super) enum InterfaceEnd {
    Datagrams(Bursts),
    Tap(TapEnd),
}

impl InterfaceEnd {
    /// What is readable when frames have come.
    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        match self {
            Self::Datagrams(bursts) => bursts.socket().as_fd(),
            Self::Tap(tap) => tap.file().as_fd(),
        }
    }

    /// As [`super::Port::identification`].
    pub(super) fn identification(&self) -> u16 {
        match self {
            Self::Datagrams(_) => 0,
            Self::Tap(tap) => tap.identification(),
        }
    }

    /// Room for a frame of `len` bytes; `None` if no frame is so long.
    pub(super) fn begin(&mut self, len: usize) -> Option<&mut [u8]> {
        match self {
            Self::Datagrams(bursts) => bursts.begin(To::Peer, len),
            Self::Tap(tap) => tap.begin(len),
        }
    }

    /// The frame of [`Self::begin`], of `len` bytes.
    pub(super) fn written(&mut self, len: usize) -> &mut [u8] {
        match self {
            Self::Datagrams(bursts) => bursts.written(len),
            Self::Tap(tap) => tap.written(len),
        }
    }

    /// The frame of [`Self::begin`], of `len` bytes, is written.
    pub(super) fn end(&mut self, len: usize) {
        match self {
            Self::Datagrams(bursts) => bursts.end(len),
            Self::Tap(tap) => tap.end(len),
        }
    }

    /// Sends what waits. Returns how many frames the system did not take since it was called last.
    pub(super) fn flush(&mut self) -> u64 {
        match self {
            Self::Datagrams(bursts) => bursts.flush(),
            Self::Tap(tap) => tap.flush(),
        }
    }

    /// Reads frames that have come on a segment; false if there are none.
    pub(super) fn receive(&mut self, segment: Segment, burst: &mut Burst) -> bool {
        match self {
            Self::Datagrams(bursts) => {
                let Some(Came { bytes, each, .. }) = bursts.receive(burst.space()) else {
                    return false;
                };
                for at in (0..bytes).step_by(each.max(1)) {
                    let place = at..bytes.min(at + each);
                    burst.frames.push(Arrived::new(segment, place));
                }
                !burst.frames.is_empty()
            }
            Self::Tap(tap) => tap.receive(segment, burst),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn send(end: &mut InterfaceEnd, len: usize) -> u64 {
        end.begin(len).unwrap().fill(1);
        end.end(len);
        end.flush()
    }

    fn received(end: &mut InterfaceEnd) -> Option<usize> {
        let mut burst = Burst::default();
        let came = end.receive(Segment::Own(0), &mut burst);
        came.then(|| burst.frames().map(|(_, frame, _)| frame.len()).sum())
    }

    #[test]
    fn frames_come_and_go_and_nobody_else_sends_any() {
        let [free, switch] = [0, 1].map(|_| UdpSocket::bind("127.0.0.1:0").unwrap());
        let local = free.local_addr().unwrap();
        drop(free);
        let interface = Interface::open(local, switch.local_addr().unwrap()).unwrap();
        let mut frames = interface.end().unwrap();
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
        let mut frames = interface.end().unwrap();
        send(&mut frames, 60);
        send(&mut frames, 60);
        assert_eq!(received(&mut frames), None);
        let switch = UdpSocket::bind(remote).unwrap();
        switch.send_to(&[4; 60], local).unwrap();
        assert_eq!(received(&mut frames), Some(60));
    }
}
