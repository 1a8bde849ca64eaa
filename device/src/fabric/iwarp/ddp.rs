// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Segments of messages, with the headers of DDP (RFC 5041, 4) and RDMAP (RFC 5040, 4; RFC 7306, 4
//! to 6).
//!
//! A header is checked as far as it goes by itself. Message sequence numbers, message offsets of
//! SENDs, and STags are not.
use super::bytes::{take, take_u32, take_u64};
use super::refusal::Refusal;

/// The versions that this is.
const DDP_VERSION: u8 = 1;
const RDMAP_VERSION: u8 = 1;

/// The first byte: the flags, and the bits of the version. The others are reserved, and ignored.
const TAGGED: u8 = 0x80;
const LAST: u8 = 0x40;
const DDP_VERSION_BITS: u8 = 0x03;
/// The second byte.
const RDMAP_VERSION_SHIFT: u32 = 6;
const OPCODE_BITS: u8 = 0x0f;

/// Bytes of the headers of DDP, with the control fields of RDMAP in them.
pub(crate) const TAGGED_LEN: usize = 14;
pub(crate) const UNTAGGED_LEN: usize = 18;
/// Bytes of what is behind it, of messages of a fixed length.
const IMMEDIATE_LEN: usize = 8;

/// Queue numbers of untagged messages.
pub(crate) const QUEUE_SEND: u32 = 0;
pub(crate) const QUEUE_REQUEST: u32 = 1;
pub(crate) const QUEUE_TERMINATE: u32 = 2;
pub(crate) const QUEUE_ATOMIC_RESPONSE: u32 = 3;

/// Subcodes of atomic operations.
const FETCH_ADD: u32 = 0;
const CMP_SWAP: u32 = 2;
const SUBCODE_BITS: u32 = 0x0f;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Opcode {
    Write,
    ReadRequest,
    ReadResponse,
    Send,
    SendInvalidate,
    SendSolicited,
    SendSolicitedInvalidate,
    Terminate,
    Immediate,
    ImmediateSolicited,
    AtomicRequest,
    AtomicResponse,
}

/// All of them, by their numbers, each with its queue. Those without are tagged.
const OPCODES: [(Opcode, Option<u32>); 12] = [
    (Opcode::Write, None),
    (Opcode::ReadRequest, Some(QUEUE_REQUEST)),
    (Opcode::ReadResponse, None),
    (Opcode::Send, Some(QUEUE_SEND)),
    (Opcode::SendInvalidate, Some(QUEUE_SEND)),
    (Opcode::SendSolicited, Some(QUEUE_SEND)),
    (Opcode::SendSolicitedInvalidate, Some(QUEUE_SEND)),
    (Opcode::Terminate, Some(QUEUE_TERMINATE)),
    (Opcode::Immediate, Some(QUEUE_SEND)),
    (Opcode::ImmediateSolicited, Some(QUEUE_SEND)),
    (Opcode::AtomicRequest, Some(QUEUE_REQUEST)),
    (Opcode::AtomicResponse, Some(QUEUE_ATOMIC_RESPONSE)),
];

// Each opcode has its row.
const _: () = assert!(Opcode::AtomicResponse as usize + 1 == OPCODES.len());

/// The header of DDP of a segment, without its payload. `None` if it is not of our version, or not
/// there as a whole.
pub(super) fn header(ulpdu: &[u8]) -> Option<&[u8]> {
    let control = *ulpdu.first()?;
    if control & DDP_VERSION_BITS != DDP_VERSION {
        return None;
    }
    ulpdu.get(..header_len(control))
}

/// Bytes of the header of DDP that begins with this byte.
pub(super) fn header_len(control: u8) -> usize {
    if control & TAGGED != 0 {
        TAGGED_LEN
    } else {
        UNTAGGED_LEN
    }
}

/// What a tagged segment is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TaggedKind {
    Write,
    ReadResponse,
}

/// A segment that says itself where its payload goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tagged<'a> {
    pub kind: TaggedKind,
    /// It ends its message.
    pub last: bool,
    pub stag: u32,
    pub offset: u64,
    pub payload: &'a [u8],
}

