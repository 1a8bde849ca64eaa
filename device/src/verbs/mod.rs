// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The objects of verbs: what they are made of, who may use them, and their state machines.
//!
//! Objects are created and destroyed by control commands under the write lock of their VM's
//! [`tables`]; the data path reads the tables under the read lock. What changes on the data path
//! (ring positions, messages in progress) is behind a lock of the object itself.

pub mod cq;
pub mod fast;
pub mod footprint;
pub mod keys;
pub mod mr;
pub mod mw;
pub mod numbers;
pub mod qp;
pub mod slab;
pub mod srq;
pub mod state;
pub mod tables;

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
            Self::Busy => status::EBUSY,
            Self::Invalid => status::EINVAL,
            Self::NotSupported => status::EOPNOTSUPP,
        }
    }
}

impl From<crate::memory::Error> for Error {
    fn from(error: crate::memory::Error) -> Self {
        match error {
            crate::memory::Error::NotGuestMemory(_) => Self::Fault,
            _ => Self::Invalid,
        }
    }
}
