// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The request and the reply that a connection begins with (RFC 5044, 7.1; RFC 6581, 6 and 9).
use arrayvec::ArrayVec;
use thiserror::Error;

use super::bytes::{take, take_u16};
use super::refusal::Refusal;

const KEY: usize = 16;
const REQUEST: &[u8; KEY] = b"MPA ID Req Frame";
const REPLY: &[u8; KEY] = b"MPA ID Rep Frame";

/// Flags of a frame.
const MARKERS: u8 = 0x80;
const CRC: u8 = 0x40;
const REJECTED: u8 = 0x20;
const ENHANCED: u8 = 0x10;

/// Flags beside IRD.
const PEER_TO_PEER: u16 = 0x8000;
const RTR_SEND: u16 = 0x4000;
/// Flags beside ORD.
const RTR_WRITE: u16 = 0x8000;
const RTR_READ: u16 = 0x4000;

/// Revisions that there are.
pub(crate) const REVISION_1: u8 = 1;
pub(crate) const REVISION_2: u8 = 2;
/// IRD or ORD of who does not negotiate it, and the most that there can be.
pub(crate) const NOT_NEGOTIATED: u16 = 0x3fff;
/// The most private data, bytes. What is enhanced takes [`ENHANCED_LEN`] of them.
pub(crate) const MAX_PRIVATE: usize = 512;
pub(crate) const ENHANCED_LEN: usize = 4;

/// The first message of the initiator, which shows that it is ready to receive: those that a peer
/// can have. Each is without data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Rtr {
    pub send: bool,
    pub write: bool,
    pub read: bool,
}

/// What revision 2 adds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Enhanced {
    /// Either end may send first, and so the initiator begins with one of these.
    pub peer_to_peer: Option<Rtr>,
    /// RDMA READs and atomic operations of the peer that the frame's sender can have under way,
    /// [`NOT_NEGOTIATED`] at most.
    pub ird: u16,
    /// The same of its own.
    pub ord: u16,
}

impl Enhanced {
    fn read(bytes: &mut &[u8]) -> Option<Self> {
        let [ird, ord] = [take_u16(bytes)?, take_u16(bytes)?];
        let rtr = Rtr {
            send: ird & RTR_SEND != 0,
            write: ord & RTR_WRITE != 0,
            read: ord & RTR_READ != 0,
        };
        Some(Self {
            peer_to_peer: (ird & PEER_TO_PEER != 0).then_some(rtr),
            ird: ird & NOT_NEGOTIATED,
            ord: ord & NOT_NEGOTIATED,
        })
    }

    fn encode(self) -> [u8; ENHANCED_LEN] {
        let rtr = self.peer_to_peer.unwrap_or_default();
        let flag = |set: bool, bit: u16| if set { bit } else { 0 };
        let ird = self.ird.min(NOT_NEGOTIATED)
            | flag(self.peer_to_peer.is_some(), PEER_TO_PEER)
            | flag(rtr.send, RTR_SEND);
        let ord =
            self.ord.min(NOT_NEGOTIATED) | flag(rtr.write, RTR_WRITE) | flag(rtr.read, RTR_READ);
        let ([i0, i1], [o0, o1]) = (ird.to_be_bytes(), ord.to_be_bytes());
        [i0, i1, o0, o1]
    }
}

/// What is wrong with a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub(crate) enum Malformed {
    #[error("the peer does not speak MPA")]
    Key,
    #[error("MPA of revision {0} is not known")]
    Revision(u8),
    #[error("private data of {0} bytes is too long")]
    TooLong(u16),
    #[error("private data is too short for IRD and ORD")]
    TooShort,
}

impl From<Malformed> for Refusal {
    fn from(_: Malformed) -> Self {
        Self::MpaInvalidFrame
    }
}

/// A request or a reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Frame {
    pub reply: bool,
    /// [`REVISION_1`] or [`REVISION_2`].
    pub revision: u8,
    /// Its sender wants markers in what it gets.
    pub markers: bool,
    /// Its sender wants CRCs, in both directions.
    pub crc: bool,
    /// Of a reply: there will be no connection.
    pub rejected: bool,
    /// Only revision 2 has it.
    pub enhanced: Option<Enhanced>,
    /// The private data of the ULP. With `enhanced`, no more of it is written than there is room
    /// for.
    pub private: ArrayVec<u8, MAX_PRIVATE>,
}

