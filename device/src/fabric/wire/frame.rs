// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Frames of RoCEv2: Ethernet, perhaps with the tag of a VLAN, IPv4 or IPv6, UDP, a packet of the
//! transport, ICRC.
use super::icrc::icrc;
use super::packet::{is_srd, padding, Headers, Packet, Payload};
use super::verdict::Reason;
use crate::engine::message::Datagram;
use crate::verbs::cq::{L2Source, NO_VLAN};

/// UDP port of RoCEv2.
const PORT: u16 = 4791;
/// The least of the UDP source ports that adapters use.
const SOURCE_PORT: u16 = 0xc000;
const ETHERNET: usize = 14;
/// Bytes of a VLAN's tag (IEEE 802.1Q): its type, three bits of priority, one that is not used, and the
/// number of the VLAN, zero if it is about priority alone.
const TAG: usize = 4;
const VLAN: u16 = 0xfff;
const IPV4: usize = 20;
const IPV6: usize = 40;
const UDP: usize = 8;
const ICRC: usize = 4;
const TYPE_IPV4: u16 = 0x0800;
const TYPE_IPV6: u16 = 0x86dd;
const TYPE_VLAN: u16 = 0x8100;
/// Number of UDP as IP's next protocol.
const PROTOCOL_UDP: u8 = 17;
/// Explicit congestion notification, the lower bits of a traffic class (RFC 3168): a router that is
/// congested sets `CONGESTED` instead of dropping packets with `CAPABLE`.
const ECN: u8 = 3;
const CAPABLE: u8 = 2;
const CONGESTED: u8 = 3;
/// The bits of a flow label.
const FLOW_LABEL: u32 = 0xf_ffff;
/// An IPv4 address as a GID.
const MAPPED: [u8; 12] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff];

/// What a frame's headers say beyond its packet.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Addresses {
    pub source_mac: [u8; 6],
    pub destination_mac: [u8; 6],
    pub source: [u8; 16],
    pub destination: [u8; 16],
    pub traffic_class: u8,
    /// Of IPv6.
    pub flow_label: u32,
    /// To be sent, zero stands for 64.
    pub hop_limit: u8,
    /// The VLAN that it is in.
    pub vlan: Option<Vlan>,
}

/// A VLAN, and the priority of a frame in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Vlan {
    /// Not zero.
    pub id: u16,
    /// 0 to 7.
    pub priority: u8,
}

impl Vlan {
    /// That of a GID with this source, of which service level `sl` is the priority.
    pub(super) fn of(source: L2Source, sl: u8) -> Option<Self> {
        let is_one = source.vlan != 0 && source.vlan != NO_VLAN;
        is_one.then_some(Self {
            id: source.vlan & VLAN,
            priority: sl & 7,
        })
    }

    /// That of a tag.
    fn read(tag: u16) -> Option<Self> {
        let id = tag & VLAN;
        let priority = (tag >> 13) as u8;
        (id != 0).then_some(Self { id, priority })
    }
}

impl Addresses {
    /// Those of a datagram.
    pub(super) fn of(to: &Datagram) -> Self {
        Self {
            source_mac: to.source.mac,
            destination_mac: to.dmac,
            source: to.sgid,
            destination: to.dgid,
            traffic_class: to.traffic_class,
            flow_label: to.flow_label,
            hop_limit: to.hop_limit,
            vlan: Vlan::of(to.source, to.sl),
        }
    }

    /// The way back.
    pub(super) fn back(&self) -> Self {
        Self {
            source_mac: self.destination_mac,
            destination_mac: self.source_mac,
            source: self.destination,
            destination: self.source,
            traffic_class: self.traffic_class & !ECN,
            hop_limit: 0,
            ..*self
        }
    }

    /// Whether it comes from where `way` goes, and goes to where that comes from.
    pub(super) fn is_answer_to(&self, way: &Self) -> bool {
        let here = self.destination_mac == way.source_mac && self.destination == way.source;
        here && self.vlan_id() == way.vlan_id() && self.source == way.destination
    }

    /// Whether it is in the VLAN of a GID with this source.
    pub(super) fn is_in_vlan_of(&self, source: L2Source) -> bool {
        let id = |vlan: Vlan| vlan.id;
        Vlan::of(source, 0).map(id) == self.vlan.map(id)
    }

