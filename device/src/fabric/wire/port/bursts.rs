// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A UDP socket that many datagrams leave by one system call, and come by one: segmentation and
//! receive offload (`UDP_SEGMENT`, `UDP_GRO`; udp(7)).
//!
//! Datagrams that are written one after the other for the same address wait as long as they have
//! the same length; the last one may be shorter.
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd;

use nix::cmsg_space;
use nix::errno::Errno;
use nix::sys::socket::sockopt::{RcvBuf, RcvBufForce, UdpGroSegment, UdpGsoSegment};
use nix::sys::socket::{recvmsg, setsockopt, ControlMessageOwned, MsgFlags, SockaddrStorage};

use super::LONGEST;

/// Bytes of datagrams that may wait in the socket to be received.
const RECEIVED: usize = 8 << 20;
/// Datagrams that leave at once, and their bytes, at most: what one IP packet could have.
const MOST: usize = 64;
const MOST_BYTES: usize = 65_000;

/// Where datagrams go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum To {
    /// Where the socket is connected to.
    Peer,
    /// An address.
    Host(SocketAddr),
    /// Each host of a list.
    All,
}

/// A socket, what is to leave it, and how it is set.
#[derive(Debug)]
pub(super) struct Bursts {
    socket: UdpSocket,
    /// What waits to be sent: `end` bytes, for `to`, in datagrams of `each` bytes.
    written: Vec<u8>,
    end: usize,
    to: To,
    each: usize,
    count: usize,
    /// The last one is shorter: nothing may follow.
    closed: bool,
    /// The list of hosts of [`To::All`].
    hosts: Vec<SocketAddr>,
    /// Bytes of a datagram beyond which the socket makes several.
    segment: usize,
    /// Datagrams of so many bytes, and longer ones, leave one by one: the system cannot make several
    /// of one here, or not if they are so long.
    single_from: usize,
    /// Datagrams that the system did not take, since it was asked last.
    refused: u64,
    control: Vec<u8>,
}

/// Datagrams that came at once from one address, each of `each` bytes but for the last one.
#[derive(Debug, Clone, Copy)]
pub(super) struct Came {
    pub bytes: usize,
    pub each: usize,
    /// Where they came from, if the system tells.
    pub from: Option<SocketAddr>,
}

