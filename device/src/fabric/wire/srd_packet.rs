// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Packets of reliable datagrams (`spec/srd.md`, "Packets"): what they have behind their base
//! transport header.
use arrayvec::ArrayVec;
use virtio_rdma_spec::verbs::MASK_24;

use super::packet::{take, take_u32, Headers, Psn};

/// The version that this is.
const VERSION: u8 = 1;
/// Lower bits of the opcodes of our own packets.
pub(super) const DATA: u8 = 0x04;
pub(super) const ANSWER: u8 = 0x05;
pub(super) const RESET: u8 = 0x06;

/// Bytes of these headers.
pub(super) const DATA_LEN: usize = 56;
const ANSWER_LEN: usize = 56;
pub(super) const RESET_LEN: usize = 12;
const PATH_LEN: usize = 4;
const REFUSAL_LEN: usize = 8;

/// Packets that may be under way from the first on that has no answer; bits of an answer.
pub(super) const SPAN: u32 = 256;
const BITMAP: usize = SPAN as usize / 8;
/// Paths that there can be.
pub(super) const MOST_PATHS: usize = 8;
/// Refusals that an answer has at most, if it has room for them.
pub(super) const MOST_REFUSALS: usize = 255;
/// The longest answer without refusals, bytes.
const ANSWER_HEADERS: usize = 128;

/// Refusals that an answer has at most if its payload is of at most so many bytes.
pub(super) fn most_refusals(mtu: usize) -> usize {
    (mtu.saturating_sub(ANSWER_HEADERS) / REFUSAL_LEN).min(MOST_REFUSALS)
}

/// Flags of DATA.
const IMMEDIATE: u8 = 1;
const SOLICITED: u8 = 2;
/// Flag of ANSWER.
const NOT_NOW: u8 = 1;

/// What a packet of DATA is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Send,
    Write,
    Read,
    /// What a READ brings.
    Brought,
    /// It takes its number, and nothing else: what had it was given up.
    Nothing,
    /// A READ brings no more: its key grants the access no longer. `length` has status and reason.
    Failed,
}

impl Kind {
    const ALL: [Self; 6] = [
        Self::Send,
        Self::Write,
        Self::Read,
        Self::Brought,
        Self::Nothing,
        Self::Failed,
    ];
}

/// DATA, without its payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Data {
    pub kind: Kind,
    pub solicited: bool,
    pub path: u8,
    pub token: u64,
    /// Its number in its flow, and the serial number of the last answer that came, zero if none did.
    pub number: u32,
    pub heard: u32,
    pub src_qp: u32,
    pub qkey: u32,
    /// Number of a READ, and of what it brings.
    pub message: u32,
    /// Of the message, bytes, and of the payload in it.
    pub length: u32,
    pub offset: u32,
    /// Octets of the application.
    pub immediate: Option<u32>,
    pub rkey: u32,
    pub remote_addr: u64,
}

impl Data {
    pub(super) fn write(&self, out: &mut Headers<'_>) {
        let immediate = if self.immediate.is_some() {
            IMMEDIATE
        } else {
            0
        };
        let solicited = if self.solicited { SOLICITED } else { 0 };
        out.put(&[VERSION, self.kind as u8, immediate | solicited, self.path]);
        out.put(&self.token.to_be_bytes());
        let words = [
            self.number,
            self.heard,
            self.src_qp & MASK_24,
            self.qkey,
            self.message,
            self.length,
            self.offset,
        ];
        for word in words {
            out.put(&word.to_be_bytes());
        }
        out.put(&self.immediate.unwrap_or_default().to_le_bytes());
        out.put(&self.rkey.to_be_bytes());
        out.put(&self.remote_addr.to_be_bytes());
    }

    /// Reads it. The payload is left.
    fn read(bytes: &mut &[u8]) -> Option<Self> {
        let [version, kind, flags, path] = take(bytes)?;
        let kind = *Kind::ALL.get(usize::from(kind))?;
        if version != VERSION || usize::from(path) >= MOST_PATHS {
            return None;
        }
        Some(Self {
            kind,
            solicited: flags & SOLICITED != 0,
            path,
            token: take(bytes).map(u64::from_be_bytes)?,
            number: take_u32(bytes)?,
            heard: take_u32(bytes)?,
            src_qp: take_u32(bytes)? & MASK_24,
            qkey: take_u32(bytes)?,
            message: take_u32(bytes)?,
            length: take_u32(bytes)?,
            offset: take_u32(bytes)?,
            immediate: Some(take(bytes).map(u32::from_le_bytes)?)
                .filter(|_| flags & IMMEDIATE != 0),
            rkey: take_u32(bytes)?,
            remote_addr: take(bytes).map(u64::from_be_bytes)?,
        })
    }
}

/// Why a packet was not carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Refusal {
    pub number: u32,
    /// With what its message ends (`wc_status`, `vendor_err`);
    pub status: u8,
    pub reason: u8,
    /// if it is RNR_RETRY_EXC_ERR, it goes again after the time of this RNR NAK timer code.
    pub timer: u8,
}