    /// The VLAN's number as GIDs and completions have it.
    pub(super) fn vlan_id(&self) -> u16 {
        self.vlan.map_or(NO_VLAN, |vlan| vlan.id)
    }

    /// Whether a router that was congested has said so.
    pub(super) fn congested(&self) -> bool {
        self.traffic_class & ECN == CONGESTED
    }
}

/// A frame that came, with headers that are right as far as UDP.
#[derive(Debug, Clone, Copy)]
pub(super) struct Frame<'a> {
    pub addresses: Addresses,
    /// What its packet is read from.
    pub bytes: &'a [u8],
    /// What its ICRC is of.
    covered: &'a [u8],
    icrc: [u8; ICRC],
}

impl<'a> Frame<'a> {
    /// Its packet.
    ///
    /// # Errors
    /// Why it is to be dropped.
    pub(super) fn packet(&self) -> Result<Packet<'a>, Reason> {
        if icrc(self.covered) != Some(self.icrc) {
            return Err(Reason::Icrc);
        }
        Packet::read(self.bytes).ok_or(Reason::Malformed)
    }
}

fn mapped(address: &[u8]) -> Option<[u8; 16]> {
    let mut gid = [0; 16];
    let (prefix, rest) = gid.split_at_mut(MAPPED.len());
    prefix.copy_from_slice(&MAPPED);
    rest.copy_from_slice(address.get(..4)?);
    Some(gid)
}

