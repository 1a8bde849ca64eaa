// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Control commands as their driver sees them: build the command, parse the response
//! (specification: "Control commands").
use core::fmt;

use virtio_rdma_spec::command::{self as spec, opcode, status, CommandHeader, ResponseHeader};
use virtio_rdma_spec::iwarp;
use virtio_rdma_spec::layout::Layout;

/// A control command: what goes there and what comes back.
pub trait Command {
    /// Its opcode.
    const OPCODE: u16;
    /// Its body.
    type Body: Layout;
    /// The body of its response.
    type Response: Layout;

    /// Length of the command with its header, bytes.
    const COMMAND_LEN: usize = CommandHeader::SIZE + <Self::Body as Layout>::SIZE;
    /// Length of the response with its header, bytes.
    const RESPONSE_LEN: usize = ResponseHeader::SIZE + <Self::Response as Layout>::SIZE;
}

macro_rules! commands {
    ($($name:ident, $opcode:ident, $body:ty, $response:ty;)*) => {$(
        #[doc = concat!("The command ", stringify!($opcode), ".")]
        #[derive(Debug, Clone, Copy)]
        pub enum $name {}

        impl Command for $name {
            const OPCODE: u16 = opcode::$opcode;
            type Body = $body;
            type Response = $response;
        }
    )*

        /// No command is longer, bytes.
        pub const MAX_COMMAND_LEN: usize = max(&[$(<$name as Command>::COMMAND_LEN),*]);
        /// No response is longer, bytes.
        pub const MAX_RESPONSE_LEN: usize = max(&[$(<$name as Command>::RESPONSE_LEN),*]);
    };
}

/// Nothing: the body of commands and responses that have none.
pub type Empty = [u8; 0];

commands! {
    QueryDevice, QUERY_DEVICE, Empty, spec::QueryDeviceResponse;
    QueryPort, QUERY_PORT, spec::QueryPort, spec::QueryPortResponse;
    QueryCounters, QUERY_COUNTERS, spec::QueryPort, spec::QueryCountersResponse;
    SetGid, SET_GID, spec::SetGid, Empty;
    SetPortState, SET_PORT_STATE, spec::SetPortState, Empty;
    SetStatusPage, SET_STATUS_PAGE, spec::SetStatusPage, Empty;
    QueryClock, QUERY_CLOCK, Empty, spec::QueryClockResponse;
    CreateContext, CREATE_CONTEXT, spec::CreateContext, spec::HandleResponse;
    DestroyContext, DESTROY_CONTEXT, spec::Handle, Empty;
    CreatePd, CREATE_PD, Empty, spec::HandleResponse;
    DestroyPd, DESTROY_PD, spec::Handle, Empty;
    CreateXrcd, CREATE_XRCD, Empty, spec::HandleResponse;
    DestroyXrcd, DESTROY_XRCD, spec::Handle, Empty;
    RegMr, REG_MR, spec::RegMr, spec::RegMrResponse;
    DeregMr, DEREG_MR, spec::Handle, Empty;
    ReregMr, REREG_MR, spec::ReregMr, spec::RegMrResponse;
    AllocMr, ALLOC_MR, spec::AllocMr, spec::RegMrResponse;
    AllocMw, ALLOC_MW, spec::AllocMw, spec::HandleResponse;
    DeallocMw, DEALLOC_MW, spec::Handle, Empty;
    CreateCq, CREATE_CQ, spec::CreateCq, spec::HandleResponse;
    DestroyCq, DESTROY_CQ, spec::Handle, Empty;
    ResizeCq, RESIZE_CQ, spec::ResizeCq, spec::HandleResponse;
    ModifyCq, MODIFY_CQ, spec::ModifyCq, Empty;
    CreateQp, CREATE_QP, spec::CreateQp, spec::CreateQpResponse;
    ModifyQp, MODIFY_QP, spec::ModifyQp, Empty;
    QueryQp, QUERY_QP, spec::Handle, spec::QueryQpResponse;
    DestroyQp, DESTROY_QP, spec::Handle, Empty;
    CreateSrq, CREATE_SRQ, spec::CreateSrq, spec::CreateSrqResponse;
    ModifySrq, MODIFY_SRQ, spec::ModifySrq, Empty;
    ResizeSrq, RESIZE_SRQ, spec::ResizeSrq, Empty;
    QuerySrq, QUERY_SRQ, spec::Handle, spec::QuerySrqResponse;
    DestroySrq, DESTROY_SRQ, spec::Handle, Empty;
    AttachMcast, ATTACH_MCAST, spec::Multicast, Empty;
    DetachMcast, DETACH_MCAST, spec::Multicast, Empty;
    IwConnect, IW_CONNECT, iwarp::IwConnect, spec::HandleResponse;
    IwAccept, IW_ACCEPT, iwarp::IwAccept, Empty;
    IwReject, IW_REJECT, iwarp::IwReject, Empty;
    IwListen, IW_LISTEN, iwarp::IwListen, spec::HandleResponse;
    IwDestroyListen, IW_DESTROY_LISTEN, spec::Handle, Empty;
    IwNextEvent, IW_NEXT_EVENT, Empty, iwarp::IwEvent;
}