/// ANSWER.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Answer<'a> {
    /// The VM is stopped.
    pub not_now: bool,
    pub token: u64,
    /// The first packet that did not come.
    pub expected: u32,
    /// A bit for it and each one after it that came, the lowest bit of the first byte first.
    came: &'a [u8],
    /// Packets that came with a mark of congestion.
    pub marks: u32,
    /// Its serial number.
    pub serial: u32,
    paths: &'a [u8],
    refusals: &'a [u8],
}

impl<'a> Answer<'a> {
    fn read(mut bytes: &'a [u8]) -> Option<Self> {
        let [version, flags, paths, refusals] = take(&mut bytes)?;
        if version != VERSION {
            return None;
        }
        let token = take(&mut bytes).map(u64::from_be_bytes)?;
        let expected = take_u32(&mut bytes)?;
        let (came, mut bytes) = bytes.split_at_checked(BITMAP)?;
        let marks = take_u32(&mut bytes)?;
        let serial = take_u32(&mut bytes)?;
        let (paths, refusals_at) = bytes.split_at_checked(usize::from(paths) * PATH_LEN)?;
        let whole = refusals_at.len() == usize::from(refusals) * REFUSAL_LEN;
        whole.then_some(Self {
            not_now: flags & NOT_NOW != 0,
            token,
            expected,
            came,
            marks,
            serial,
            paths,
            refusals: refusals_at,
        })
    }

    /// Packets after [`Self::expected`] that came.
    pub(super) fn came(&self) -> impl Iterator<Item = u32> + 'a {
        let (expected, came) = (self.expected, self.came);
        let bit = move |n: u32| {
            let byte = came.get(n as usize / 8).copied().unwrap_or_default();
            byte & 1 << (n % 8) != 0
        };
        (0..SPAN)
            .filter(move |n| bit(*n))
            .map(move |n| expected.wrapping_add(n))
    }

    /// Paths, each with the last packet that came on it.
    pub(super) fn paths(&self) -> impl Iterator<Item = (u8, Psn)> + 'a {
        self.paths.chunks_exact(PATH_LEN).filter_map(|mut bytes| {
            let word = take_u32(&mut bytes)?;
            Some(((word >> 24) as u8, Psn::new(word)))
        })
    }

    pub(super) fn refusals(&self) -> impl Iterator<Item = Refusal> + 'a {
        self.refusals
            .chunks_exact(REFUSAL_LEN)
            .filter_map(|mut bytes| {
                let number = take_u32(&mut bytes)?;
                let [status, reason, timer, _] = take(&mut bytes)?;
                Some(Refusal {
                    number,
                    status,
                    reason,
                    timer,
                })
            })
    }
}

/// An answer, as it is written: the payload of its packet.
#[derive(Debug, Default)]
pub(super) struct AnswerBytes(
    ArrayVec<u8, { ANSWER_LEN + MOST_PATHS * PATH_LEN + MOST_REFUSALS * REFUSAL_LEN }>,
);

/// What an answer says.
#[derive(Debug)]
pub(super) struct Told {
    pub not_now: bool,
    pub token: u64,
    pub expected: u32,
    /// A bit for each from `expected` on.
    pub came: [u64; SPAN as usize / 64],
    pub marks: u32,
    pub serial: u32,
    pub paths: ArrayVec<(u8, Psn), MOST_PATHS>,
    pub refusals: ArrayVec<Refusal, MOST_REFUSALS>,
}