/// An RDMA Read Request: where the data goes, and where it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ReadRequest {
    pub sink_stag: u32,
    pub sink_offset: u64,
    pub length: u32,
    pub source_stag: u32,
    pub source_offset: u64,
}

impl ReadRequest {
    pub(super) fn read(bytes: &mut &[u8]) -> Option<Self> {
        Some(Self {
            sink_stag: take_u32(bytes)?,
            sink_offset: take_u64(bytes)?,
            length: take_u32(bytes)?,
            source_stag: take_u32(bytes)?,
            source_offset: take_u64(bytes)?,
        })
    }

    pub(super) fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.sink_stag.to_be_bytes());
        out.extend_from_slice(&self.sink_offset.to_be_bytes());
        out.extend_from_slice(&self.length.to_be_bytes());
        out.extend_from_slice(&self.source_stag.to_be_bytes());
        out.extend_from_slice(&self.source_offset.to_be_bytes());
    }
}

/// An atomic operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Atomic {
    /// A set bit of `boundaries` is the highest one of a field: it carries nothing to the next.
    FetchAdd { add: u64, boundaries: u64 },
    CmpSwap {
        swap: u64,
        swap_mask: u64,
        compare: u64,
        compare_mask: u64,
    },
}

/// An Atomic Request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AtomicRequest {
    /// What the response has, too.
    pub request_id: u32,
    pub stag: u32,
    pub offset: u64,
    pub atomic: Atomic,
}

impl AtomicRequest {
    fn read(bytes: &mut &[u8]) -> Option<Result<Self, Refusal>> {
        let subcode = take_u32(bytes)? & SUBCODE_BITS;
        let [request_id, stag] = [take_u32(bytes)?, take_u32(bytes)?];
        let offset = take_u64(bytes)?;
        let [data, mask] = [take_u64(bytes)?, take_u64(bytes)?];
        let [compare, compare_mask] = [take_u64(bytes)?, take_u64(bytes)?];
        let atomic = match subcode {
            FETCH_ADD => Atomic::FetchAdd {
                add: data,
                boundaries: mask,
            },
            CMP_SWAP => Atomic::CmpSwap {
                swap: data,
                swap_mask: mask,
                compare,
                compare_mask,
            },
            _ => return Some(Err(Refusal::RdmapOpcode)),
        };
        Some(Ok(Self {
            request_id,
            stag,
            offset,
            atomic,
        }))
    }

    fn write(&self, out: &mut Vec<u8>) {
        let (subcode, operands) = match self.atomic {
            Atomic::FetchAdd { add, boundaries } => (FETCH_ADD, [add, boundaries, 0, u64::MAX]),
            Atomic::CmpSwap {
                swap,
                swap_mask,
                compare,
                compare_mask,
            } => (CMP_SWAP, [swap, swap_mask, compare, compare_mask]),
        };
        for word in [subcode, self.request_id, self.stag] {
            out.extend_from_slice(&word.to_be_bytes());
        }
        out.extend_from_slice(&self.offset.to_be_bytes());
        for operand in operands {
            out.extend_from_slice(&operand.to_be_bytes());
        }
    }
}

/// What an untagged segment is of. All messages but a SEND are one segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Message<'a> {
    Send {
        /// The STag that the responder is to invalidate.
        invalidate: Option<u32>,
        solicited: bool,
        /// The segment ends its message.
        last: bool,
        /// Of the payload in its message.
        offset: u32,
        payload: &'a [u8],
    },
    Immediate {
        solicited: bool,
        data: [u8; IMMEDIATE_LEN],
    },
    ReadRequest(ReadRequest),
    AtomicRequest(AtomicRequest),
    /// [`super::terminate::Terminate`] reads and writes it.
    Terminate {
        payload: &'a [u8],
    },
    AtomicResponse {
        request_id: u32,
        original: u64,
    },
}

