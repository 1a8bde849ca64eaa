// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Frames in VXLAN (RFC 7348): between hosts, over a UDP socket of this one. The other end is
//! another process of ours, or a kernel's `vxlan` device.
//!
//! A directory says which GIDs are at which host. A frame whose source is at another host than the
//! one that sent it, or at none, is dropped.
use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::Arc;

use super::super::frame;
use super::bursts::{Bursts, To};
use super::{Arrived, Burst, Fate};
use crate::engine::message::is_multicast;
use crate::engine::tables::Gid;
use crate::engine::vm::Segment;

/// UDP port of VXLAN.
pub const PORT: u16 = 4789;
/// Largest network identifier.
pub const MAX_VNI: u32 = (1 << 24) - 1;
/// Bytes of a VXLAN header.
const HEADER: usize = 8;
/// The network identifier is valid: the only flag.
const VALID: u8 = 0x08;
/// What VXLAN adds to an IP packet, bytes: IPv4 or IPv6, UDP, VXLAN, Ethernet.
const OVERHEAD_IPV4: usize = 20 + 8 + HEADER + 14;
const OVERHEAD_IPV6: usize = 40 + 8 + HEADER + 14;
/// Datagrams that are not for us and are skipped at a time, at most.
const MOST_SKIPPED: usize = 8;

/// The longest IP packet in a tunnel of a host with this address, bytes, where IP packets between
/// hosts have at most `mtu` bytes.
#[must_use]
pub fn inner_mtu(address: SocketAddr, mtu: usize) -> usize {
    mtu.saturating_sub(match address.ip() {
        IpAddr::V4(_) => OVERHEAD_IPV4,
        IpAddr::V6(_) => OVERHEAD_IPV6,
    })
}

/// GIDs that are at a host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The first bits of them,
    pub prefix: Gid,
    /// and how many.
    pub bits: u8,
    /// The host.
    pub host: SocketAddr,
}

impl Entry {
    fn has(&self, gid: &Gid) -> bool {
        let differ = u128::from_be_bytes(self.prefix) ^ u128::from_be_bytes(*gid);
        differ.leading_zeros() >= u32::from(self.bits)
    }
}

/// Which GIDs are at which host: where several entries have one, the longest prefix counts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Directory(Vec<Entry>);

impl Directory {
    /// One with these entries.
    #[must_use]
    pub fn new(mut entries: Vec<Entry>) -> Self {
        entries.sort_by_key(|entry| std::cmp::Reverse(entry.bits));
        Self(entries)
    }

    fn host(&self, gid: &Gid) -> Option<SocketAddr> {
        let entry = self.0.iter().find(|entry| entry.has(gid))?;
        Some(entry.host)
    }

    /// Each host once.
    fn hosts(&self) -> Vec<SocketAddr> {
        let mut hosts: Vec<_> = self.0.iter().map(|entry| entry.host).collect();
        hosts.sort_unstable();
        hosts.dedup();
        hosts
    }
}

/// This host's end of the network between hosts.
#[derive(Debug)]
pub struct Tunnel {
    socket: UdpSocket,
    directory: Directory,
    hosts: Vec<SocketAddr>,
}

impl Tunnel {
    /// Opens it at an address of this host. `returns`: what goes to a group goes to this host, too, if
    /// it is in the directory.
    ///
    /// # Errors
    /// If the system refuses the socket.
    pub fn open(address: SocketAddr, directory: Directory, returns: bool) -> io::Result<Arc<Self>> {
        let socket = UdpSocket::bind(address)?;
        let mut hosts = directory.hosts();
        hosts.retain(|host| returns || *host != address);
        Ok(Arc::new(Self {
            socket,
            directory,
            hosts,
        }))
    }

    /// Where it is open.
    #[cfg(test)]
    pub(in super::super) fn address(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    /// The network of a datagram from `host`, if it is one with a frame of IP, and whether that is from
    /// where its source is.
    fn network_of(&self, datagram: &[u8], host: SocketAddr) -> Option<(u32, bool)> {
        let (header, frame) = datagram.split_first_chunk::<HEADER>()?;
        let [flags, _, _, _, vni @ .., _] = *header;
        let [high, middle, low] = vni;
        let source = frame::source(frame)?;
        // A kernel sends from any UDP port.
        let there = self.directory.host(&source);
        let there = there.is_some_and(|there| there.ip() == host.ip());
        let vni = u32::from_be_bytes([0, high, middle, low]);
        (flags & VALID != 0).then_some((vni, there))
    }
}

/// The port.
#[derive(Debug)]
pub(super) struct VxlanPort {
    tunnel: Arc<Tunnel>,
    datagrams: Bursts,
    /// Length of the datagram that is written, bytes.
    len: usize,
}

impl VxlanPort {
    /// # Errors
    /// If the system refuses.
    pub(super) fn new(tunnel: Arc<Tunnel>) -> io::Result<Self> {
        let datagrams = Bursts::new(tunnel.socket.try_clone()?, tunnel.hosts.clone())?;
        Ok(Self {
            tunnel,
            datagrams,
            len: 0,
        })
    }

