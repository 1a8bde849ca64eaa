// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The objects of verbs: what they are made of, what may use them, and their state machines.
//!
//! They are passive: rings, keys and states, which others act on. Objects are created and destroyed
//! by control commands; what changes on the data path (ring positions) is behind a lock of the
//! object itself.

pub mod cq;
pub mod fast;
pub mod gid_policy;
pub mod keys;
pub mod mr;
pub mod mw;
pub mod numbers;
pub mod slab;
pub mod srq;
pub mod state;
pub mod timers;
pub mod work_queue;

use std::net::Ipv6Addr;

use virtio_rdma_spec::verbs::{vendor_err, wc_status};

use self::gid_policy::Gid;

/// The feature bits that a driver accepted.
#[derive(Debug, Clone, Copy, Default)]
pub struct Features(pub u64);

impl Features {
    /// Whether a `feature` is among them.
    #[inline]
    #[must_use]
    pub fn has(self, feature: u32) -> bool {
        self.0 >> feature & 1 != 0
    }
}

/// Why a work request completed in error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WcError {
    /// `wc_status`.
    pub status: u8,
    /// `vendor_err`.
    pub vendor: u8,
}

impl WcError {
    /// It was flushed.
    pub const FLUSHED: Self = Self::new(wc_status::WR_FLUSH_ERR, vendor_err::FLUSHED);

    /// An error of a status, for a reason.
    #[must_use]
    pub const fn new(status: u8, vendor: u8) -> Self {
        Self { status, vendor }
    }
}

/// Why a command failed; each is a `status` of the specification ("Control commands").
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// No object has this handle.
    #[error("no such object")]
    NotFound,
    /// A limit or the memory of the device is exhausted.
    #[error("a limit is reached")]
    NoMemory,
    /// An address is not guest memory.
    #[error("not guest memory")]
    Fault,
    /// The object is in use.
    #[error("in use")]
    Busy,
    /// A value is not valid.
    #[error("invalid value")]
    Invalid,
    /// Not supported.
    #[error("not supported")]
    NotSupported,
    /// Another device has the GID, or had it and peers are still connected to it.
    #[error(
        "GID {}: another device has it, or had it and queue pairs still name it",
        Ipv6Addr::from(*.0)
    )]
    GidTaken(Gid),
    /// The host does not allow it.
    #[error("the host does not allow it")]
    NotAllowed,
    /// The address is in use.
    #[error("the address is in use")]
    AddressInUse,
    /// The address is none of the device's.
    #[error("the device has no such address")]
    NoSuchAddress,
    /// The operator does not allow this VM the GID.
    #[error(transparent)]
    GidNotAllowed(#[from] gid_policy::Refusal),
}

impl Error {
    /// The `status` of the response.
    #[must_use]
    pub fn status(self) -> u16 {
        use virtio_rdma_spec::command::status;
        match self {
            Self::NotFound => status::ENOENT,
            Self::NoMemory => status::ENOMEM,
            Self::Fault => status::EFAULT,
            Self::Busy | Self::GidTaken(_) => status::EBUSY,
            Self::Invalid => status::EINVAL,
            Self::NotSupported => status::EOPNOTSUPP,
            Self::AddressInUse => status::EADDRINUSE,
            Self::NoSuchAddress => status::EADDRNOTAVAIL,
            Self::GidNotAllowed(_) | Self::NotAllowed => status::EPERM,
        }
    }
}

impl From<crate::footprint::NoMemory> for Error {
    fn from(_: crate::footprint::NoMemory) -> Self {
        Self::NoMemory
    }
}

impl From<crate::memory::Error> for Error {
    fn from(error: crate::memory::Error) -> Self {
        match error {
            crate::memory::Error::NotGuestMemory(_) => Self::Fault,
            crate::memory::Error::NoMemory => Self::NoMemory,
            _ => Self::Invalid,
        }
    }
}