impl<'a> Message<'a> {
    fn opcode(&self) -> Opcode {
        match self {
            Self::Send {
                invalidate,
                solicited,
                ..
            } => match (invalidate.is_some(), solicited) {
                (false, false) => Opcode::Send,
                (true, false) => Opcode::SendInvalidate,
                (false, true) => Opcode::SendSolicited,
                (true, true) => Opcode::SendSolicitedInvalidate,
            },
            Self::Immediate { solicited, .. } if *solicited => Opcode::ImmediateSolicited,
            Self::Immediate { .. } => Opcode::Immediate,
            Self::ReadRequest(_) => Opcode::ReadRequest,
            Self::AtomicRequest(_) => Opcode::AtomicRequest,
            Self::Terminate { .. } => Opcode::Terminate,
            Self::AtomicResponse { .. } => Opcode::AtomicResponse,
        }
    }

    /// The DDP queue that it goes to, which its sequence number belongs to.
    pub(crate) fn queue(&self) -> u32 {
        let (_, queue) = OPCODES[self.opcode() as usize];
        queue.unwrap_or_default()
    }
}

/// A segment of a message without a tag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Untagged<'a> {
    /// Its number in its queue, from one on.
    pub msn: u32,
    pub message: Message<'a>,
}

impl<'a> Untagged<'a> {
    /// Reads it behind the control bytes.
    fn read(opcode: Opcode, queue: u32, last: bool, mut bytes: &'a [u8]) -> Result<Self, Refusal> {
        let bytes = &mut bytes;
        let mut word = || take_u32(bytes).ok_or(Refusal::RdmapOperation);
        let [stag, queue_number, msn, offset] = [word()?, word()?, word()?, word()?];
        if queue_number != queue {
            return Err(Refusal::DdpInvalidQueue);
        }
        let payload = *bytes;
        let send = |invalidate, solicited| Message::Send {
            invalidate,
            solicited,
            last,
            offset,
            payload,
        };
        let message = match opcode {
            Opcode::Send => send(None, false),
            Opcode::SendInvalidate => send(Some(stag), false),
            Opcode::SendSolicited => send(None, true),
            Opcode::SendSolicitedInvalidate => send(Some(stag), true),
            _ if offset != 0 => return Err(Refusal::DdpInvalidOffset),
            _ => Self::read_whole(opcode, last, payload)?,
        };
        Ok(Self { msn, message })
    }

    /// Reads a message that is one segment.
    fn read_whole(
        opcode: Opcode,
        last: bool,
        mut payload: &'a [u8],
    ) -> Result<Message<'a>, Refusal> {
        let bytes = &mut payload;
        let short = Refusal::RdmapOperation;
        let message = match opcode {
            Opcode::Immediate | Opcode::ImmediateSolicited => Message::Immediate {
                solicited: opcode == Opcode::ImmediateSolicited,
                data: take(bytes).ok_or(short)?,
            },
            Opcode::ReadRequest => Message::ReadRequest(ReadRequest::read(bytes).ok_or(short)?),
            Opcode::AtomicRequest => {
                Message::AtomicRequest(AtomicRequest::read(bytes).ok_or(short)??)
            }
            Opcode::AtomicResponse => Message::AtomicResponse {
                request_id: take_u32(bytes).ok_or(short)?,
                original: take_u64(bytes).ok_or(short)?,
            },
            Opcode::Terminate => Message::Terminate {
                payload: std::mem::take(bytes),
            },
            _ => return Err(Refusal::RdmapOpcode),
        };
        if !bytes.is_empty() || !last {
            return Err(Refusal::DdpMessageTooLong);
        }
        Ok(message)
    }
}

