// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The messages of vfio-user 0.1, as bytes. Nothing here knows what they are about.

/// Bytes of a header.
pub(super) const HEADER: usize = 16;
/// Bytes that are read from a region or written to one at once, at most: what a device tells.
pub(super) const MAX_TRANSFER: u32 = 4096;
/// Longest message without its header, bytes.
pub(super) const MAX_BODY: usize = 64 + MAX_TRANSFER as usize;
/// File descriptors of a message, at most: what a device tells, and as many as QEMU sends.
pub(super) const MAX_FDS: usize = 16;

const REPLY: u32 = 1;
const TYPE: u32 = 0xf;
const NO_REPLY: u32 = 1 << 4;
const ERROR: u32 = 1 << 5;

/// Bit of DMA_MAP: the device may read the memory.
pub(super) const DMA_READ: u32 = 1 << 0;
/// Bit of DMA_MAP: the device may write the memory.
pub(super) const DMA_WRITE: u32 = 1 << 1;
/// Bit of DMA_UNMAP: all memory.
pub(super) const UNMAP_ALL: u32 = 1 << 2;

/// Bits of SET_IRQS: what comes with it, and what is to be done.
pub(super) mod irq {
    pub(in crate::vfio_user) const DATA_NONE: u32 = 1 << 0;
    pub(in crate::vfio_user) const DATA_BOOL: u32 = 1 << 1;
    pub(in crate::vfio_user) const DATA_EVENTFD: u32 = 1 << 2;
    pub(in crate::vfio_user) const ACTION_TRIGGER: u32 = 1 << 5;
    /// Of GET_IRQ_INFO: there may be eventfds.
    pub(in crate::vfio_user) const EVENTFD: u32 = 1 << 0;
}

/// Why a message ends the session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum Malformed {
    #[error("a message of {0} bytes")]
    Size(u32),
    #[error("flags {0:#x}: not a request")]
    Flags(u32),
    #[error("{length} bytes after the header of command {command}")]
    Body { command: u16, length: usize },
    #[error("command {0} before the version")]
    NoVersion(u16),
    #[error("version {0}, or capabilities that are not JSON")]
    Version(u16),
}

/// The header of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) id: u16,
    pub(super) command: u16,
    /// Length of what follows, at most [`MAX_BODY`].
    pub(super) body: usize,
    /// Nobody waits for an answer.
    pub(super) no_reply: bool,
}

impl Header {
    pub(super) fn read(bytes: &[u8; HEADER]) -> Result<Self, Malformed> {
        let mut fields = Fields(bytes);
        let malformed = Malformed::Size(0);
        let id = fields.u16().ok_or(malformed)?;
        let command = fields.u16().ok_or(malformed)?;
        let size = fields.u32().ok_or(malformed)?;
        let flags = fields.u32().ok_or(malformed)?;
        let body = (size as usize).checked_sub(HEADER);
        let body = body.filter(|body| *body <= MAX_BODY);
        if flags & TYPE != 0 {
            return Err(Malformed::Flags(flags));
        }
        Ok(Self {
            id,
            command,
            body: body.ok_or(Malformed::Size(size))?,
            no_reply: flags & NO_REPLY != 0,
        })
    }

    /// The answer: a body, or an error number.
    pub(super) fn reply(&self, answer: &Result<Vec<u8>, i32>) -> Vec<u8> {
        let (flags, error, body) = match answer {
            Ok(body) => (REPLY, 0, &**body),
            Err(error) => (REPLY | ERROR, *error as u32, &[][..]),
        };
        let mut bytes = Vec::with_capacity(HEADER + body.len());
        bytes.extend(self.id.to_le_bytes());
        bytes.extend(self.command.to_le_bytes());
        bytes.extend((HEADER as u32 + body.len() as u32).to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes.extend(error.to_le_bytes());
        bytes.extend(body);
        bytes
    }
}

/// Reads fields one after the other.
struct Fields<'b>(&'b [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*first)
    }

    fn u16(&mut self) -> Option<u16> {
        self.take().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }
}

/// What a front end asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Request<'b> {
    Version {
        major: u16,
        minor: u16,
        capabilities: &'b [u8],
    },
    DmaMap {
        flags: u32,
        offset: u64,
        address: u64,
        size: u64,
    },
    DmaUnmap {
        flags: u32,
        address: u64,
        size: u64,
    },
    GetInfo,
    GetRegionInfo {
        index: u32,
    },
    GetIrqInfo {
        index: u32,
    },
    SetIrqs {
        flags: u32,
        index: u32,
        start: u32,
        count: u32,
        data: &'b [u8],
    },
    Read {
        region: u32,
        offset: u64,
        count: u32,
    },
    Write {
        region: u32,
        offset: u64,
        data: &'b [u8],
    },
    Reset,
    /// A command that there is not, or that is not for devices.
    Other,
}