impl Bursts {
    /// Takes over a socket, and makes room in it for bursts, which wait there while the worker does
    /// other things. Without privileges there is less.
    ///
    /// # Errors
    /// If the system refuses.
    pub(super) fn new(socket: UdpSocket, hosts: Vec<SocketAddr>) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        if setsockopt(&socket, RcvBufForce, &RECEIVED).is_err() {
            setsockopt(&socket, RcvBuf, &RECEIVED)?;
        }
        // Where the kernel does not have it, each comes alone.
        let _ = setsockopt(&socket, UdpGroSegment, &true);
        Ok(Self {
            socket,
            written: vec![0; LONGEST],
            end: 0,
            to: To::Peer,
            each: 0,
            count: 0,
            closed: false,
            hosts,
            segment: 0,
            single_from: usize::MAX,
            refused: 0,
            control: cmsg_space!(i32),
        })
    }

    pub(super) fn socket(&self) -> &UdpSocket {
        &self.socket
    }

    /// Room for a datagram of `len` bytes to `to`. What waits is sent before, if this one cannot go
    /// with it. `None` if no datagram is so long.
    pub(super) fn begin(&mut self, to: To, len: usize) -> Option<&mut [u8]> {
        let together = self.to == to
            && !self.closed
            && len <= self.each
            && self.count < MOST
            && self.end + len <= MOST_BYTES;
        if self.count != 0 && !together {
            self.send();
        }
        self.to = to;
        self.written.get_mut(self.end..self.end + len)
    }

    /// The datagram of [`Self::begin`], of `len` bytes.
    pub(super) fn written(&mut self, len: usize) -> &mut [u8] {
        let place = self.end..self.end + len;
        self.written.get_mut(place).unwrap_or_default()
    }

    /// The datagram of [`Self::begin`], of `len` bytes, is written.
    pub(super) fn end(&mut self, len: usize) {
        if self.count == 0 {
            self.each = len;
        }
        self.closed = len < self.each;
        self.end += len;
        self.count += 1;
    }

    /// Sends what waits. Returns how many datagrams the system did not take since it was called
    /// last.
    pub(super) fn flush(&mut self) -> u64 {
        if self.count != 0 {
            self.send();
        }
        std::mem::take(&mut self.refused)
    }

    fn send(&mut self) {
        match self.to {
            To::All => {
                for at in 0..self.hosts.len() {
                    if let Some(host) = self.hosts.get(at).copied() {
                        self.send_to(Some(host));
                    }
                }
            }
            To::Host(host) => self.send_to(Some(host)),
            To::Peer => self.send_to(None),
        }
        self.end = 0;
        self.count = 0;
        self.closed = false;
    }

    fn send_to(&mut self, host: Option<SocketAddr>) {
        let bytes = self.written.get(..self.end).unwrap_or_default();
        let several = self.count > 1 && self.each < self.single_from;
        if several {
            let set = set_segment(&self.socket, &mut self.segment, self.each);
            let sent = set.and_then(|()| send_one(&self.socket, bytes, host));
            match sent {
                Ok(_) => return,
                // Such a datagram does not fit the way out.
                Err(Errno::EINVAL | Errno::EMSGSIZE) => self.single_from = self.each,
                // The way out computes no checksums.
                Err(Errno::EIO | Errno::ENOPROTOOPT) => self.single_from = 0,
                Err(_) => {
                    self.refused += self.count as u64;
                    return;
                }
            }
        }
        if self.segment != 0 && self.each > self.segment {
            let _ = set_segment(&self.socket, &mut self.segment, 0);
        }
        for datagram in bytes.chunks(self.each.max(1)) {
            let sent = send_one(&self.socket, datagram, host);
            self.refused += u64::from(sent.is_err());
        }
    }

    /// Reads what came at once into `space`, if anything came.
    pub(super) fn receive(&mut self, space: &mut [u8]) -> Option<Came> {
        loop {
            let mut parts = [io::IoSliceMut::new(space)];
            let control = Some(self.control.as_mut_slice());
            let fd = std::os::fd::AsRawFd::as_raw_fd(&self.socket);
            let message =
                match recvmsg::<SockaddrStorage>(fd, &mut parts, control, MsgFlags::empty()) {
                    Ok(message) => message,
                    Err(Errno::EAGAIN) => return None,
                    // An error of a datagram that was sent: nobody is there, perhaps not yet.
                    Err(Errno::ECONNREFUSED | Errno::EHOSTUNREACH | Errno::ENETUNREACH) => continue,
                    Err(_) => return None,
                };
            let bytes = message.bytes;
            let segment = message.cmsgs().into_iter().flatten().find_map(|control| {
                let ControlMessageOwned::UdpGroSegments(each) = control else {
                    return None;
                };
                usize::try_from(each).ok()
            });
            let from = message.address.and_then(|address| socket_address(&address));
            let each = segment.filter(|each| *each != 0).unwrap_or(bytes);
            return Some(Came { bytes, each, from });
        }
    }
}

fn set_segment(socket: &UdpSocket, now: &mut usize, wanted: usize) -> Result<(), Errno> {
    if *now == wanted {
        return Ok(());
    }
    let value = i32::try_from(wanted).map_err(|_| Errno::EINVAL)?;
    setsockopt(&socket.as_fd(), UdpGsoSegment, &value)?;
    *now = wanted;
    Ok(())
}

fn send_one(socket: &UdpSocket, bytes: &[u8], host: Option<SocketAddr>) -> Result<usize, Errno> {
    let sent = match host {
        Some(host) => socket.send_to(bytes, host),
        None => socket.send(bytes),
    };
    sent.map_err(|error| Errno::from_raw(error.raw_os_error().unwrap_or_default()))
}