const fn max(lengths: &[usize]) -> usize {
    let mut max = 0;
    let mut i = 0;
    while i < lengths.len() {
        if lengths[i] > max {
            max = lengths[i];
        }
        i += 1;
    }
    max
}

/// Why a command failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommandError {
    /// The buffer for the command is too small.
    NoSpace,
    /// The response is shorter than it must be.
    Malformed,
    /// The device refused it: `status`, which is an errno and not zero.
    Status(u16),
}

impl fmt::Display for CommandError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::NoSpace => f.write_str("no space for the command"),
            Self::Malformed => f.write_str("malformed response"),
            Self::Status(number) => match status::name(number) {
                Some(name) => f.write_str(name),
                None => write!(f, "unknown status {number}"),
            },
        }
    }
}

impl core::error::Error for CommandError {}

/// Writes a command to the start of `out` and returns its length.
///
/// # Errors
/// [`CommandError::NoSpace`] if `out` is shorter than [`Command::COMMAND_LEN`].
pub fn build<C: Command>(body: &C::Body, out: &mut [u8]) -> Result<usize, CommandError> {
    let out = out.get_mut(..C::COMMAND_LEN).ok_or(CommandError::NoSpace)?;
    let (head, rest) = out.split_at_mut(CommandHeader::SIZE);
    let header = CommandHeader {
        opcode: C::OPCODE,
        length: C::COMMAND_LEN as u32,
        ..CommandHeader::default()
    };
    header.put(head);
    body.put(rest);
    Ok(C::COMMAND_LEN)
}

/// Parses what the device wrote as response: `response` is as long as the used length says, at most
/// the buffer.
///
/// # Errors
/// [`CommandError::Status`] if the command failed, [`CommandError::Malformed`] if the response is
/// too short.
pub fn parse<C: Command>(response: &[u8]) -> Result<C::Response, CommandError> {
    let (head, rest) = response
        .split_first_chunk::<{ ResponseHeader::SIZE }>()
        .ok_or(CommandError::Malformed)?;
    let header = ResponseHeader::from_bytes(head);
    if header.status != status::OK {
        return Err(CommandError::Status(header.status));
    }
    if (header.length as usize) < C::RESPONSE_LEN || response.len() < C::RESPONSE_LEN {
        return Err(CommandError::Malformed);
    }
    Ok(C::Response::get(rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_header_and_body() {
        let mut out = [0xff; MAX_COMMAND_LEN];
        let body = spec::Handle {
            handle: 0x0102_0304,
            reserved: 0,
        };
        assert_eq!(build::<DestroyCq>(&body, &mut out), Ok(16));
        assert_eq!(
            out[..16],
            [0x41, 0, 0, 0, 16, 0, 0, 0, 4, 3, 2, 1, 0, 0, 0, 0]
        );
        assert_eq!(
            build::<DestroyCq>(&body, &mut out[..15]),
            Err(CommandError::NoSpace)
        );
        assert_eq!(build::<CreatePd>(&[], &mut out), Ok(8));
    }

    #[test]
    fn a_response_is_status_and_body() {
        let ok = [0, 0, 0, 0, 16, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(parse::<CreatePd>(&ok).unwrap().handle, 7);
        assert_eq!(
            parse::<CreatePd>(&ok[..15]).unwrap_err(),
            CommandError::Malformed
        );
        assert_eq!(parse::<CreatePd>(&[]).unwrap_err(), CommandError::Malformed);
        let mut short = ok;
        short[4] = 8;
        assert_eq!(
            parse::<CreatePd>(&short).unwrap_err(),
            CommandError::Malformed
        );
        assert_eq!(
            parse::<CreatePd>(&[22, 0, 0, 0, 8, 0, 0, 0]).unwrap_err(),
            CommandError::Status(status::EINVAL)
        );
        assert_eq!(parse::<DestroyPd>(&[0, 0, 0, 0, 8, 0, 0, 0]), Ok([]));
    }

    #[test]
    fn the_longest_command_and_response_are_known() {
        assert_eq!(MAX_COMMAND_LEN, 336);
        assert_eq!(MAX_RESPONSE_LEN, 336);
    }
}