impl Frame {
    /// Reads the frame that begins here, and how long it is. `None` if what is there may be the
    /// begin of one.
    pub(crate) fn read(bytes: &[u8]) -> Result<Option<(Self, usize)>, Malformed> {
        let key = bytes.get(..KEY).unwrap_or(bytes);
        if !REQUEST.starts_with(key) && !REPLY.starts_with(key) {
            return Err(Malformed::Key);
        }
        let mut rest = bytes.get(KEY..).unwrap_or_default();
        let (Some([flags, revision]), Some(length)) = (take(&mut rest), take_u16(&mut rest)) else {
            return Ok(None);
        };
        if !matches!(revision, REVISION_1 | REVISION_2) {
            return Err(Malformed::Revision(revision));
        }
        let is_enhanced = revision == REVISION_2 && flags & ENHANCED != 0;
        let private_len = usize::from(length);
        if private_len > MAX_PRIVATE {
            return Err(Malformed::TooLong(length));
        }
        if is_enhanced && private_len < ENHANCED_LEN {
            return Err(Malformed::TooShort);
        }
        let Some((mut private, after)) = rest.split_at_checked(private_len) else {
            return Ok(None);
        };
        let enhanced = if is_enhanced {
            Enhanced::read(&mut private)
        } else {
            None
        };
        let reply = key == REPLY;
        let frame = Self {
            reply,
            revision,
            markers: flags & MARKERS != 0,
            crc: flags & CRC != 0,
            rejected: reply && flags & REJECTED != 0,
            enhanced,
            private: private.iter().copied().take(MAX_PRIVATE).collect(),
        };
        Ok(Some((frame, bytes.len() - after.len())))
    }