/// The sum of 16-bit words as the Internet's checksums have it, on top of `sum`.
pub(super) fn folded(sum: u32, bytes: &[u8]) -> u16 {
    // Two words at a time: what the lower one carries is added in the end.
    let pairs = bytes.chunks_exact(4);
    let mut last = [0; 4];
    for (to, from) in last.iter_mut().zip(pairs.remainder()) {
        *to = *from;
    }
    let two = |four: &[u8]| {
        four.first_chunk()
            .map_or(0, |four| u32::from_be_bytes(*four))
    };
    let sums = pairs.map(two).map(u64::from);
    let mut sum = sums.fold(u64::from(sum), u64::wrapping_add);
    sum = sum.wrapping_add(u64::from(two(&last)));
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// The checksum of an IPv4 header, whose own field is zero; zero of a header that has its checksum.
pub(super) fn checksum(header: &[u8]) -> u16 {
    !folded(0, header)
}

/// The way of frames: their addresses, and the headers before their packets' as far as they are the
/// same for all.
#[derive(Debug, Clone, Copy)]
pub(super) struct Route {
    pub addresses: Addresses,
    headers: [u8; LONGEST_HEADERS],
    /// Where the IP header is in these, and where they end.
    ip: usize,
    end: usize,
    /// Of IPv4: the sum of the words of its header that are the same for all.
    sum: Option<u32>,
}

/// The longest headers before a packet's, bytes.
const LONGEST_HEADERS: usize = ETHERNET + TAG + IPV6 + UDP;

/// The flow label of packets between two queue pairs that have none, whichever of them sends: from it
/// comes their source port. The formula is that of Linux (`rdma_calc_flow_label`).
fn label_of([own, other]: [u32; 2]) -> u32 {
    let product = u64::from(own) * u64::from(other);
    let folded = product ^ product >> 20;
    (folded ^ folded >> 40) as u32 & FLOW_LABEL
}

/// A GID as the IPv4 address that it is of, if it is.
fn ipv4_of(gid: &[u8; 16]) -> Option<[u8; 4]> {
    let rest = gid.strip_prefix(&MAPPED)?;
    rest.first_chunk().copied()
}

impl Route {
    /// That between two queue pairs with these numbers. All its packets have the same source port, so
    /// that they stay in order: it comes from the flow label, and without one from the numbers, as with
    /// other adapters, so that not all of a host go by the same link or to the same processor.
    pub(super) fn new(addresses: Addresses, qps: [u32; 2]) -> Self {
        let label = match addresses.flow_label {
            0 => label_of(qps),
            label => label,
        };
        Self::from_port(addresses, (label ^ label >> 14) as u16)
    }

    /// That of reliable datagrams on a path, of eight: routers that spread packets over links of the
    /// same cost go by the source port.
    pub(super) fn on_path(addresses: Addresses, path: u8) -> Self {
        let both = addresses.source.iter().chain(&addresses.destination);
        let sum = both.fold(0u16, |sum, byte| sum.rotate_left(5) ^ u16::from(*byte));
        Self::from_port(addresses, sum << 3 | u16::from(path & 7))
    }

    fn from_port(addresses: Addresses, variant: u16) -> Self {
        let mut headers = [0; LONGEST_HEADERS];
        let mut out = Headers::new(&mut headers);
        out.put(&addresses.destination_mac);
        out.put(&addresses.source_mac);
        if let Some(Vlan { id, priority }) = addresses.vlan {
            let tag = u16::from(priority) << 13 | id;
            out.put(&TYPE_VLAN.to_be_bytes());
            out.put(&tag.to_be_bytes());
        }
        let hop_limit = match addresses.hop_limit {
            0 => 64,
            limit => limit,
        };
        let ipv4 = ipv4_of(&addresses.source).zip(ipv4_of(&addresses.destination));
        let ethertype = ipv4.map_or(TYPE_IPV6, |_| TYPE_IPV4);
        out.put(&ethertype.to_be_bytes());
        let ip = out.len();
        // What differs from packet to packet is zero.
        let mut sum = None;
        if let Some((source, destination)) = ipv4 {
            let mut fields = [0; IPV4];
            fields[0] = 0x45;
            // Do not fragment.
            fields[6] = 0x40;
            fields[8] = hop_limit;
            fields[9] = PROTOCOL_UDP;
            fields[12..16].copy_from_slice(&source);
            fields[16..].copy_from_slice(&destination);
            out.put(&fields);
            sum = Some(folded(0, &fields).into());
        } else {
            let first = 6 << 28 | addresses.flow_label & FLOW_LABEL;
            out.put(&first.to_be_bytes());
            out.put(&[0, 0, PROTOCOL_UDP, hop_limit]);
            out.put(&addresses.source);
            out.put(&addresses.destination);
        }
        // No checksum: the ICRC is a better one.
        let source_port = SOURCE_PORT | variant & 0x3fff;
        for field in [source_port, PORT, 0, 0] {
            out.put(&field.to_be_bytes());
        }
        let end = out.len();
        Self {
            addresses,
            headers,
            ip,
            end,
            sum,
        }
    }

    /// The length of the frame of a packet with a payload of so many bytes.
    pub(super) fn frame_len(&self, packet: &Packet<'_>, payload: usize) -> usize {
        self.end + packet.headers_len() + payload + padding(payload) + ICRC
    }

    /// Writes the headers to the beginning of a frame, as long as they are: with what differs from
    /// packet to packet.
    fn write(&self, headers: &mut [u8], frame_len: usize, class: u8, identification: u16) {
        headers.copy_from_slice(self.headers.get(..self.end).unwrap_or_default());
        let len = |from: usize| u16::try_from(frame_len.saturating_sub(from)).unwrap_or(u16::MAX);
        let (ip_len, udp_len) = (len(self.ip), len(self.end - UDP));
        let Some((_, ip)) = headers.split_at_mut_checked(self.ip) else {
            return;
        };
        if let Some(sum) = self.sum {
            if let Some(fields) = ip.first_chunk_mut::<IPV4>() {
                fields[1] = class;
                fields[2..4].copy_from_slice(&ip_len.to_be_bytes());
                fields[4..6].copy_from_slice(&identification.to_be_bytes());
                let own = [u16::from(class), ip_len, identification].map(u32::from);
                let sum = !folded(own.iter().fold(sum, |sum, word| sum + word), &[]);
                fields[10..12].copy_from_slice(&sum.to_be_bytes());
            }
        } else if let Some(fields) = ip.first_chunk_mut::<IPV6>() {
            fields[0] |= class >> 4;
            fields[1] |= class << 4;
            fields[4..6].copy_from_slice(&udp_len.to_be_bytes());
        }
        if let Some(udp) = ip.last_chunk_mut::<UDP>() {
            udp[4..6].copy_from_slice(&udp_len.to_be_bytes());
        }
    }
}

/// Writes a frame to `space`, which is as long as it is. `capable`: routers that are congested may say
/// so in it. Those of IPv4 have an identification. Returns false if its payload cannot be read.
pub(super) fn write(
    space: &mut [u8],
    route: &Route,
    capable: bool,
    identification: u16,
    packet: &Packet<'_>,
    payload: &mut Payload<'_>,
) -> bool {
    let frame_len = space.len();
    let class = route.addresses.traffic_class;
    let class = if capable {
        class & !ECN | CAPABLE
    } else {
        class
    };
    let Some((headers, rest)) = space.split_at_mut_checked(route.end) else {
        return false;
    };
    route.write(headers, frame_len, class, identification);
    let mut out = Headers::new(rest);
    packet.write_headers(payload.len, &mut out);
    let Some((_, rest)) = out.split() else {
        return false;
    };
    let Some((body, rest)) = rest.split_at_mut_checked(payload.len) else {
        return false;
    };
    if !(payload.read)(body) {
        return false;
    }
    rest.fill(0);
    let Some((covered, crc)) = space.split_last_chunk_mut() else {
        return false;
    };
    *crc = crc_of(covered);
    true
}

/// The ICRC of a frame, of which it is not a part.
pub(super) fn crc_of(frame: &[u8]) -> [u8; ICRC] {
    let ip = network(frame).and_then(|(_, at)| frame.get(at..));
    ip.and_then(icrc).unwrap_or_default()
}

/// What is in a frame, past the tag of a VLAN, and where that begins.
pub(super) fn network(frame: &[u8]) -> Option<(u16, usize)> {
    let at = ETHERNET - 2;
    match u16_at(frame, at)? {
        TYPE_VLAN => Some((u16_at(frame, at + TAG)?, ETHERNET + TAG)),
        ethertype => Some((ethertype, ETHERNET)),
    }
}

/// A frame of a packet with its payload.
#[cfg(test)]
pub(super) fn frame(addresses: &Addresses, packet: &Packet<'_>) -> Vec<u8> {
    frame_as(addresses, false, packet)
}

/// The same. `capable`: routers that are congested may say so in it.
#[cfg(test)]
fn frame_as(addresses: &Addresses, capable: bool, packet: &Packet<'_>) -> Vec<u8> {
    let payload = packet.payload();
    let route = Route::new(*addresses, [1, packet.dest_qp]);
    let mut bytes = vec![0; route.frame_len(packet, payload.len())];
    let mut read = |space: &mut [u8]| {
        space.copy_from_slice(payload);
        true
    };
    let mut payload = Payload {
        len: payload.len(),
        read: &mut read,
    };
    let written = write(&mut bytes, &route, capable, 7, packet, &mut payload);
    assert!(written);
    bytes
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    let (_, rest) = bytes.split_at_checked(at)?;
    rest.first_chunk().map(|two| u16::from_be_bytes(*two))
}

fn gid_at(bytes: &[u8], at: usize) -> Option<[u8; 16]> {
    let (_, rest) = bytes.split_at_checked(at)?;
    rest.first_chunk().copied()
}

/// The GID that a frame comes from, if it is one of IP.
pub(super) fn source(bytes: &[u8]) -> Option<[u8; 16]> {
    match network(bytes)? {
        (TYPE_IPV4, at) => mapped(bytes.get(at + 12..)?),
        (TYPE_IPV6, at) => gid_at(bytes, at + 8),
        _ => None,
    }
}

/// The path of a frame with a packet of reliable datagrams (`spec/srd.md`, "Paths").
pub(super) fn srd_path(bytes: &[u8]) -> Option<u8> {
    let (ethertype, at) = network(bytes)?;
    let udp = match ethertype {
        TYPE_IPV4 => at + IPV4,
        TYPE_IPV6 => at + IPV6,
        _ => return None,
    };
    let is_one = is_srd(*bytes.get(udp + UDP)?) && u16_at(bytes, udp + 2)? == PORT;
    is_one.then_some(u16_at(bytes, udp)? as u8 & 7)
}

/// What a router does that is congested: it says so in the frame, if that is one that it can say so
/// in. Returns whether it was.
pub(super) fn mark(frame: &mut [u8]) -> bool {
    let capable = |class: u8| matches!(class & ECN, 1 | CAPABLE);
    let Some((ethertype, at)) = network(frame) else {
        return false;
    };
    let ip = frame.get_mut(at..).unwrap_or_default();
    match (ethertype, ip) {
        (TYPE_IPV4, [_, class, rest @ ..]) if capable(*class) => {
            *class |= CONGESTED;
            if let Some(sum) = rest.get_mut(8..10) {
                sum.fill(0);
            }
            let sum = checksum(frame.get(at..at + IPV4).unwrap_or_default());
            if let Some(place) = frame.get_mut(at + 10..at + 12) {
                place.copy_from_slice(&sum.to_be_bytes());
            }
            true
        }
        (TYPE_IPV6, [_, low, ..]) if capable(*low >> 4) => {
            *low |= CONGESTED << 4;
            true
        }
        _ => false,
    }
}

/// Reads the headers of a frame.
///
/// # Errors
/// Why it is to be dropped.
pub(super) fn read(bytes: &[u8]) -> Result<Frame<'_>, Reason> {
    let (destination_mac, rest) = bytes.split_first_chunk().ok_or(Reason::Malformed)?;
    let source_mac = rest.first_chunk().ok_or(Reason::Malformed)?;
    let (ethertype, at) = network(bytes).ok_or(Reason::Malformed)?;
    let ip = bytes.get(at..).ok_or(Reason::Malformed)?;
    let tag = (at != ETHERNET).then(|| u16_at(bytes, ETHERNET)).flatten();
    let (header, length, mut addresses) = match ethertype {
        TYPE_IPV4 => ipv4_header(ip)?,
        TYPE_IPV6 => ipv6_header(ip)?,
        _ => return Err(Reason::Other),
    };
    addresses.source_mac = *source_mac;
    addresses.destination_mac = *destination_mac;
    addresses.vlan = tag.and_then(Vlan::read);
    // Ethernet may have padded it.
    let datagram = ip.get(..length).ok_or(Reason::Malformed)?;
    if u16_at(datagram, header + 2) != Some(PORT) {
        return Err(Reason::Other);
    }
    let udp_len = u16_at(datagram, header + 4).ok_or(Reason::Malformed)?;
    if usize::from(udp_len) != length - header {
        return Err(Reason::Malformed);
    }
    let (covered, icrc) = datagram.split_last_chunk().ok_or(Reason::Malformed)?;
    let bytes = covered.get(header + UDP..).ok_or(Reason::Malformed)?;
    Ok(Frame {
        addresses,
        bytes,
        covered,
        icrc: *icrc,
    })
}

