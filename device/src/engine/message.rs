// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What requester and responder say to each other.
use virtio_rdma_spec::facts::{Imm, Kind};
use virtio_rdma_spec::verbs::MASK_24;

use crate::verbs::cq::L2Source;
use crate::verbs::WcError;

/// A message, as its responder needs to know it.
#[derive(Debug, Clone, Copy)]
pub struct Message {
    /// `wr_opcode`.
    pub opcode: u8,
    /// What it does.
    pub kind: Kind,
    /// What `imm` says.
    pub imm_is: Imm,
    /// Raise a solicited event at the responder.
    pub solicited: bool,
    /// Immediate data, or a key to invalidate.
    pub imm: u32,
    /// Remote virtual address.
    pub remote_addr: u64,
    /// Remote key.
    pub rkey: u32,
    /// XRC: the shared receive queue that it goes to.
    pub srqn: u32,
    /// Sending queue pair.
    pub src_qp: u32,
    /// Length in all, bytes; of a SEND in packets, as far as it is known so far.
    pub length: u64,
}

/// How a message, or a slice of it, fared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// The slice was placed; the message goes on.
    Progress,
    /// The message is complete.
    Done,
    /// The peer is occupied for a moment: try again soon.
    Busy,
    /// The peer's VM is stopped: wait, this does not count.
    Stopped,
    /// Nobody is there.
    NoAnswer,
    /// The responder has no receive work request: its RNR timer code.
    NotReady(u8),
    /// The responder refused: the requester's completion status, and the reason.
    Refused(WcError),
    /// Our own memory is not as the keys say: completion status, and the reason.
    Local(WcError),
}

/// Bytes before the payload of a received datagram.
pub const GRH: usize = 40;

/// Destination queue pair of messages to multicast groups.
const MULTICAST_QPN: u32 = MASK_24;

/// Where a datagram goes, and what its header says.
#[derive(Debug, Clone, Copy)]
pub struct Datagram {
    /// Source GID.
    pub sgid: [u8; 16],
    /// MAC address and VLAN of the source.
    pub source: L2Source,
    /// Destination GID.
    pub dgid: [u8; 16],
    /// MAC address of the destination.
    pub dmac: [u8; 6],
    /// Destination queue pair.
    pub qpn: u32,
    /// Q_Key.
    pub qkey: u32,
    /// Flow label.
    pub flow_label: u32,
    /// Traffic class.
    pub traffic_class: u8,
    /// Hop limit.
    pub hop_limit: u8,
    /// Service level.
    pub sl: u8,
}

/// UDP port of RoCEv2 as the next header's payload counts: UDP header, BTH, DETH, ICRC.
const ROCE_HEADERS: u64 = 8 + 12 + 8 + 4;

impl Datagram {
    /// Whether it goes to a multicast group.
    #[must_use]
    pub fn multicast(&self) -> bool {
        self.qpn == MULTICAST_QPN && is_multicast(&self.dgid)
    }

    /// Source and destination, if the network header is one of IPv4.
    fn ipv4(&self) -> Option<[[u8; 4]; 2]> {
        Some([ipv4(&self.sgid)?, ipv4(&self.dgid)?])
    }

    /// Whether the network header is one of IPv4.
    #[must_use]
    pub fn is_ipv4(&self) -> bool {
        self.ipv4().is_some()
    }

    /// The network header that the receiver finds before the payload of `length` bytes, as RoCEv2
    /// has it: an IPv6 header, or 20 zero bytes and an IPv4 header where both GIDs are IPv4
    /// addresses.
    #[must_use]
    pub fn grh(&self, length: u64) -> [u8; GRH] {
        let payload = u16::try_from(length + ROCE_HEADERS).unwrap_or(u16::MAX);
        let mut out = [0; GRH];
        if let Some([source, destination]) = self.ipv4() {
            let mut header = [0u8; 20];
            header[0] = 0x45;
            header[1] = self.traffic_class;
            header[2..4].copy_from_slice(&payload.saturating_add(20).to_be_bytes());
            // Do not fragment; protocol 17 is UDP.
            header[6] = 0x40;
            header[8] = self.hop_limit;
            header[9] = 17;
            header[12..16].copy_from_slice(&source);
            header[16..20].copy_from_slice(&destination);
            let sum: u32 = header
                .chunks_exact(2)
                .map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])))
                .sum();
            let folded = (sum & 0xffff) + (sum >> 16);
            let folded = (folded & 0xffff) + (folded >> 16);
            header[10..12].copy_from_slice(&(!(folded as u16)).to_be_bytes());
            out[20..].copy_from_slice(&header);
            return out;
        }
        let first = 6u32 << 28 | u32::from(self.traffic_class) << 20 | (self.flow_label & 0xf_ffff);
        out[..4].copy_from_slice(&first.to_be_bytes());
        out[4..6].copy_from_slice(&payload.to_be_bytes());
        out[6] = 17;
        out[7] = self.hop_limit;
        out[8..24].copy_from_slice(&self.sgid);
        out[24..].copy_from_slice(&self.dgid);
        out
    }
}

/// The IPv4 address that a GID stands for, if it does.
fn ipv4(gid: &[u8; 16]) -> Option<[u8; 4]> {
    let (prefix, address) = gid.split_at(12);
    if prefix == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff] {
        address.try_into().ok()
    } else {
        None
    }
}

/// Whether a GID is that of a multicast group: an IPv6 multicast address, or an IPv4 one.
#[must_use]
pub fn is_multicast(gid: &[u8; 16]) -> bool {
    gid.first() == Some(&0xff) || ipv4(gid).is_some_and(|[first, ..]| first & 0xf0 == 0xe0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn datagram(sgid: [u8; 16], dgid: [u8; 16]) -> Datagram {
        Datagram {
            sgid,
            source: L2Source::default(),
            dgid,
            dmac: [0; 6],
            qpn: 1,
            qkey: 1,
            flow_label: 5,
            traffic_class: 3,
            hop_limit: 64,
            sl: 0,
        }
    }

    fn mapped(address: [u8; 4]) -> [u8; 16] {
        let mut gid = [0; 16];
        gid[10..12].fill(0xff);
        gid[12..].copy_from_slice(&address);
        gid
    }

    #[test]
    fn the_ipv4_header_checks_out() {
        let grh = datagram(mapped([10, 0, 0, 1]), mapped([10, 0, 0, 2])).grh(100);
        assert_eq!(grh[..20], [0; 20]);
        let sum: u32 = grh[20..]
            .chunks(2)
            .map(|c| u32::from(c[0]) << 8 | u32::from(c[1]))
            .sum();
        assert_eq!((sum & 0xffff) + (sum >> 16), 0xffff);
        assert_eq!(grh[32..36], [10, 0, 0, 1]);
    }

    #[test]
    fn the_ipv6_header_has_both_gids() {
        let (a, b) = ([0xfe; 16], [0xfd; 16]);
        let grh = datagram(a, b).grh(0);
        assert_eq!(grh[0] >> 4, 6);
        assert_eq!((&grh[8..24], &grh[24..]), (&a[..], &b[..]));
    }

    #[test]
    fn multicast_groups_are_known() {
        assert!(is_multicast(&[0xff; 16]));
        assert!(is_multicast(&mapped([224, 1, 2, 3])));
        assert!(!is_multicast(&mapped([10, 1, 2, 3])));
        assert!(!is_multicast(&[0xfe; 16]));
    }
}
