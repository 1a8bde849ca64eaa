// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The message that ends a connection, and says why (RFC 5040, 4.8): what is behind its DDP header.
use super::bytes::{take, take_u16};
use super::ddp::{self, Message, ReadRequest, Segment, Untagged};
use super::refusal::{error_type, layer, Codes, Refusal};

/// Header control bits, in their byte.
const LENGTH_VALID: u8 = 0x80;
const DDP_HEADER: u8 = 0x40;
const RDMAP_HEADER: u8 = 0x20;
/// The same as siw of Linux writes them: its bit fields begin with the lowest bit.
const MIRRORED: u8 = 0x07;

/// Bytes without any headers.
const CONTROL_LEN: usize = 4;
/// The sequence number: each direction has one of these messages at most.
pub(crate) const MSN: u32 = 1;

/// A Terminate message. It has no more headers than its reason allows, and maybe fewer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Terminate<'a> {
    codes: Codes,
    segment_length: Option<u16>,
    ddp_header: Option<&'a [u8]>,
    read_request: Option<ReadRequest>,
}

impl<'a> Terminate<'a> {
    /// That for a reason. `ulpdu` is the segment that is refused; empty if the reason is none of a
    /// segment. Of a READ that fails half-way it is the request as it would be for the rest.
    pub(crate) fn new(refusal: Refusal, ulpdu: &'a [u8]) -> Self {
        let codes = refusal.codes();
        let of_segment =
            codes.layer != layer::MPA && codes.error_type != error_type::LOCAL_CATASTROPHIC;
        let ddp_header = ddp::header(ulpdu).filter(|_| of_segment);
        let segment_length = ddp_header.and_then(|_| u16::try_from(ulpdu.len()).ok());
        let of_memory =
            codes.layer == layer::RDMAP && codes.error_type == error_type::RDMAP_REMOTE_PROTECTION;
        let read_request = match Segment::read(ulpdu) {
            Ok(Segment::Untagged(Untagged {
                message: Message::ReadRequest(request),
                ..
            })) if of_memory => Some(request),
            _ => None,
        };
        Self {
            codes,
            segment_length,
            ddp_header,
            read_request,
        }
    }

    /// Reads the payload of one. Headers that it should have and has not are left out.
    ///
    /// # Errors
    ///
    /// It is too short to have a reason.
    pub(crate) fn read(mut bytes: &'a [u8]) -> Result<Self, Refusal> {
        let bytes = &mut bytes;
        let [first, code, bits, _] = take::<CONTROL_LEN>(bytes).ok_or(Refusal::RdmapOperation)?;
        let mut codes = Codes {
            layer: first >> 4,
            error_type: first & 0x0f,
            code,
        };
        let mut bits = bits;
        let mirrored = Codes {
            layer: codes.error_type,
            error_type: codes.layer,
            code,
        };
        // Where no bit tells how they are written, the codes may.
        let no_headers = bits & (LENGTH_VALID | DDP_HEADER | RDMAP_HEADER) == 0;
        let unknown = Refusal::find(codes).is_none() && Refusal::find(mirrored).is_some();
        if no_headers && (bits & MIRRORED != 0 || unknown) {
            codes = mirrored;
            bits = bits.reverse_bits();
        }
        let mut read = Self {
            codes,
            segment_length: None,
            ddp_header: None,
            read_request: None,
        };
        if bits & (LENGTH_VALID | DDP_HEADER) != 0 {
            let length = take_u16(bytes);
            read.segment_length = length.filter(|_| bits & LENGTH_VALID != 0);
        }
        if bits & DDP_HEADER != 0 {
            let split = bytes
                .first()
                .and_then(|control| bytes.split_at_checked(ddp::header_len(*control)));
            let Some((header, rest)) = split else {
                return Ok(read);
            };
            read.ddp_header = Some(header);
            *bytes = rest;
        }
        if bits & RDMAP_HEADER != 0 {
            read.read_request = ReadRequest::read(bytes);
        }
        Ok(read)
    }