fn socket_address(address: &SockaddrStorage) -> Option<SocketAddr> {
    if let Some(v4) = address.as_sockaddr_in() {
        return Some(SocketAddr::from((v4.ip(), v4.port())));
    }
    let v6 = address.as_sockaddr_in6()?;
    Some(SocketAddr::from((v6.ip(), v6.port())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two() -> (Bursts, Bursts) {
        let [a, b] = [0, 1].map(|_| UdpSocket::bind("127.0.0.1:0").unwrap());
        a.connect(b.local_addr().unwrap()).unwrap();
        let of = |socket| Bursts::new(socket, Vec::new()).unwrap();
        (of(a), of(b))
    }

    fn put(bursts: &mut Bursts, len: usize, byte: u8) {
        bursts.begin(To::Peer, len).unwrap().fill(byte);
        bursts.end(len);
    }

    /// All datagrams that came: how long each is, and what is in it.
    fn all(bursts: &mut Bursts) -> (usize, Vec<(usize, u8)>) {
        let mut space = vec![0; LONGEST];
        let (mut calls, mut datagrams) = (0, Vec::new());
        while let Some(Came { bytes, each, .. }) = bursts.receive(&mut space) {
            calls += 1;
            for datagram in space[..bytes].chunks(each) {
                assert!(datagram.iter().all(|byte| *byte == datagram[0]));
                datagrams.push((datagram.len(), datagram[0]));
            }
        }
        (calls, datagrams)
    }

    #[test]
    fn datagrams_of_a_length_go_together_and_all_arrive_in_order() {
        let (mut a, mut b) = two();
        let lens = [
            1000, 1000, 1000, 7, 1000, 1000, 2000, 2000, 2000, 500, 100, 100, 3000,
        ];
        for (number, len) in (0..).zip(lens) {
            put(&mut a, len, number);
        }
        assert_eq!(a.flush(), 0);
        let (calls, came) = all(&mut b);
        let sent: Vec<_> = lens.into_iter().zip(0..).collect();
        assert_eq!(came, sent);
        // Five bursts, if this kernel can; never more than there are datagrams.
        assert!(calls <= lens.len());
        let bursts = a.single_from == usize::MAX;
        assert!(bursts, "this kernel sends bursts over loopback");
        assert_eq!(calls, 5);
        assert_eq!(a.flush(), 0);
        assert_eq!(all(&mut b), (0, Vec::new()));
    }

    #[test]
    fn a_datagram_that_is_not_ended_goes_nowhere() {
        let (mut a, mut b) = two();
        for number in 0..3 {
            put(&mut a, 1000, number);
            a.begin(To::Peer, 1000).unwrap().fill(9);
            assert_eq!(a.written(1000), [9; 1000]);
        }
        assert_eq!(a.flush(), 0);
        assert_eq!(all(&mut b).1, [(1000, 0), (1000, 1), (1000, 2)]);
        a.begin(To::Peer, 1000).unwrap().fill(9);
        assert_eq!(a.flush(), 0);
        assert_eq!(all(&mut b).0, 0);
    }

    #[test]
    fn a_burst_has_its_limits() {
        let (mut a, mut b) = two();
        for number in 0..200u8 {
            put(&mut a, 100, number);
        }
        for number in 0..20 {
            put(&mut a, 8000, number);
        }
        assert_eq!(a.flush(), 0);
        let (_, came) = all(&mut b);
        assert_eq!(came.len(), 220);
        assert_eq!(came[199], (100, 199));
        assert_eq!(came[219], (8000, 19));
        assert!(a.begin(To::Peer, LONGEST + 1).is_none());
    }

    /// Loopback's MTU is 65,536, so no datagram is too long there; one that is has the same error.
    #[test]
    fn datagrams_that_are_too_long_for_a_burst_do_not_keep_others_from_it() {
        let (mut a, mut b) = two();
        a.single_from = 2000;
        for number in 0..3 {
            put(&mut a, 2000, number);
        }
        for number in 3..6 {
            put(&mut a, 1999, number);
        }
        assert_eq!(a.flush(), 0);
        let (calls, came) = all(&mut b);
        assert_eq!(
            came.iter().map(|(_, byte)| *byte).collect::<Vec<_>>(),
            [0, 1, 2, 3, 4, 5]
        );
        // The first shorter one may be the last of a burst of longer ones.
        assert_eq!(calls, 5);
    }

    #[test]
    fn what_nobody_takes_is_counted_or_lost_and_does_no_harm() {
        let (mut a, b) = two();
        let to = b.socket.local_addr().unwrap();
        drop(b);
        for _ in 0..3 {
            put(&mut a, 100, 1);
            put(&mut a, 100, 1);
            assert!(a.flush() <= 2);
        }
        let mut b = Bursts::new(UdpSocket::bind(to).unwrap(), Vec::new()).unwrap();
        // An error that waits goes first.
        put(&mut a, 100, 2);
        a.flush();
        put(&mut a, 100, 3);
        assert_eq!(a.flush(), 0);
        assert!(all(&mut b).1.contains(&(100, 3)));
        assert_eq!(all(&mut a).0, 0);
    }
}
