// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The invariant CRC of RoCEv2 (InfiniBand architecture specification, volume 1, annex A17.3.3).
//!
//! It is the CRC-32 of Ethernet over 8 bytes of ones and the packet from the IP header to the end
//! of the padding, in which all that may change on the way counts as ones.
use crc32fast::Hasher;

/// Bytes of IP headers, without options, and of a UDP header.
const IPV4: usize = 20;
const IPV6: usize = 40;
const UDP: usize = 8;
/// Offset in the base transport header of the byte with FECN and BECN.
const CONGESTION: usize = 4;
/// Bytes of a packet that are masked, and hashed by themselves, at most.
const HEAD: usize = 128;
/// A multiple of so many bytes is hashed in equal steps. Payloads of packets that are not the last of
/// their message are such.
const BLOCK: usize = 256;
/// What is before each packet, as far as the CRC knows: bytes of ones, and the CRC-32 of these.
const ONES: u64 = 8;
const CRC_OF_ONES: u32 = 0x2144_df1c;

/// The ICRC of a packet, as its last four bytes are. `packet` is from the IP header, which has no
/// options, to the end of the padding; `None` if it is too short to be one.
pub(super) fn icrc(packet: &[u8]) -> Option<[u8; 4]> {
    let header_len = match packet.first()? >> 4 {
        4 => IPV4,
        6 => IPV6,
        _ => return None,
    };
    // All variant fields are in these first bytes.
    let least = header_len + UDP + CONGESTION + 1;
    if packet.len() < least {
        return None;
    }
    // What is behind the head is blocks, if that may be. A short packet is in the head as a whole, and
    // hashed in one go.
    let odd = packet.len() % BLOCK;
    let head_len = if (least..=HEAD).contains(&odd) {
        odd
    } else {
        HEAD.min(packet.len())
    };
    let (first, rest) = packet.split_at(head_len);
    let mut head = [0; HEAD];
    head.get_mut(..head_len)?.copy_from_slice(first);
    if header_len == IPV4 {
        // Type of service, time to live, header checksum.
        for at in [1, 8, 10, 11] {
            head[at] = 0xff;
        }
        mask_transport::<IPV4>(&mut head);
    } else {
        // Traffic class and flow label, hop limit.
        head[0] |= 0x0f;
        for at in [1, 2, 3, 7] {
            head[at] = 0xff;
        }
        mask_transport::<IPV6>(&mut head);
    }
    let mut hasher = Hasher::new_with_initial_len(CRC_OF_ONES, ONES);
    hasher.update(head.get(..head_len)?);
    hasher.update(rest);
    Some(hasher.finalize().to_le_bytes())
}

/// Masks what is variant behind an IP header of so many bytes: the UDP checksum, FECN and BECN.
fn mask_transport<const IP: usize>(head: &mut [u8; HEAD]) {
    head[IP + UDP - 2] = 0xff;
    head[IP + UDP - 1] = 0xff;
    head[IP + UDP + CONGESTION] = 0xff;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(hex: &str) -> Vec<u8> {
        let digits: Vec<u8> = hex.bytes().filter(u8::is_ascii_hexdigit).collect();
        let byte = |pair: &[u8]| {
            let text = std::str::from_utf8(pair).unwrap();
            u8::from_str_radix(text, 16).unwrap()
        };
        digits.chunks(2).map(byte).collect()
    }

    /// A congestion notification of a ConnectX-4 Lx, as the tests of scapy have it.
    #[test]
    fn that_of_an_adapter_is_right() {
        let packet = bytes(
            "45c2003c718c400040119161 0a001101 0a001201 000012b700280000 \
             8100ffff40000118 00000000 00000000000000000000000000000000",
        );
        assert_eq!(icrc(&packet), Some([0x82, 0xfd, 0x00, 0x2a]));
    }

    /// A UC SEND of the tests of scapy.
    #[test]
    fn that_of_a_send_is_right() {
        let mut packet = bytes("45010040 04784000 40110000 c0a80007 c0a80007");
        packet.extend(bytes("c00012b7002c0000"));
        packet.extend(bytes("2460ffff000000d3"));
        packet.extend(13_571_856_u32.to_be_bytes());
        packet.extend(b"F0\x81\x8b\xe2\x895\xd9\x0e\x9a\x95PT\x01\xbe\x88^P\x00\x00");
        assert_eq!(icrc(&packet), Some([0x78, 0xf3, 0x53, 0xf3]));
    }

    /// Wherever the head of a packet ends, all of it counts once, and what is variant does not.
    #[test]
    fn packets_of_all_lengths_are_hashed_as_a_whole() {
        for (first, header_len) in [(0x45, IPV4), (0x60, IPV6)] {
            let least = header_len + UDP + CONGESTION + 1;
            for len in (0..700).chain(4100..4200) {
                let byte = |at: usize| (at * 37 % 251) as u8;
                let mut packet: Vec<u8> = (0..len).map(byte).collect();
                if let Some(byte) = packet.first_mut() {
                    *byte = first;
                }
                let mut masked = packet.clone();
                let fields: &[usize] = if header_len == IPV4 {
                    &[1, 8, 10, 11]
                } else {
                    masked.iter_mut().take(1).for_each(|byte| *byte |= 0x0f);
                    &[1, 2, 3, 7]
                };
                let transport = [6, 7, 12].map(|at| header_len + at);
                for at in fields.iter().chain(&transport) {
                    masked
                        .get_mut(*at)
                        .into_iter()
                        .for_each(|byte| *byte = 0xff);
                }
                let mut whole = vec![0xff; 8];
                whole.extend(masked);
                let expected = crc32fast::hash(&whole).to_le_bytes();
                assert_eq!(icrc(&packet), (len >= least).then_some(expected), "{len}");
            }
        }
    }

    #[test]
    fn what_may_change_on_the_way_does_not_count() {
        let packet = bytes(
            "45c2003c718c400040119161 0a001101 0a001201 000012b700280000 \
             8100ffff40000118 00000000 00000000000000000000000000000000",
        );
        let whole = icrc(&packet);
        for at in [1, 8, 10, 11, 26, 27, 32] {
            let mut changed = packet.clone();
            changed[at] ^= 0x55;
            assert_eq!(icrc(&changed), whole, "byte {at}");
        }
        for at in [0, 4, 6, 9, 12, 16, 22, 28, 33, 40, 55] {
            let mut changed = packet.clone();
            changed[at] ^= 0x04;
            assert_ne!(icrc(&changed), whole, "byte {at}");
        }
        assert_eq!(icrc(&packet[..32]), None);
        assert_eq!(icrc(&[]), None);
    }
}