    /// Appends its bytes.
    pub(crate) fn write(&self, out: &mut Vec<u8>) {
        let flag = |set: bool, bit: u8| if set { bit } else { 0 };
        let enhanced = self.enhanced.filter(|_| self.revision >= REVISION_2);
        let enhanced = enhanced.map(Enhanced::encode);
        let enhanced = enhanced.as_ref().map_or(&[][..], |bytes| &bytes[..]);
        let room = MAX_PRIVATE - enhanced.len();
        let private = self.private.get(..room).unwrap_or(&self.private);
        let flags = flag(self.markers, MARKERS)
            | flag(self.crc, CRC)
            | flag(self.reply && self.rejected, REJECTED)
            | flag(!enhanced.is_empty(), ENHANCED);
        out.extend_from_slice(if self.reply { REPLY } else { REQUEST });
        out.extend_from_slice(&[flags, self.revision]);
        let length = (enhanced.len() + private.len()) as u16;
        out.extend_from_slice(&length.to_be_bytes());
        out.extend_from_slice(enhanced);
        out.extend_from_slice(private);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn written(frame: &Frame) -> Vec<u8> {
        let mut bytes = Vec::new();
        frame.write(&mut bytes);
        bytes
    }

    fn request() -> Frame {
        Frame {
            reply: false,
            revision: REVISION_2,
            markers: false,
            crc: true,
            rejected: false,
            enhanced: Some(Enhanced {
                peer_to_peer: Some(Rtr {
                    send: false,
                    write: true,
                    read: true,
                }),
                ird: 0x102,
                ord: 3,
            }),
            private: b"hi!".iter().copied().collect(),
        }
    }

    #[test]
    fn a_request_of_revision_2() {
        let mut bytes = b"MPA ID Req Frame".to_vec();
        bytes.extend([0x50, 2, 0, 7, 0x81, 0x02, 0xc0, 0x03]);
        bytes.extend(b"hi!");
        assert_eq!(written(&request()), bytes);
        assert_eq!(Frame::read(&bytes), Ok(Some((request(), 27))));
    }

    #[test]
    fn a_reply_of_revision_1() {
        let frame = Frame {
            reply: true,
            revision: REVISION_1,
            markers: true,
            crc: false,
            rejected: true,
            enhanced: None,
            private: ArrayVec::new(),
        };
        let mut bytes = b"MPA ID Rep Frame".to_vec();
        bytes.extend([0xa0, 1, 0, 0]);
        assert_eq!(written(&frame), bytes);
        assert_eq!(Frame::read(&bytes), Ok(Some((frame.clone(), 20))));
        // It has nothing that is enhanced, whatever the reserved bits are.
        bytes[16] |= 0x1f;
        assert_eq!(Frame::read(&bytes), Ok(Some((frame, 20))));
    }

    #[test]
    fn flags_that_mean_nothing_are_ignored() {
        // No request is a rejection.
        let mut bytes = written(&request());
        bytes[16] |= 0x2f;
        assert_eq!(Frame::read(&bytes), Ok(Some((request(), 27))));
        // Without the flag of the connection model, the others have no meaning.
        bytes[20] = 0x40;
        let (frame, _) = Frame::read(&bytes).unwrap().unwrap();
        let enhanced = frame.enhanced.unwrap();
        assert_eq!(
            (enhanced.peer_to_peer, enhanced.ird, enhanced.ord),
            (None, 2, 3)
        );
    }

    #[test]
    fn what_is_malformed_is_refused_as_soon_as_it_is_seen() {
        let bytes = written(&request());
        for at in 0..KEY {
            let mut wrong = bytes[..=at].to_vec();
            wrong[at] = b'?';
            assert_eq!(Frame::read(&wrong), Err(Malformed::Key), "byte {at}");
        }
        for (change, malformed) in [
            ([0x50, 0, 0, 7], Malformed::Revision(0)),
            ([0x50, 3, 0, 7], Malformed::Revision(3)),
            ([0x50, 2, 2, 1], Malformed::TooLong(513)),
            ([0x40, 1, 0xff, 0xff], Malformed::TooLong(0xffff)),
            ([0x50, 2, 0, 3], Malformed::TooShort),
        ] {
            let mut wrong = bytes[..20].to_vec();
            assert_eq!(Frame::read(&wrong), Ok(None));
            wrong[16..].copy_from_slice(&change);
            assert_eq!(Frame::read(&wrong), Err(malformed));
            assert_eq!(Refusal::from(malformed), Refusal::MpaInvalidFrame);
        }
    }

    #[test]
    fn private_data_has_its_limit() {
        let mut frame = request();
        frame.private = ArrayVec::from([5; MAX_PRIVATE]);
        let bytes = written(&frame);
        assert_eq!(bytes.len(), 20 + MAX_PRIVATE);
        let (read, _) = Frame::read(&bytes).unwrap().unwrap();
        assert_eq!(read.private.len(), MAX_PRIVATE - ENHANCED_LEN);
        frame.enhanced = None;
        let bytes = written(&frame);
        assert_eq!(Frame::read(&bytes), Ok(Some((frame, bytes.len()))));
    }

    fn frames() -> impl Strategy<Value = Frame> {
        let rtr = any::<Option<(bool, bool, bool)>>();
        let enhanced = proptest::option::of((rtr, 0..=NOT_NEGOTIATED, 0..=NOT_NEGOTIATED));
        let private = proptest::collection::vec(any::<u8>(), 0..=MAX_PRIVATE - ENHANCED_LEN);
        let flags = any::<(bool, bool, bool, bool)>();
        (flags, any::<bool>(), enhanced, private).prop_map(|(flags, second, enhanced, private)| {
            let (reply, markers, crc, rejected) = flags;
            let enhanced = enhanced.map(|(rtr, ird, ord)| Enhanced {
                peer_to_peer: rtr.map(|(send, write, read)| Rtr { send, write, read }),
                ird,
                ord,
            });
            Frame {
                reply,
                revision: if second { REVISION_2 } else { REVISION_1 },
                markers,
                crc,
                rejected: reply && rejected,
                enhanced: enhanced.filter(|_| second),
                private: private.into_iter().collect(),
            }
        })
    }

    proptest! {
        #[test]
        fn frames_are_read_as_they_were_written(
            frame in frames(),
            after in proptest::collection::vec(any::<u8>(), 0..10),
        ) {
            let mut bytes = written(&frame);
            let whole = bytes.len();
            for cut in 0..whole {
                prop_assert_eq!(Frame::read(&bytes[..cut]), Ok(None));
            }
            bytes.extend(after);
            prop_assert_eq!(Frame::read(&bytes), Ok(Some((frame, whole))));
        }

        #[test]
        fn anything_may_come(reply: bool, bytes: Vec<u8>) {
            let _ = Frame::read(&bytes);
            let mut framed = if reply { REPLY } else { REQUEST }.to_vec();
            framed.extend(bytes);
            if let Ok(Some((frame, consumed))) = Frame::read(&framed) {
                prop_assert!(consumed <= framed.len());
                prop_assert_eq!(Frame::read(&written(&frame)), Ok(Some((frame, consumed))));
            }
        }
    }
}
