// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A peer of iWARP that is a test: it writes and reads MPA, DDP and RDMAP by itself, as the RFCs
//! have them and otherwise, and shares no code with the device.
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::AsFd;

use nix::sys::socket::{setsockopt, sockopt};

use crate::common::TIMEOUT;

/// Flags of MPA frames.
pub const MARKERS: u8 = 0x80;
pub const CRC: u8 = 0x40;
pub const REJECTED: u8 = 0x20;
pub const ENHANCED: u8 = 0x10;
/// Flags beside IRD and ORD.
pub const PEER_TO_PEER: u16 = 0x8000;
pub const RTR_WRITE: u16 = 0x8000;
pub const RTR_READ: u16 = 0x4000;

/// Opcodes of RDMAP.
pub const WRITE: u8 = 0;
pub const READ_REQUEST: u8 = 1;
pub const READ_RESPONSE: u8 = 2;
pub const SEND: u8 = 3;
pub const SEND_INVALIDATE: u8 = 4;
pub const TERMINATE: u8 = 7;
pub const IMMEDIATE: u8 = 8;
pub const ATOMIC_REQUEST: u8 = 10;
pub const ATOMIC_RESPONSE: u8 = 11;

/// Why a connection ends: layer, type, code.
pub type Codes = (u8, u8, u8);

fn frame(key: &[u8; 16], revision: u8, flags: u8, private: &[u8]) -> Vec<u8> {
    let length = (private.len() as u16).to_be_bytes();
    [key, &[flags, revision][..], &length, private].concat()
}

/// A request of MPA.
pub fn request(revision: u8, flags: u8, private: &[u8]) -> Vec<u8> {
    frame(b"MPA ID Req Frame", revision, flags, private)
}

/// A reply of MPA.
pub fn reply(revision: u8, flags: u8, private: &[u8]) -> Vec<u8> {
    frame(b"MPA ID Rep Frame", revision, flags, private)
}

/// What private data begins with in enhanced frames.
pub fn enhanced(ird: u16, ord: u16) -> Vec<u8> {
    [ird.to_be_bytes(), ord.to_be_bytes()].concat()
}

/// An FPDU with this ULPDU.
pub fn fpdu(ulpdu: &[u8]) -> Vec<u8> {
    let mut bytes = (ulpdu.len() as u16).to_be_bytes().to_vec();
    bytes.extend(ulpdu);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    let sum = crc32c::crc32c(&bytes).to_le_bytes();
    bytes.extend(sum);
    bytes
}

/// A tagged segment.
pub fn tagged(opcode: u8, last: bool, stag: u32, offset: u64, payload: &[u8]) -> Vec<u8> {
    let control = [0x81 | u8::from(last) << 6, 0x40 | opcode];
    [
        &control[..],
        &stag.to_be_bytes(),
        &offset.to_be_bytes(),
        payload,
    ]
    .concat()
}

/// An untagged segment.
#[derive(Clone, Copy)]
pub struct Untagged {
    pub opcode: u8,
    pub last: bool,
    pub stag: u32,
    pub queue: u32,
    pub msn: u32,
    pub offset: u32,
}

impl Untagged {
    /// Of the first message to its queue, whole.
    pub fn of(opcode: u8) -> Self {
        let queue = match opcode {
            READ_REQUEST | ATOMIC_REQUEST => 1,
            TERMINATE => 2,
            ATOMIC_RESPONSE => 3,
            _ => 0,
        };
        Self {
            opcode,
            last: true,
            stag: 0,
            queue,
            msn: 1,
            offset: 0,
        }
    }

    pub fn with(self, payload: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0x01 | u8::from(self.last) << 6, 0x40 | self.opcode];
        for word in [self.stag, self.queue, self.msn, self.offset] {
            bytes.extend(word.to_be_bytes());
        }
        bytes.extend(payload);
        bytes
    }
}

/// A whole SEND with this sequence number.
pub fn send(msn: u32, payload: &[u8]) -> Vec<u8> {
    let of = Untagged::of(SEND);
    Untagged { msn, ..of }.with(payload)
}

/// A request to read, with this sequence number, to the sink 7.
pub fn read_request(msn: u32, stag: u32, offset: u64, length: u32) -> Vec<u8> {
    let mut body = 7u32.to_be_bytes().to_vec();
    body.extend(0x1000u64.to_be_bytes());
    body.extend(length.to_be_bytes());
    body.extend(stag.to_be_bytes());
    body.extend(offset.to_be_bytes());
    let of = Untagged::of(READ_REQUEST);
    Untagged { msn, ..of }.with(&body)
}

