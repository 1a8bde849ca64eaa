// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
//! Errors are errno values.
use core::ffi::c_int;
use virtio_rdma_spec::command::status;

/// An errno value (positive inside, negative towards the kernel).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Errno(u16);

/// What almost everything here returns.
pub(crate) type Result<T> = core::result::Result<T, Errno>;

impl Errno {
    pub(crate) const EPERM: Self = Self(status::EPERM);
    pub(crate) const EIO: Self = Self(5);
    pub(crate) const ENOENT: Self = Self(status::ENOENT);
    pub(crate) const ENOMEM: Self = Self(status::ENOMEM);
    pub(crate) const EBUSY: Self = Self(status::EBUSY);
    pub(crate) const ENODEV: Self = Self(19);
    pub(crate) const EINVAL: Self = Self(status::EINVAL);
    pub(crate) const EAFNOSUPPORT: Self = Self(97);
    pub(crate) const ENETDOWN: Self = Self(100);
    pub(crate) const ECONNRESET: Self = Self(status::ECONNRESET);
    pub(crate) const EOPNOTSUPP: Self = Self(status::EOPNOTSUPP);

    /// The error that the kernel returned as a negative number.
    pub(crate) fn from_kernel(code: c_int) -> Self {
        match u16::try_from(code.wrapping_neg()) {
            Ok(code @ 1..=4095) => Self(code),
            _ => Self::EIO,
        }
    }

    /// `Ok` for a return value of zero or more.
    pub(crate) fn check(code: c_int) -> Result<()> {
        if code < 0 {
            Err(Self::from_kernel(code))
        } else {
            Ok(())
        }
    }

    /// The status of a response; one that the specification does not know is an I/O error.
    pub(crate) fn check_status(value: u16) -> Result<()> {
        if value == status::OK {
            Ok(())
        } else if status::name(value).is_some() {
            Err(Self(value))
        } else {
            Err(Self::EIO)
        }
    }

    /// As the kernel wants it: negative.
    pub(crate) fn code(self) -> c_int {
        -c_int::from(self.0)
    }

    /// As a number, to keep it in an atomic.
    pub(crate) fn number(self) -> u32 {
        u32::from(self.0)
    }

    /// What [`Self::number`] returned.
    pub(crate) fn from_number(number: u32) -> Self {
        u16::try_from(number).map_or(Self::EIO, Self)
    }
}

/// Turns a result into the kernel's return value.
pub(crate) fn code(result: Result<()>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(error) => error.code(),
    }
}