    pub(super) fn socket(&self) -> &UdpSocket {
        self.datagrams.socket()
    }

    /// Room for a frame of `len` bytes of network `vni` to `destination`.
    pub(super) fn begin(
        &mut self,
        vni: u32,
        destination: Gid,
        len: usize,
    ) -> Result<&mut [u8], Fate> {
        let to = if is_multicast(&destination) {
            To::All
        } else {
            let host = self.tunnel.directory.host(&destination);
            host.map(To::Host).ok_or(Fate::NoHost)?
        };
        if to == To::All && self.tunnel.hosts.is_empty() {
            return Err(Fate::NoHost);
        }
        self.len = HEADER + len;
        let space = self.datagrams.begin(to, self.len);
        let (header, frame) = space
            .and_then(|space| space.split_first_chunk_mut::<HEADER>())
            .ok_or(Fate::Refused)?;
        let [_, high, middle, low] = vni.to_be_bytes();
        *header = [VALID, 0, 0, 0, high, middle, low, 0];
        Ok(frame)
    }

    /// The frame of [`Self::begin`].
    pub(super) fn written(&mut self) -> &mut [u8] {
        let datagram = self.datagrams.written(self.len);
        datagram.get_mut(HEADER..).unwrap_or_default()
    }

    /// The frame is written.
    pub(super) fn end(&mut self) {
        self.datagrams.end(self.len);
    }

    /// What was sent leaves now. Returns how many frames the system did not take.
    pub(super) fn flush(&mut self) -> u64 {
        self.datagrams.flush()
    }