/// The body of a request to add one.
pub fn atomic(subcode: u32, stag: u32, offset: u64) -> Vec<u8> {
    let mut body = Vec::new();
    for word in [subcode, 9, stag] {
        body.extend(word.to_be_bytes());
    }
    for word in [offset, 1, 0, 0, 0] {
        body.extend(word.to_be_bytes());
    }
    body
}

/// A frame that came.
#[derive(Debug, PartialEq, Eq)]
pub struct Came {
    pub reply: bool,
    pub flags: u8,
    pub revision: u8,
    pub private: Vec<u8>,
}

/// A connection.
pub struct Peer(pub TcpStream);

impl Peer {
    pub fn connect(to: SocketAddr) -> Self {
        Self::of(TcpStream::connect(to).unwrap())
    }

    pub fn of(stream: TcpStream) -> Self {
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        Self(stream)
    }

    /// Writes bytes. The other end may have gone.
    pub fn write(&mut self, bytes: &[u8]) {
        let _ = self.0.write_all(bytes);
    }

    /// Writes FPDUs with these ULPDUs at once.
    pub fn put(&mut self, ulpdus: &[Vec<u8>]) {
        let all: Vec<_> = ulpdus.iter().map(|ulpdu| fpdu(ulpdu)).collect();
        self.write(&all.concat());
    }

    fn take(&mut self, count: usize) -> Option<Vec<u8>> {
        let mut bytes = vec![0; count];
        match self.0.read_exact(&mut bytes) {
            Ok(()) => Some(bytes),
            Err(error) => {
                let ended = [ErrorKind::UnexpectedEof, ErrorKind::ConnectionReset];
                assert!(ended.contains(&error.kind()), "{error}");
                None
            }
        }
    }

    /// The request or reply that comes; none if the connection ends.
    pub fn frame(&mut self) -> Option<Came> {
        let head = self.take(20)?;
        let length = u16::from_be_bytes([head[18], head[19]]);
        let reply = match &head[..16] {
            b"MPA ID Rep Frame" => true,
            b"MPA ID Req Frame" => false,
            other => panic!("{other:?}"),
        };
        Some(Came {
            reply,
            flags: head[16],
            revision: head[17],
            private: self.take(length.into())?,
        })
    }

    /// The ULPDU of the next FPDU, whose CRC is right; none at the end.
    pub fn ulpdu(&mut self) -> Option<Vec<u8>> {
        let mut all = self.take(2)?;
        let length = usize::from(u16::from_be_bytes([all[0], all[1]]));
        let rest = (2 + length).next_multiple_of(4) - 2 + 4;
        all.extend(self.take(rest).expect("the rest of an FPDU"));
        let (covered, sum) = all.split_at(all.len() - 4);
        assert_eq!(crc32c::crc32c(covered).to_le_bytes(), sum);
        Some(covered[2..2 + length].to_vec())
    }

    /// What comes until the connection ends: why it does, if that is said, and the headers behind.
    /// Then it closes, too.
    pub fn end(&mut self) -> Option<(Codes, Vec<u8>)> {
        let mut said = None;
        while let Some(ulpdu) = self.ulpdu() {
            assert!(said.is_none(), "something comes behind the last message");
            if ulpdu[..2] != [0x41, 0x47] {
                continue;
            }
            assert_eq!(
                ulpdu[2..18],
                [0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 0]
            );
            let codes = (ulpdu[18] >> 4, ulpdu[18] & 0xf, ulpdu[19]);
            said = Some((codes, ulpdu[20..].to_vec()));
        }
        self.finish();
        said
    }

    /// Nothing more comes, and nothing is said about that.
    #[track_caller]
    pub fn assert_closed(&mut self) {
        assert_eq!(self.take(1), None);
    }

    /// Closes its direction.
    pub fn finish(&self) {
        let _ = self.0.shutdown(Shutdown::Write);
    }

    /// Ends by RST.
    pub fn reset(self) {
        let linger = nix::libc::linger {
            l_onoff: 1,
            l_linger: 0,
        };
        setsockopt(&self.0.as_fd(), sockopt::Linger, &linger).unwrap();
    }
}