    /// Appends its bytes: the payload of a Terminate segment.
    pub(crate) fn write(&self, out: &mut Vec<u8>) {
        let flag = |set: bool, bit: u8| if set { bit } else { 0 };
        let bits = flag(self.segment_length.is_some(), LENGTH_VALID)
            | flag(self.ddp_header.is_some(), DDP_HEADER)
            | flag(self.read_request.is_some(), RDMAP_HEADER);
        let Codes {
            layer,
            error_type,
            code,
        } = self.codes;
        out.extend_from_slice(&[layer << 4 | error_type & 0x0f, code, bits, 0]);
        if self.segment_length.is_some() || self.ddp_header.is_some() {
            let length = self.segment_length.unwrap_or_default();
            out.extend_from_slice(&length.to_be_bytes());
        }
        out.extend_from_slice(self.ddp_header.unwrap_or_default());
        if let Some(request) = self.read_request {
            request.write(out);
        }
    }

    /// Appends the whole segment: the message with its DDP header.
    pub(crate) fn write_segment(&self, out: &mut Vec<u8>) {
        let segment = Segment::Untagged(Untagged {
            msn: MSN,
            message: Message::Terminate { payload: &[] },
        });
        segment.write(out);
        self.write(out);
    }

    /// The reason on the wire, which may be none that is known.
    pub(crate) fn codes(&self) -> Codes {
        self.codes
    }
}

#[cfg(test)]
mod tests {
    use super::super::refusal::REFUSALS;
    use super::*;
    use proptest::prelude::*;

    /// Bytes at most.
    const MAX_LEN: usize = CONTROL_LEN + 2 + ddp::UNTAGGED_LEN + 28;

    const READ: ReadRequest = ReadRequest {
        sink_stag: 0x0102_0304,
        sink_offset: 0x1112_1314_1516_1718,
        length: 0x2122_2324,
        source_stag: 0x3132_3334,
        source_offset: 0x4142_4344_4546_4748,
    };

    fn segment(message: Message<'_>) -> Vec<u8> {
        let mut bytes = Vec::new();
        Segment::Untagged(Untagged { msn: 5, message }).write(&mut bytes);
        bytes
    }

    fn send(payload: &[u8]) -> Vec<u8> {
        segment(Message::Send {
            invalidate: None,
            solicited: false,
            last: true,
            offset: 0,
            payload,
        })
    }

    fn written(terminate: &Terminate<'_>) -> Vec<u8> {
        let mut bytes = Vec::new();
        terminate.write(&mut bytes);
        assert!(bytes.len() <= MAX_LEN);
        bytes
    }

    #[test]
    fn a_send_without_a_buffer() {
        let refused = send(b"hello");
        let terminate = Terminate::new(Refusal::DdpNoBuffer, &refused);
        let mut golden = vec![0x12, 0x02, 0xc0, 0x00, 0x00, 0x17];
        golden.extend(&refused[..ddp::UNTAGGED_LEN]);
        assert_eq!(written(&terminate), golden);
        assert_eq!(Terminate::read(&golden), Ok(terminate));
        assert_eq!(Refusal::find(terminate.codes), Some(Refusal::DdpNoBuffer));
        assert_eq!(terminate.segment_length, Some(23));
        let mut whole = Vec::new();
        terminate.write_segment(&mut whole);
        let head = [0x41, 0x47, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 0];
        assert_eq!(whole, [&head[..], &golden[..]].concat());
        let message = Message::Terminate { payload: &golden };
        let read = Segment::Untagged(Untagged { msn: 1, message });
        assert_eq!(Segment::read(&whole), Ok(read));
    }

    #[test]
    fn a_read_without_the_right() {
        let refused = segment(Message::ReadRequest(READ));
        let terminate = Terminate::new(Refusal::RdmapAccess, &refused);
        let mut golden = vec![0x01, 0x02, 0xe0, 0x00, 0x00, 46];
        golden.extend(&refused);
        assert_eq!(written(&terminate), golden);
        assert_eq!(golden.len(), MAX_LEN);
        assert_eq!(Terminate::read(&golden), Ok(terminate));
        assert_eq!(terminate.read_request, Some(READ));
        assert_eq!(terminate.ddp_header, Some(&refused[..18]));
    }