impl AnswerBytes {
    pub(super) fn new(told: &Told) -> Self {
        let mut bytes = Self::default();
        let out = &mut bytes.0;
        let not_now = if told.not_now { NOT_NOW } else { 0 };
        out.extend([
            VERSION,
            not_now,
            told.paths.len() as u8,
            told.refusals.len() as u8,
        ]);
        out.extend(told.token.to_be_bytes());
        out.extend(told.expected.to_be_bytes());
        out.extend(told.came.iter().flat_map(|word| word.to_le_bytes()));
        out.extend(told.marks.to_be_bytes());
        out.extend(told.serial.to_be_bytes());
        for (path, psn) in &told.paths {
            out.extend((u32::from(*path) << 24 | psn.value()).to_be_bytes());
        }
        for refusal in &told.refusals {
            out.extend(refusal.number.to_be_bytes());
            out.extend([refusal.status, refusal.reason, refusal.timer, 0]);
        }
        bytes
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// A packet of reliable datagrams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SrdPacket<'a> {
    Data(Data, &'a [u8]),
    /// One that is to be sent has its bytes as payload.
    Answer(Option<Answer<'a>>),
    /// There is no such flow.
    Reset {
        token: u64,
    },
}

impl<'a> SrdPacket<'a> {
    /// Reads what is behind a base transport header with these lower bits of the opcode.
    pub(super) fn read(opcode: u8, mut bytes: &'a [u8], padding: usize) -> Option<Self> {
        match opcode {
            DATA => {
                let data = Data::read(&mut bytes)?;
                let payload = bytes.get(..bytes.len().checked_sub(padding)?)?;
                Some(Self::Data(data, payload))
            }
            ANSWER => Answer::read(bytes).map(|answer| Self::Answer(Some(answer))),
            RESET => {
                let [version, ..] = take::<4>(&mut bytes)?;
                let token = take(&mut bytes).map(u64::from_be_bytes)?;
                (version == VERSION && bytes.is_empty()).then_some(Self::Reset { token })
            }
            _ => None,
        }
    }

    pub(super) fn opcode(&self) -> u8 {
        match self {
            Self::Data(..) => DATA,
            Self::Answer(_) => ANSWER,
            Self::Reset { .. } => RESET,
        }
    }

    /// Bytes of its headers behind the base transport header.
    pub(super) fn headers_len(&self) -> usize {
        match self {
            Self::Data(..) => DATA_LEN,
            Self::Answer(_) => 0,
            Self::Reset { .. } => RESET_LEN,
        }
    }

    pub(super) fn write_headers(&self, out: &mut Headers<'_>) {
        match self {
            Self::Data(data, _) => data.write(out),
            Self::Answer(_) => {}
            Self::Reset { token } => {
                out.put(&[VERSION, 0, 0, 0]);
                out.put(&token.to_be_bytes());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn data() -> impl Strategy<Value = Data> {
        let words = any::<[u32; 8]>();
        let rest = (any::<u64>(), any::<u64>(), any::<Option<u32>>());
        let small = (0..Kind::ALL.len(), any::<bool>(), 0..MOST_PATHS as u8);
        (words, rest, small).prop_map(|(words, (token, remote_addr, immediate), small)| {
            let [number, heard, src_qp, qkey, message, length, offset, rkey] = words;
            let (kind, solicited, path) = small;
            Data {
                kind: Kind::ALL[kind],
                solicited,
                path,
                token,
                number,
                heard,
                src_qp: src_qp & MASK_24,
                qkey,
                message,
                length,
                offset,
                immediate,
                rkey,
                remote_addr,
            }
        })
    }

    fn written(packet: &SrdPacket<'_>) -> Vec<u8> {
        let mut bytes = vec![0; packet.headers_len()];
        let mut out = Headers::new(&mut bytes);
        packet.write_headers(&mut out);
        assert!(out.split().unwrap().1.is_empty());
        bytes
    }

    proptest! {
        #[test]
        fn data_are_read_as_they_were_written(data in data(), payload: Vec<u8>, padding in 0..4usize) {
            let mut bytes = written(&SrdPacket::Data(data, &[]));
            bytes.extend(&payload);
            bytes.resize(bytes.len() + padding, 0);
            let read = SrdPacket::read(DATA, &bytes, padding);
            prop_assert_eq!(read, Some(SrdPacket::Data(data, &payload)));
            prop_assert_eq!(SrdPacket::read(DATA, &bytes[..DATA_LEN - 1], 0), None);
        }

        #[test]
        fn answers_are_read_as_they_were_written(
            (token, expected, marks, serial) in any::<(u64, u32, u32, u32)>(),
            came: [u64; SPAN as usize / 64],
            paths in proptest::collection::vec((0..8u8, 0..1u32 << 24), 0..=MOST_PATHS),
            refused in proptest::collection::vec(any::<(u32, u8, u8, u8)>(), 0..=MOST_REFUSALS),
            not_now: bool,
        ) {
            let refusals: ArrayVec<_, MOST_REFUSALS> = refused
                .into_iter()
                .map(|(number, status, reason, timer)| Refusal { number, status, reason, timer })
                .collect();
            let paths: ArrayVec<_, MOST_PATHS> =
                paths.into_iter().map(|(path, psn)| (path, Psn::new(psn))).collect();
            let told = Told {
                not_now,
                token,
                expected,
                came,
                marks,
                serial,
                paths: paths.clone(),
                refusals: refusals.clone(),
            };
            let bytes = AnswerBytes::new(&told);
            let Some(SrdPacket::Answer(Some(answer))) = SrdPacket::read(ANSWER, bytes.bytes(), 0)
            else {
                panic!("not read");
            };
            let bits: u32 = came.iter().map(|word| word.count_ones()).sum();
            prop_assert_eq!(answer.came().count() as u32, bits);
            for number in answer.came() {
                let at = number.wrapping_sub(expected);
                prop_assert!(came[at as usize / 64] & 1 << (at % 64) != 0);
            }
            prop_assert!(answer.refusals().eq(refusals));
            prop_assert!(answer.paths().eq(paths));
            let known = (answer.token, answer.expected, answer.marks, answer.serial);
            prop_assert_eq!(known, (token, expected, marks, serial));
            prop_assert_eq!(answer.not_now, not_now);
        }

        #[test]
        fn anything_may_come(opcode in DATA..=RESET, bytes: Vec<u8>, padding in 0..4usize) {
            let _ = SrdPacket::read(opcode, &bytes, padding);
        }
    }

    // D-SRD-012.
    #[test]
    fn other_versions_are_not_read() {
        let mut bytes = written(&SrdPacket::Reset { token: 7 });
        assert!(SrdPacket::read(RESET, &bytes, 0).is_some());
        bytes[0] = 2;
        assert_eq!(SrdPacket::read(RESET, &bytes, 0), None);
    }
}