/// Length of the header, length of the packet with it, and what it says of addresses.
type IpHeader = (usize, usize, Addresses);

fn ipv4_header(ip: &[u8]) -> Result<IpHeader, Reason> {
    let fields = ip.first_chunk::<IPV4>().ok_or(Reason::Malformed)?;
    // No options: nobody sends them, and the ICRC knows none.
    if fields[0] != 0x45 || checksum(fields) != 0 {
        return Err(Reason::Malformed);
    }
    // More fragments, or an offset.
    let fragment = u16::from_be_bytes([fields[6], fields[7]]) & 0x3fff;
    if fragment != 0 || fields[9] != PROTOCOL_UDP {
        return Err(Reason::Other);
    }
    let length = usize::from(u16::from_be_bytes([fields[2], fields[3]]));
    let addresses = Addresses {
        source: mapped(&fields[12..16]).ok_or(Reason::Malformed)?,
        destination: mapped(&fields[16..]).ok_or(Reason::Malformed)?,
        traffic_class: fields[1],
        hop_limit: fields[8],
        ..Addresses::default()
    };
    checked(IPV4, length, addresses)
}

fn ipv6_header(ip: &[u8]) -> Result<IpHeader, Reason> {
    let fields = ip.first_chunk::<IPV6>().ok_or(Reason::Malformed)?;
    if fields[0] >> 4 != 6 {
        return Err(Reason::Malformed);
    }
    if fields[6] != PROTOCOL_UDP {
        return Err(Reason::Other);
    }
    let length = IPV6 + usize::from(u16::from_be_bytes([fields[4], fields[5]]));
    let first = u32::from_be_bytes([fields[0], fields[1], fields[2], fields[3]]);
    let addresses = Addresses {
        source: gid_at(fields, 8).ok_or(Reason::Malformed)?,
        destination: gid_at(fields, 24).ok_or(Reason::Malformed)?,
        traffic_class: (first >> 20) as u8,
        flow_label: first & FLOW_LABEL,
        hop_limit: fields[7],
        ..Addresses::default()
    };
    checked(IPV6, length, addresses)
}