impl<'b> Request<'b> {
    /// The request in the body of a message.
    pub(super) fn read(command: u16, body: &'b [u8]) -> Result<Self, Malformed> {
        let length = body.len();
        Self::of(command, Fields(body)).ok_or(Malformed::Body { command, length })
    }

    fn of(command: u16, mut fields: Fields<'b>) -> Option<Self> {
        let f = &mut fields;
        Some(match command {
            1 => Self::Version {
                major: f.u16()?,
                minor: f.u16()?,
                capabilities: f.0,
            },
            2 => {
                let (_argsz, flags) = (f.u32()?, f.u32()?);
                Self::DmaMap {
                    flags,
                    offset: f.u64()?,
                    address: f.u64()?,
                    size: f.u64()?,
                }
            }
            3 => {
                let (_argsz, flags) = (f.u32()?, f.u32()?);
                Self::DmaUnmap {
                    flags,
                    address: f.u64()?,
                    size: f.u64()?,
                }
            }
            4 => Self::GetInfo,
            5 | 7 => {
                let (_argsz, _flags, index) = (f.u32()?, f.u32()?, f.u32()?);
                match command {
                    5 => Self::GetRegionInfo { index },
                    _ => Self::GetIrqInfo { index },
                }
            }
            8 => {
                let (_argsz, flags) = (f.u32()?, f.u32()?);
                Self::SetIrqs {
                    flags,
                    index: f.u32()?,
                    start: f.u32()?,
                    count: f.u32()?,
                    data: f.0,
                }
            }
            9 => Self::Read {
                offset: f.u64()?,
                region: f.u32()?,
                count: f.u32()?,
            },
            10 => {
                let (offset, region, count) = (f.u64()?, f.u32()?, f.u32()?);
                Self::Write {
                    region,
                    offset,
                    data: Some(f.0).filter(|data| data.len() == count as usize)?,
                }
            }
            13 => Self::Reset,
            _ => Self::Other,
        })
    }
}

/// The body of an answer: fields one after the other.
#[derive(Debug, Default)]
pub(super) struct Body(Vec<u8>);

impl Body {
    pub(super) fn u16(mut self, value: u16) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    pub(super) fn u32(mut self, value: u32) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    pub(super) fn u64(mut self, value: u64) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    pub(super) fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend(bytes);
        self
    }

    pub(super) fn done(self) -> Vec<u8> {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(size: u32, flags: u32) -> [u8; HEADER] {
        let bytes = Body::default().u16(7).u16(9).u32(size).u32(flags).u32(0);
        bytes.done().try_into().unwrap()
    }

    #[test]
    fn headers_are_judged() {
        let good = Header::read(&header(32, NO_REPLY)).unwrap();
        assert_eq!((good.id, good.command, good.body), (7, 9, 16));
        assert!(good.no_reply && !Header::read(&header(16, 0)).unwrap().no_reply);
        let most = (HEADER + MAX_BODY) as u32;
        assert!(Header::read(&header(most, 0)).is_ok());
        for size in [0, 15, most + 1, u32::MAX] {
            assert_eq!(Header::read(&header(size, 0)), Err(Malformed::Size(size)));
        }
        assert_eq!(
            Header::read(&header(16, REPLY)),
            Err(Malformed::Flags(REPLY))
        );
    }

    #[test]
    fn answers_name_their_request() {
        let request = Header::read(&header(16, 0)).unwrap();
        let bytes = request.reply(&Ok(vec![5; 4]));
        assert_eq!(
            bytes,
            [7, 0, 9, 0, 20, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 5, 5, 5, 5]
        );
        let bytes = request.reply(&Err(22));
        assert_eq!(bytes, [7, 0, 9, 0, 16, 0, 0, 0, 0x21, 0, 0, 0, 22, 0, 0, 0]);
    }

    #[test]
    fn no_request_is_shorter_than_its_fields() {
        let lengths = [
            (1, 4),
            (2, 32),
            (3, 24),
            (4, 0),
            (5, 12),
            (7, 12),
            (8, 20),
            (9, 16),
            (10, 16),
            (13, 0),
            (6, 0),
            (99, 0),
        ];
        let body = [0; 64];
        for (command, least) in lengths {
            for length in 0..least {
                let malformed = Malformed::Body { command, length };
                assert_eq!(Request::read(command, &body[..length]), Err(malformed));
            }
            assert!(Request::read(command, &body[..least]).is_ok(), "{command}");
        }
    }

    #[test]
    fn what_is_written_is_as_long_as_it_says() {
        let write = |count: u32| Body::default().u64(8).u32(2).u32(count).u32(3).done();
        let (good, bad) = (write(4), write(5));
        let request = Request::Write {
            region: 2,
            offset: 8,
            data: &[3, 0, 0, 0],
        };
        assert_eq!(Request::read(10, &good), Ok(request));
        assert!(Request::read(10, &bad).is_err());
    }
}