    #[test]
    fn headers_are_there_as_the_reason_has_them() {
        let read = segment(Message::ReadRequest(READ));
        for (refusal, codes, _) in REFUSALS {
            let terminate = Terminate::new(refusal, &read);
            let catastrophic = matches!(
                refusal,
                Refusal::RdmapCatastrophic | Refusal::DdpCatastrophic
            );
            let with_ddp = codes.layer != layer::MPA && !catastrophic;
            assert_eq!(terminate.ddp_header.is_some(), with_ddp, "{refusal}");
            assert_eq!(terminate.segment_length.is_some(), with_ddp);
            let with_rdmap = (codes.layer, codes.error_type) == (0, 1);
            assert_eq!(terminate.read_request.is_some(), with_rdmap);
            // Nothing is known of a segment of another version, or one that is cut short.
            let mut other = read.clone();
            other[0] ^= 3;
            for ulpdu in [&other[..], &read[..17], &[]] {
                let terminate = Terminate::new(refusal, ulpdu);
                assert_eq!(written(&terminate).len(), CONTROL_LEN);
            }
            let sent = send(b"");
            assert_eq!(Terminate::new(refusal, &sent).read_request, None);
        }
    }

    #[test]
    fn headers_that_are_missing_are_left_out() {
        let refused = segment(Message::ReadRequest(READ));
        let whole = written(&Terminate::new(Refusal::RdmapBounds, &refused));
        for cut in 0..whole.len() {
            let read = Terminate::read(&whole[..cut]);
            if cut < CONTROL_LEN {
                assert_eq!(read, Err(Refusal::RdmapOperation));
                continue;
            }
            let read = read.unwrap();
            assert_eq!(Refusal::find(read.codes), Some(Refusal::RdmapBounds));
            assert_eq!(read.segment_length.is_some(), cut >= 6);
            assert_eq!(read.ddp_header.is_some(), cut >= 24);
            assert_eq!(read.read_request, None);
        }
        // A length that is there, but not valid.
        let mut invalid = whole;
        invalid[2] &= !LENGTH_VALID;
        let read = Terminate::read(&invalid).unwrap();
        assert_eq!((read.segment_length, read.read_request), (None, Some(READ)));
    }

    #[test]
    fn those_of_siw_are_understood() {
        let refused = send(b"hello");
        let mut siw = vec![0x21, 0x05, 0x03, 0x00, 0x00, 0x17];
        siw.extend(&refused[..ddp::UNTAGGED_LEN]);
        let read = Terminate::read(&siw);
        assert_eq!(
            read,
            Ok(Terminate::new(Refusal::DdpMessageTooLong, &refused))
        );
        for (bytes, refusal) in [
            // Without headers only what the RFCs do not have is taken for that.
            ([0x02, 0x02, 0, 0], Refusal::MpaCrc),
            ([0x20, 0x02, 0, 0], Refusal::MpaCrc),
            ([0x20, 0x06, 0, 0], Refusal::MpaInsufficientIrd),
            ([0x02, 0x06, 0, 0], Refusal::RdmapOpcode),
        ] {
            let read = Terminate::read(&bytes).unwrap();
            assert_eq!(Refusal::find(read.codes), Some(refusal), "{bytes:02x?}");
        }
    }

    #[test]
    fn a_reason_may_be_unknown() {
        let read = Terminate::read(&[0x5a, 0x33, 0, 0]).unwrap();
        assert_eq!(Refusal::find(read.codes), None);
        assert_eq!(
            read.codes().to_string(),
            "layer 5: error type 10, code 0x33"
        );
    }

    proptest! {
        #[test]
        fn they_are_read_as_they_were_written(
            which in 0..REFUSALS.len(),
            ulpdu in proptest::collection::vec(any::<u8>(), 0..80),
            likely: bool,
        ) {
            let mut ulpdu = ulpdu;
            if let (true, Some(control)) = (likely, ulpdu.first_mut()) {
                *control = *control & !3 | 1;
            }
            let terminate = Terminate::new(REFUSALS[which].0, &ulpdu);
            let mut bytes = written(&terminate);
            prop_assert_eq!(Terminate::read(&bytes), Ok(terminate));
            // What is behind it is ignored.
            bytes.push(0xee);
            prop_assert_eq!(Terminate::read(&bytes), Ok(terminate));
        }

        #[test]
        fn anything_may_come(bytes in proptest::collection::vec(any::<u8>(), 0..60)) {
            if let Ok(terminate) = Terminate::read(&bytes) {
                prop_assert!(!terminate.codes().to_string().is_empty());
                prop_assert!(written(&terminate).len() <= bytes.len());
            }
        }
    }
}