fn checked(header: usize, length: usize, addresses: Addresses) -> Result<IpHeader, Reason> {
    if length < header + UDP + ICRC {
        return Err(Reason::Malformed);
    }
    Ok((header, length, addresses))
}

#[cfg(test)]
mod tests {
    use super::super::packet::{Body, Psn, Service, Syndrome};
    use super::*;
    use proptest::prelude::*;

    fn addresses(ipv6: bool, tagged: bool) -> Addresses {
        let gid = |n| {
            let mut gid = mapped(&[10, 0, 0, n]).unwrap();
            gid[0] = if ipv6 { 0xfd } else { 0 };
            gid
        };
        Addresses {
            source_mac: [0x52, 0x54, 0, 0, 0, 1],
            destination_mac: [0x52, 0x54, 0, 0, 0, 2],
            source: gid(1),
            destination: gid(2),
            traffic_class: 2,
            flow_label: if ipv6 { 0x12345 } else { 0 },
            hop_limit: 9,
            vlan: tagged.then_some(Vlan {
                id: 4094,
                priority: 5,
            }),
        }
    }

    /// IPv4 and IPv6, without and with a VLAN.
    const KINDS: [(bool, bool); 4] = [(false, false), (true, false), (false, true), (true, true)];

    fn acknowledge() -> Packet<'static> {
        Packet {
            service: Service::Rc,
            dest_qp: 17,
            psn: Psn::new(5),
            ack_request: false,
            solicited: false,
            body: Body::Acknowledge {
                syndrome: Syndrome::Ack,
                msn: 3,
            },
        }
    }

    #[test]
    fn frames_are_read_as_they_were_written() {
        for (ipv6, tagged) in KINDS {
            let addresses = addresses(ipv6, tagged);
            let mut frame = frame(&addresses, &acknowledge());
            let ethernet = if tagged { ETHERNET + TAG } else { ETHERNET };
            assert_eq!(
                frame.len(),
                ethernet + if ipv6 { 40 } else { 20 } + 8 + 16 + 4
            );
            let is_read = |frame: &[u8]| {
                let read = read(frame).unwrap();
                assert_eq!(read.packet(), Ok(acknowledge()));
                assert_eq!(read.addresses, addresses);
                assert_eq!(read.bytes.len(), 16);
            };
            is_read(&frame);
            assert_eq!(source(&frame), Some(addresses.source));
            // Ethernet pads short frames.
            frame.resize(frame.len() + 18, 0);
            is_read(&frame);
        }
    }

    // D-WIRE-014. As Linux has it (`rdma_get_udp_sport`).
    #[test]
    fn the_source_port_is_of_the_flow_label_or_the_queue_pairs() {
        let port = |flow_label, qps| {
            let addresses = Addresses {
                flow_label,
                ..addresses(true, false)
            };
            let headers = Route::new(addresses, qps).headers;
            u16::from_be_bytes(*headers[ETHERNET + IPV6..].first_chunk().unwrap())
        };
        assert_eq!(port(0x12345, [17, 18]), 0xc000 | (0x2345 ^ 0x4));
        // 0x5d3aa1 * 0x12 = 0x68e1f52, ^ 0x68 = 0x68e1f3a, of which 20 bits are 0xe1f3a.
        assert_eq!(port(0, [0x5d_3aa1, 0x12]), 0xc000 | (0x1f3a ^ 0x38));
        assert_eq!(port(0, [0x12, 0x5d_3aa1]), port(0, [0x5d_3aa1, 0x12]));
        assert_eq!(port(0, [1, 0]), 0xc000);
        // The label of the packet stays what the program asked for.
        let unlabelled = Addresses {
            flow_label: 0,
            ..addresses(true, false)
        };
        let bytes = frame(&unlabelled, &acknowledge());
        assert_eq!(read(&bytes).unwrap().addresses.flow_label, 0);
    }

    /// A tag that is about priority alone is no VLAN.
    #[test]
    fn a_vlan_has_a_number() {
        let mut bytes = frame(&addresses(false, true), &acknowledge());
        bytes[14..16].copy_from_slice(&[0xa0, 0]);
        let read = read(&bytes).unwrap().addresses;
        assert_eq!((read.vlan, read.vlan_id()), (None, NO_VLAN));
        let of = |vlan, sl| Vlan::of(L2Source { mac: [1; 6], vlan }, sl);
        assert_eq!((of(0, 1), of(NO_VLAN, 1)), (None, None));
        let (id, priority) = (7, 3);
        assert_eq!(of(7, 11), Some(Vlan { id, priority }));
    }

    #[test]
    fn a_router_marks_what_can_be_marked() {
        for (ipv6, tagged) in KINDS {
            let never = Addresses {
                traffic_class: 0xb8,
                ..addresses(ipv6, tagged)
            };
            let mut bytes = frame(&never, &acknowledge());
            assert!(!mark(&mut bytes));
            assert!(!read(&bytes).unwrap().addresses.congested());
            let mut bytes = frame_as(&never, true, &acknowledge());
            let capable = read(&bytes).unwrap();
            assert!(capable.packet().is_ok() && !capable.addresses.congested());
            assert!(mark(&mut bytes));
            // Its checksums are right.
            let marked = read(&bytes).unwrap();
            assert!(marked.packet().is_ok());
            let marked = marked.addresses;
            assert_eq!(marked.traffic_class, 0xbb);
            assert!(marked.congested());
        }
        assert!(!mark(&mut [0; 13]) && !mark(&mut [8; 14]));
    }

    /// A congestion notification of a ConnectX-4 Lx, as the tests of scapy have it.
    #[test]
    fn the_notification_of_an_adapter_is_read() {
        let mut bytes = vec![2; 12];
        bytes.extend([0x08, 0x00]);
        bytes.extend([
            0x45, 0xc2, 0, 0x3c, 0x71, 0x8c, 0x40, 0, 0x40, 17, 0x91, 0x61,
        ]);
        bytes.extend([10, 0, 17, 1, 10, 0, 18, 1]);
        bytes.extend([0, 0, 0x12, 0xb7, 0, 0x28, 0, 0]);
        bytes.extend([0x81, 0, 0xff, 0xff, 0x40, 0, 1, 0x18]);
        bytes.extend([0; 20]);
        bytes.extend([0x82, 0xfd, 0x00, 0x2a]);
        let frame = read(&bytes).unwrap();
        let packet = frame.packet().unwrap();
        assert_eq!(packet, Packet::notification(0x118));
        // Ours is the same, but that adapters have migrated.
        let ours = super::frame(&frame.addresses, &packet);
        assert_eq!(
            ours[42..54],
            [0x81, 0x40, 0xff, 0xff, 0x40, 0, 1, 0x18, 0, 0, 0, 0]
        );
        assert_eq!(ours.len(), bytes.len());
    }

    proptest! {
        // D-WIRE-001.
        /// Whatever single bit is damaged, nothing else is read than what was sent.
        #[test]
        fn damage_is_seen(ipv6: bool, tagged: bool, bit in 0usize..800) {
            let addresses = addresses(ipv6, tagged);
            let mut frame = frame(&addresses, &acknowledge());
            let at = bit % (frame.len() * 8);
            frame[at / 8] ^= 1 << (at % 8);
            let came = read(&frame).and_then(|read| Ok((read, read.packet()?)));
            if let Ok((read, packet)) = came {
                prop_assert_eq!(packet, acknowledge());
                prop_assert_eq!(read.addresses.source, addresses.source);
                prop_assert_eq!(read.addresses.destination, addresses.destination);
            }
        }

        #[test]
        fn anything_may_come(bytes in proptest::collection::vec(any::<u8>(), 0..120), ipv6: bool, tagged: bool) {
            let _ = read(&bytes).and_then(|frame| frame.packet());
            // With headers that are right so far.
            let mut frame = frame(&addresses(ipv6, tagged), &acknowledge());
            frame.truncate(bytes.len());
            let _ = read(&frame).and_then(|frame| frame.packet());
        }
    }
}
