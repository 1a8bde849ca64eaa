// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Captures in the format that Wireshark reads: pcapng (draft-ietf-opsawg-pcapng), with one section,
//! Ethernet interfaces and times in nanoseconds.

use super::port::Direction;

const SECTION_HEADER: u32 = 0x0a0d_0d0a;
const INTERFACE: u32 = 1;
const PACKET: u32 = 6;
/// Says how a reader finds out the order of bytes.
const BYTE_ORDER: u32 = 0x1a2b_3c4d;
/// The length of a section that is not known.
const UNKNOWN: u64 = u64::MAX;
const ETHERNET: u16 = 1;
const OPTION_END: u16 = 0;
const OPTION_COMMENT: u16 = 1;
const OPTION_NAME: u16 = 2;
const OPTION_FLAGS: u16 = 2;
const OPTION_RESOLUTION: u16 = 9;
/// Ten to the minus ninth of a second.
const NANOSECONDS: u8 = 9;

/// Appends a block with what `body` writes.
fn block(out: &mut Vec<u8>, kind: u32, body: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    out.extend_from_slice(&kind.to_le_bytes());
    out.extend_from_slice(&[0; 4]);
    body(out);
    pad(out, start);
    let length = u32::try_from(out.len() - start + 4).unwrap_or(u32::MAX);
    if let Some(field) = out.get_mut(start + 4..start + 8) {
        field.copy_from_slice(&length.to_le_bytes());
    }
    out.extend_from_slice(&length.to_le_bytes());
}

/// Fills up to a multiple of four bytes since `start`.
fn pad(out: &mut Vec<u8>, start: usize) {
    let length = (out.len() - start).next_multiple_of(4);
    out.resize(start + length, 0);
}

fn option(out: &mut Vec<u8>, code: u16, value: &[u8]) {
    let start = out.len();
    let value = value.get(..usize::from(u16::MAX)).unwrap_or(value);
    out.extend_from_slice(&code.to_le_bytes());
    out.extend_from_slice(&(value.len() as u16).to_le_bytes());
    out.extend_from_slice(value);
    pad(out, start);
}

/// Begins a capture.
pub(super) fn section(out: &mut Vec<u8>) {
    block(out, SECTION_HEADER, |out| {
        out.extend_from_slice(&BYTE_ORDER.to_le_bytes());
        // Version 1.0.
        out.extend_from_slice(&[1, 0, 0, 0]);
        out.extend_from_slice(&UNKNOWN.to_le_bytes());
    });
}

/// Adds an interface. The first one is number 0.
pub(super) fn interface(out: &mut Vec<u8>, name: &str) {
    block(out, INTERFACE, |out| {
        out.extend_from_slice(&ETHERNET.to_le_bytes());
        // Reserved, and no limit of how much of a frame is captured.
        out.extend_from_slice(&[0; 6]);
        option(out, OPTION_NAME, name.as_bytes());
        option(out, OPTION_RESOLUTION, &[NANOSECONDS]);
        option(out, OPTION_END, &[]);
    });
}

/// A frame of an interface.
pub(super) struct Packet<'a> {
    /// The number of the interface.
    pub interface: u32,
    /// Nanoseconds since 1970.
    pub time: u64,
    pub direction: Direction,
    pub frame: &'a [u8],
    /// Bytes of it that are kept, at most.
    pub snap: usize,
    /// What is to be said of it.
    pub comment: Option<&'a str>,
}

/// Adds a frame.
pub(super) fn packet(out: &mut Vec<u8>, packet: &Packet<'_>) {
    block(out, PACKET, |out| {
        let kept = packet.frame.get(..packet.snap).unwrap_or(packet.frame);
        let length = |bytes: &[u8]| u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_le_bytes();
        out.extend_from_slice(&packet.interface.to_le_bytes());
        out.extend_from_slice(&((packet.time >> 32) as u32).to_le_bytes());
        out.extend_from_slice(&(packet.time as u32).to_le_bytes());
        out.extend_from_slice(&length(kept));
        out.extend_from_slice(&length(packet.frame));
        let start = out.len();
        out.extend_from_slice(kept);
        pad(out, start);
        let flags: u32 = match packet.direction {
            Direction::In => 1,
            Direction::Out => 2,
        };
        option(out, OPTION_FLAGS, &flags.to_le_bytes());
        if let Some(comment) = packet.comment {
            option(out, OPTION_COMMENT, comment.as_bytes());
        }
        option(out, OPTION_END, &[]);
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The types of the blocks of a capture, each with what is in it.
    fn blocks(mut bytes: &[u8]) -> Vec<(u32, &[u8])> {
        let word = |bytes: &[u8]| u32::from_le_bytes(*bytes.first_chunk().unwrap());
        let mut blocks = Vec::new();
        while !bytes.is_empty() {
            let length = word(&bytes[4..]) as usize;
            assert_eq!(length % 4, 0);
            let (block, rest) = bytes.split_at(length);
            assert_eq!(word(&block[length - 4..]) as usize, length);
            blocks.push((word(block), &block[8..length - 4]));
            bytes = rest;
        }
        blocks
    }

    proptest! {
        #[test]
        fn blocks_can_be_told_apart(
            frames in proptest::collection::vec(
                (proptest::collection::vec(any::<u8>(), 0..70), any::<u64>(), "[a-z]{0,9}"),
                0..5,
            ),
        ) {
            let mut out = Vec::new();
            section(&mut out);
            interface(&mut out, "one");
            for (frame, time, comment) in &frames {
                let of = Packet {
                    interface: 0,
                    time: *time,
                    direction: Direction::Out,
                    frame,
                    snap: 50,
                    comment: Some(comment),
                };
                packet(&mut out, &of);
            }
            let blocks = blocks(&out);
            prop_assert_eq!((blocks[0].0, blocks[1].0), (SECTION_HEADER, INTERFACE));
            prop_assert_eq!(blocks.len(), 2 + frames.len());
            for ((kind, body), (frame, _, comment)) in blocks[2..].iter().zip(&frames) {
                prop_assert_eq!(*kind, PACKET);
                prop_assert_eq!(&body[16..20], &(frame.len() as u32).to_le_bytes()[..]);
                let frame = &frame[..frame.len().min(50)];
                prop_assert_eq!(&body[12..16], &(frame.len() as u32).to_le_bytes()[..]);
                prop_assert_eq!(&body[20..20 + frame.len()], frame);
                let options = &body[20 + frame.len().next_multiple_of(4)..];
                // The flags, then the comment.
                prop_assert_eq!(&options[..8], &[2, 0, 4, 0, 2, 0, 0, 0][..]);
                prop_assert_eq!(&options[8..12], &[1, 0, comment.len() as u8, 0][..]);
                prop_assert_eq!(&options[12..12 + comment.len()], comment.as_bytes());
            }
        }
    }
}