/// A segment: the ULPDU of an FPDU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Segment<'a> {
    Tagged(Tagged<'a>),
    Untagged(Untagged<'a>),
}

impl<'a> Segment<'a> {
    /// Reads a segment, which is the whole of `ulpdu`.
    ///
    /// # Errors
    ///
    /// What its sender is to be told by a Terminate message, unless it is one itself.
    pub(crate) fn read(ulpdu: &'a [u8]) -> Result<Self, Refusal> {
        let mut bytes = ulpdu;
        let [ddp, rdmap] = take(&mut bytes).ok_or(Refusal::RdmapOperation)?;
        let (tagged, last) = (ddp & TAGGED != 0, ddp & LAST != 0);
        if ddp & DDP_VERSION_BITS != DDP_VERSION {
            return Err(if tagged {
                Refusal::DdpTaggedVersion
            } else {
                Refusal::DdpUntaggedVersion
            });
        }
        if rdmap >> RDMAP_VERSION_SHIFT != RDMAP_VERSION {
            return Err(Refusal::RdmapVersion);
        }
        let (opcode, queue) = OPCODES
            .get(usize::from(rdmap & OPCODE_BITS))
            .filter(|(_, queue)| queue.is_none() == tagged)
            .copied()
            .ok_or(Refusal::RdmapOpcode)?;
        if let Some(queue) = queue {
            return Untagged::read(opcode, queue, last, bytes).map(Self::Untagged);
        }
        let kind = match opcode {
            Opcode::ReadResponse => TaggedKind::ReadResponse,
            _ => TaggedKind::Write,
        };
        let stag = take_u32(&mut bytes).ok_or(Refusal::RdmapOperation)?;
        let offset = take_u64(&mut bytes).ok_or(Refusal::RdmapOperation)?;
        Ok(Self::Tagged(Tagged {
            kind,
            last,
            stag,
            offset,
            payload: bytes,
        }))
    }

    /// Its payload; nothing if all of it is header.
    pub(crate) fn payload(&self) -> &'a [u8] {
        match self {
            Self::Tagged(tagged) => tagged.payload,
            Self::Untagged(untagged) => match untagged.message {
                Message::Send { payload, .. } | Message::Terminate { payload } => payload,
                _ => &[],
            },
        }
    }

    /// Appends its bytes.
    pub(crate) fn write(&self, out: &mut Vec<u8>) {
        self.write_header(out);
        out.extend_from_slice(self.payload());
    }

    /// Appends its bytes without the payload.
    pub(crate) fn write_header(&self, out: &mut Vec<u8>) {
        let untagged = match self {
            Self::Tagged(tagged) => {
                let opcode = match tagged.kind {
                    TaggedKind::Write => Opcode::Write,
                    TaggedKind::ReadResponse => Opcode::ReadResponse,
                };
                out.extend_from_slice(&control(TAGGED, tagged.last, opcode));
                out.extend_from_slice(&tagged.stag.to_be_bytes());
                out.extend_from_slice(&tagged.offset.to_be_bytes());
                return;
            }
            Self::Untagged(untagged) => untagged,
        };
        let message = &untagged.message;
        let (stag, last, offset) = match *message {
            Message::Send {
                invalidate,
                last,
                offset,
                ..
            } => (invalidate.unwrap_or_default(), last, offset),
            _ => (0, true, 0),
        };
        out.extend_from_slice(&control(0, last, message.opcode()));
        for word in [stag, message.queue(), untagged.msn, offset] {
            out.extend_from_slice(&word.to_be_bytes());
        }
        match message {
            Message::Send { .. } | Message::Terminate { .. } => {}
            Message::Immediate { data, .. } => out.extend_from_slice(data),
            Message::ReadRequest(request) => request.write(out),
            Message::AtomicRequest(request) => request.write(out),
            Message::AtomicResponse {
                request_id,
                original,
            } => {
                out.extend_from_slice(&request_id.to_be_bytes());
                out.extend_from_slice(&original.to_be_bytes());
            }
        }
    }
}