    /// Takes frames that have come into `burst`, if there are any for us.
    pub(super) fn receive(&mut self, burst: &mut Burst) -> bool {
        // What is not for us is skipped, as far as that goes.
        for _ in 0..MOST_SKIPPED {
            let Some(came) = self.datagrams.receive(burst.space()) else {
                return false;
            };
            let Some(host) = came.from else {
                continue;
            };
            let mut at = 0;
            let Burst { room, frames } = &mut *burst;
            let bytes = room.bytes.get(..came.bytes).unwrap_or_default();
            for datagram in bytes.chunks(came.each.max(1)) {
                let frame = at + HEADER..at + datagram.len();
                if let Some((vni, there)) = self.tunnel.network_of(datagram, host) {
                    let segment = Segment::Vxlan(vni);
                    frames.push(if there {
                        Arrived::new(segment, frame)
                    } else {
                        Arrived::foreign(segment, frame, host.ip())
                    });
                }
                at += datagram.len();
            }
            if !burst.frames.is_empty() {
                return true;
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(last: [u8; 4]) -> Gid {
        let mut gid = [0; 16];
        gid[10..12].fill(0xff);
        gid[12..].copy_from_slice(&last);
        gid
    }

    fn entry(prefix: Gid, bits: u8, port: u16) -> Entry {
        let host = SocketAddr::from(([127, 0, 0, 1], port));
        Entry { prefix, bits, host }
    }

    #[test]
    fn the_longest_prefix_says_where_a_gid_is() {
        let directory = Directory::new(vec![
            entry(gid([10, 0, 0, 0]), 96 + 8, 1),
            entry(gid([10, 0, 7, 0]), 96 + 24, 2),
            entry(gid([10, 0, 7, 9]), 128, 3),
        ]);
        let port = |last| directory.host(&gid(last)).map(|host| host.port());
        assert_eq!(port([10, 9, 0, 1]), Some(1));
        assert_eq!(port([10, 0, 7, 1]), Some(2));
        assert_eq!(port([10, 0, 7, 9]), Some(3));
        assert_eq!(port([11, 0, 0, 1]), None);
        assert_eq!(directory.hosts().len(), 3);
        let all = Directory::new(vec![entry(Gid::default(), 0, 4)]);
        assert_eq!(
            all.host(&gid([1, 2, 3, 4])).map(|host| host.port()),
            Some(4)
        );
    }

    /// Two ends on this host, where 10.0.0.1 is at the first and 10.0.0.2 at the second.
    fn two() -> [VxlanPort; 2] {
        // Their addresses must be known before they are opened.
        let sockets = [0, 1].map(|_| UdpSocket::bind("127.0.0.1:0").unwrap());
        let addresses = sockets.map(|socket| socket.local_addr().unwrap());
        let entries = [1, 2].map(|last: u8| {
            let host = addresses[usize::from(last) - 1];
            Entry {
                prefix: gid([10, 0, 0, last]),
                bits: 128,
                host,
            }
        });
        addresses.map(|address| {
            let directory = Directory::new(entries.to_vec());
            VxlanPort::new(Tunnel::open(address, directory, false).unwrap()).unwrap()
        })
    }

    /// An Ethernet frame with an IPv4 header, as far as ports look at it.
    fn frame(source: [u8; 4]) -> Vec<u8> {
        let mut frame = vec![0; 60];
        frame[12..14].copy_from_slice(&[8, 0]);
        frame[14] = 0x45;
        frame[26..30].copy_from_slice(&source);
        frame
    }

    fn send(port: &mut VxlanPort, vni: u32, to: [u8; 4], frame: &[u8]) -> Fate {
        match port.begin(vni, gid(to), frame.len()) {
            Ok(space) => space.copy_from_slice(frame),
            Err(fate) => return fate,
        }
        port.end();
        assert_eq!(port.flush(), 0);
        Fate::Sent
    }

    fn receive(port: &mut VxlanPort) -> Option<(u32, Vec<u8>)> {
        let (vni, frame, gone) = receive_any(port)?;
        assert_eq!(gone, None);
        Some((vni, frame))
    }

    fn receive_any(port: &mut VxlanPort) -> Option<(u32, Vec<u8>, Option<Fate>)> {
        let mut burst = Burst::default();
        if !port.receive(&mut burst) {
            return None;
        }
        let [(Segment::Vxlan(vni), frame, gone)] = burst.frames().collect::<Vec<_>>()[..] else {
            panic!("not one frame");
        };
        Some((vni, frame.to_vec(), gone))
    }

    #[test]
    fn frames_arrive_with_their_network_at_the_host_of_their_gid() {
        let [mut first, mut second] = two();
        let sent = frame([10, 0, 0, 1]);
        let fate = send(&mut first, 0x12_3456, [10, 0, 0, 2], &sent);
        assert_eq!(fate, Fate::Sent);
        assert_eq!(receive(&mut second), Some((0x12_3456, sent.clone())));
        assert_eq!(receive(&mut second), None);
        // To a group: to all hosts but this one.
        assert_eq!(send(&mut first, 7, [224, 0, 0, 9], &sent), Fate::Sent);
        assert_eq!(receive(&mut second), Some((7, sent.clone())));
        assert_eq!(receive(&mut first), None);
        assert_eq!(send(&mut first, 7, [10, 9, 9, 9], &sent), Fate::NoHost);
    }

    #[test]
    fn a_host_sends_for_its_own_gids_alone() {
        let [mut first, mut second] = two();
        let foreign = frame([10, 0, 0, 2]);
        send(&mut first, 7, [10, 0, 0, 2], &foreign);
        let ours = frame([10, 0, 0, 1]);
        send(&mut first, 7, [10, 0, 0, 2], &ours);
        // On one host both have the same address: another has neither.
        let elsewhere = UdpSocket::bind("127.0.0.2:0").unwrap();
        let to = second.tunnel.socket.local_addr().unwrap();
        let mut datagram = vec![VALID, 0, 0, 0, 0, 0, 7, 0];
        datagram.extend_from_slice(&ours);
        elsewhere.send_to(&datagram, to).unwrap();
        elsewhere.send_to(&[0; 5], to).unwrap();
        // Nobody has this one.
        let nobodys = frame([10, 9, 9, 9]);
        send(&mut first, 7, [10, 0, 0, 2], &nobodys);
        assert_eq!(receive(&mut second), Some((7, foreign)));
        assert_eq!(receive(&mut second), Some((7, ours.clone())));
        // What is not taken is told, but for what is no VXLAN.
        let mut dropped = |frame: &[u8], host: [u8; 4]| {
            let gone = Some(Fate::Foreign(host.into()));
            let came = receive_any(&mut second);
            assert_eq!(came, Some((7, frame.to_vec(), gone)));
        };
        dropped(&ours, [127, 0, 0, 2]);
        dropped(&nobodys, [127, 0, 0, 1]);
        assert_eq!(receive(&mut second), None);
    }
}