fn control(tagged: u8, last: bool, opcode: Opcode) -> [u8; 2] {
    let last = if last { LAST } else { 0 };
    let rdmap = RDMAP_VERSION << RDMAP_VERSION_SHIFT | opcode as u8;
    [tagged | last | DDP_VERSION, rdmap]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn written(segment: &Segment<'_>) -> Vec<u8> {
        let mut bytes = Vec::new();
        segment.write(&mut bytes);
        bytes
    }

    fn bytes(hex: &str) -> Vec<u8> {
        let digits: Vec<u8> = hex.bytes().filter(u8::is_ascii_hexdigit).collect();
        let byte = |pair: &[u8]| {
            let text = std::str::from_utf8(pair).unwrap();
            u8::from_str_radix(text, 16).unwrap()
        };
        digits.chunks(2).map(byte).collect()
    }

    fn send(invalidate: Option<u32>, solicited: bool) -> Message<'static> {
        Message::Send {
            invalidate,
            solicited,
            last: true,
            offset: 0x10,
            payload: b"ab",
        }
    }

    const READ: ReadRequest = ReadRequest {
        sink_stag: 0x0102_0304,
        sink_offset: 0x1112_1314_1516_1718,
        length: 0x2122_2324,
        source_stag: 0x3132_3334,
        source_offset: 0x4142_4344_4546_4748,
    };

    fn atomic(atomic: Atomic) -> Message<'static> {
        Message::AtomicRequest(AtomicRequest {
            request_id: 9,
            stag: 0xa0b0_c0d0,
            offset: 0x18,
            atomic,
        })
    }

    #[test]
    fn tagged_segments() {
        let write = Tagged {
            kind: TaggedKind::Write,
            last: false,
            stag: 0xaabb_ccdd,
            offset: 0x0102_0304_0506_0708,
            payload: b"xyz",
        };
        let response = Tagged {
            kind: TaggedKind::ReadResponse,
            last: true,
            ..write
        };
        for (segment, control) in [(write, "8140"), (response, "c142")] {
            let golden = bytes(&format!("{control} aabbccdd 0102030405060708 78797a"));
            assert_eq!(written(&Segment::Tagged(segment)), golden);
            assert_eq!(Segment::read(&golden), Ok(Segment::Tagged(segment)));
        }
    }

    #[test]
    fn untagged_segments() {
        let add = Atomic::FetchAdd {
            add: 5,
            boundaries: 0x8000,
        };
        let swap = Atomic::CmpSwap {
            swap: 1,
            swap_mask: 2,
            compare: 3,
            compare_mask: 4,
        };
        let response = Message::AtomicResponse {
            request_id: 9,
            original: 0x77,
        };
        let immediate = |solicited| Message::Immediate {
            solicited,
            data: *b"12345678",
        };
        let terminate = Message::Terminate {
            payload: &[0x12, 0x02, 0, 0],
        };
        for (message, hex) in [
            (
                send(None, false),
                "4143 00000000 00000000 00000007 00000010 6162",
            ),
            (
                send(Some(0x55), false),
                "4144 00000055 00000000 00000007 00000010 6162",
            ),
            (
                send(None, true),
                "4145 00000000 00000000 00000007 00000010 6162",
            ),
            (
                send(Some(0x55), true),
                "4146 00000055 00000000 00000007 00000010 6162",
            ),
            (
                Message::ReadRequest(READ),
                "4141 00000000 00000001 00000007 00000000 01020304 1112131415161718 21222324 \
                 31323334 4142434445464748",
            ),
            (
                terminate,
                "4147 00000000 00000002 00000007 00000000 12020000",
            ),
            (
                immediate(false),
                "4148 00000000 00000000 00000007 00000000 3132333435363738",
            ),
            (
                immediate(true),
                "4149 00000000 00000000 00000007 00000000 3132333435363738",
            ),
            (
                atomic(add),
                "414a 00000000 00000001 00000007 00000000 00000000 00000009 a0b0c0d0 \
                 0000000000000018 0000000000000005 0000000000008000 0000000000000000 \
                 ffffffffffffffff",
            ),
            (
                atomic(swap),
                "414a 00000000 00000001 00000007 00000000 00000002 00000009 a0b0c0d0 \
                 0000000000000018 0000000000000001 0000000000000002 0000000000000003 \
                 0000000000000004",
            ),
            (
                response,
                "414b 00000000 00000003 00000007 00000000 00000009 0000000000000077",
            ),
        ] {
            let segment = Segment::Untagged(Untagged { msn: 7, message });
            let golden = bytes(hex);
            assert_eq!(written(&segment), golden, "{message:?}");
            assert_eq!(Segment::read(&golden), Ok(segment));
        }
    }

    #[test]
    fn the_table_is_in_order() {
        for (at, (opcode, _)) in OPCODES.into_iter().enumerate() {
            assert_eq!(opcode as usize, at);
        }
    }

    #[test]
    fn reserved_fields_are_ignored() {
        let segment = Segment::Untagged(Untagged {
            msn: 7,
            message: send(None, true),
        });
        let mut bytes = written(&segment);
        bytes[0] |= 0x3c;
        bytes[1] |= 0x30;
        bytes[2..6].fill(0xee);
        assert_eq!(Segment::read(&bytes), Ok(segment));
        let add = Atomic::FetchAdd {
            add: 5,
            boundaries: 0,
        };
        let segment = Segment::Untagged(Untagged {
            msn: 7,
            message: atomic(add),
        });
        let mut bytes = written(&segment);
        bytes[UNTAGGED_LEN..UNTAGGED_LEN + 3].fill(0xee);
        bytes[UNTAGGED_LEN + 3] |= 0xf0;
        bytes[UNTAGGED_LEN + 36..].fill(0xee);
        assert_eq!(Segment::read(&bytes), Ok(segment));
    }

    #[test]
    fn what_is_malformed_is_refused() {
        let write = written(&Segment::Tagged(Tagged {
            kind: TaggedKind::Write,
            last: true,
            stag: 1,
            offset: 2,
            payload: &[],
        }));
        let untagged = |message| written(&Segment::Untagged(Untagged { msn: 1, message }));
        let sent = untagged(send(None, false));
        let read = untagged(Message::ReadRequest(READ));
        let swap = untagged(atomic(Atomic::FetchAdd {
            add: 1,
            boundaries: 0,
        }));
        let response = untagged(Message::AtomicResponse {
            request_id: 0,
            original: 0,
        });
        let immediate = untagged(Message::Immediate {
            solicited: false,
            data: [0; 8],
        });
        let terminate = untagged(Message::Terminate { payload: &[0; 4] });
        // Which segment, the byte that is changed, and to what.
        for (bytes, at, value, refusal) in [
            (&write, 0, 0xc0, Refusal::DdpTaggedVersion),
            (&write, 0, 0xc2, Refusal::DdpTaggedVersion),
            (&sent, 0, 0x40, Refusal::DdpUntaggedVersion),
            (&sent, 0, 0x43, Refusal::DdpUntaggedVersion),
            (&write, 1, 0x00, Refusal::RdmapVersion),
            (&sent, 1, 0x83, Refusal::RdmapVersion),
            // Opcodes that there are not, and those of the other kind.
            (&sent, 1, 0x4c, Refusal::RdmapOpcode),
            (&sent, 1, 0x4f, Refusal::RdmapOpcode),
            (&write, 1, 0x4c, Refusal::RdmapOpcode),
            (&write, 1, 0x43, Refusal::RdmapOpcode),
            (&write, 1, 0x41, Refusal::RdmapOpcode),
            (&sent, 1, 0x40, Refusal::RdmapOpcode),
            (&sent, 1, 0x42, Refusal::RdmapOpcode),
            // Atomic operations that there are not.
            (&swap, 21, 1, Refusal::RdmapOpcode),
            (&swap, 21, 3, Refusal::RdmapOpcode),
            // Queues of others.
            (&sent, 9, 1, Refusal::DdpInvalidQueue),
            (&sent, 6, 1, Refusal::DdpInvalidQueue),
            (&read, 9, 0, Refusal::DdpInvalidQueue),
            (&terminate, 9, 3, Refusal::DdpInvalidQueue),
            (&response, 9, 1, Refusal::DdpInvalidQueue),
            (&immediate, 9, 4, Refusal::DdpInvalidQueue),
            // These are one segment.
            (&read, 17, 4, Refusal::DdpInvalidOffset),
            (&swap, 17, 4, Refusal::DdpInvalidOffset),
            (&response, 14, 1, Refusal::DdpInvalidOffset),
            (&immediate, 17, 8, Refusal::DdpInvalidOffset),
            (&terminate, 17, 1, Refusal::DdpInvalidOffset),
            (&read, 0, 0x01, Refusal::DdpMessageTooLong),
            (&swap, 0, 0x01, Refusal::DdpMessageTooLong),
            (&response, 0, 0x01, Refusal::DdpMessageTooLong),
            (&immediate, 0, 0x01, Refusal::DdpMessageTooLong),
            (&terminate, 0, 0x01, Refusal::DdpMessageTooLong),
        ] {
            assert!(Segment::read(bytes).is_ok());
            let mut wrong = bytes.clone();
            wrong[at] = value;
            assert_eq!(Segment::read(&wrong), Err(refusal), "{wrong:02x?}");
        }
        for exact in [&read, &swap, &response, &immediate] {
            let mut long = exact.clone();
            long.push(0);
            assert_eq!(Segment::read(&long), Err(Refusal::DdpMessageTooLong));
            for cut in 0..exact.len() {
                let short = Segment::read(&exact[..cut]);
                assert_eq!(short, Err(Refusal::RdmapOperation));
            }
        }
        for (segment, header) in [(&write, TAGGED_LEN), (&sent, UNTAGGED_LEN)] {
            for cut in 0..header {
                let short = Segment::read(&segment[..cut]);
                assert_eq!(short, Err(Refusal::RdmapOperation));
            }
            assert!(Segment::read(&segment[..header]).is_ok());
        }
    }

    proptest! {
        #[test]
        fn segments_are_read_as_they_were_written(
            which in 0..9,
            (words, longs) in any::<([u32; 4], [u64; 6])>(),
            (last, solicited, invalidate) in any::<(bool, bool, Option<u32>)>(),
            payload in proptest::collection::vec(any::<u8>(), 0..100),
        ) {
            let payload = &payload[..];
            let [msn, request_id, stag, length] = words;
            let [offset, original, swap, swap_mask, compare, compare_mask] = longs;
            let tagged = |kind| Segment::Tagged(Tagged { kind, last, stag, offset, payload });
            let untagged = |message| Segment::Untagged(Untagged { msn, message });
            let atomic = |atomic| {
                untagged(Message::AtomicRequest(AtomicRequest { request_id, stag, offset, atomic }))
            };
            let segment = match which {
                0 => tagged(TaggedKind::Write),
                1 => tagged(TaggedKind::ReadResponse),
                2 => {
                    let offset = length;
                    untagged(Message::Send { invalidate, solicited, last, offset, payload })
                }
                3 => {
                    untagged(Message::Immediate { solicited, data: original.to_be_bytes() })
                }
                4 => untagged(Message::ReadRequest(ReadRequest {
                    sink_stag: stag,
                    sink_offset: offset,
                    length,
                    source_stag: request_id,
                    source_offset: original,
                })),
                5 => atomic(Atomic::FetchAdd { add: swap, boundaries: swap_mask }),
                6 => atomic(Atomic::CmpSwap { swap, swap_mask, compare, compare_mask }),
                7 => untagged(Message::Terminate { payload }),
                _ => untagged(Message::AtomicResponse { request_id, original }),
            };
            let bytes = written(&segment);
            prop_assert_eq!(Segment::read(&bytes), Ok(segment));
            prop_assert!(header(&bytes).is_some());
            for cut in 0..bytes.len() - segment.payload().len() {
                prop_assert_eq!(Segment::read(&bytes[..cut]), Err(Refusal::RdmapOperation));
            }
        }

        #[test]
        fn anything_may_come(
            (ddp, rdmap) in (any::<u8>(), any::<u8>()),
            rest in proptest::collection::vec(any::<u8>(), 0..90),
            likely: bool,
        ) {
            let mut bytes = vec![ddp, rdmap];
            if likely {
                bytes = vec![ddp & !3 | 1, rdmap & 0x3f | 0x40];
            }
            bytes.extend(rest);
            if likely && bytes.len() > 10 {
                bytes[6..9].fill(0);
                bytes[9] &= 3;
            }
            if let Ok(segment) = Segment::read(&bytes) {
                let again = written(&segment);
                prop_assert_eq!(Segment::read(&again), Ok(segment));
                prop_assert_eq!(again.len(), bytes.len());
            }
        }
    }
}
