// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Commands and events about connections of iWARP (specification: "Connections of iWARP").
use crate::{constants, layouts};

/// Private data that a message of connection management has at most, bytes.
pub const MAX_PRIVATE_DATA: u16 = 255;

layouts! {
    /// One end of a connection of iWARP.
    pub struct IwEndpoint(24) {
        /// Its address: one of IPv6, or one of IPv4 mapped to that.
        0 => addr: [u8; 16],
        /// TCP port, as a number.
        16 => port: u16,
        /// Reserved, zero.
        18 => reserved: [u8; 6],
    }

    /// Body of IW_CONNECT; the response has a `HandleResponse`.
    pub struct IwConnect(328) {
        /// Stands for the connection in its events.
        0 => cookie: u64,
        /// Where it is from.
        8 => local: IwEndpoint,
        /// Where it goes.
        32 => remote: IwEndpoint,
        /// Queue pair.
        56 => qpn: u32,
        /// RDMA READs and atomic operations under way from here, at most.
        60 => ord: u16,
        /// The same from the peer.
        62 => ird: u16,
        /// Length of `private_data`.
        64 => private_length: u16,
        /// Reserved, zero.
        66 => reserved: [u8; 6],
        /// What the peer's driver gets with the request.
        72 => private_data: [u8; 256],
    }

    /// Body of IW_ACCEPT; the response has none.
    pub struct IwAccept(280) {
        /// Stands for the connection in its events from now on.
        0 => cookie: u64,
        /// Connection.
        8 => connection: u32,
        /// Queue pair.
        12 => qpn: u32,
        /// As in `IwConnect`.
        16 => ord: u16,
        /// As in `IwConnect`.
        18 => ird: u16,
        /// Length of `private_data`.
        20 => private_length: u16,
        /// Reserved, zero.
        22 => reserved: u16,
        /// What the peer's driver gets with the reply.
        24 => private_data: [u8; 256],
    }

    /// Body of IW_REJECT; the response has none.
    pub struct IwReject(264) {
        /// Connection.
        0 => connection: u32,
        /// Length of `private_data`.
        4 => private_length: u16,
        /// Reserved, zero.
        6 => reserved: u16,
        /// What the peer's driver gets with the reply.
        8 => private_data: [u8; 256],
    }

    /// Body of IW_LISTEN; the response has a `HandleResponse`.
    pub struct IwListen(40) {
        /// Stands for the listener in its events.
        0 => cookie: u64,
        /// Where it listens; all zero but for the port: everywhere.
        8 => local: IwEndpoint,
        /// Connections that may wait to be accepted, at most.
        32 => backlog: u32,
        /// Reserved, zero.
        36 => reserved: u32,
    }

    /// Body of the response of IW_NEXT_EVENT.
    pub struct IwEvent(328) {
        /// `cookie` of the connection; of CONNECT_REQUEST, that of the listener.
        0 => cookie: u64,
        /// Connection.
        8 => connection: u32,
        /// `iw_event`.
        12 => kind: u16,
        /// `status`: how it went.
        14 => status: u16,
        /// This end.
        16 => local: IwEndpoint,
        /// The other end.
        40 => remote: IwEndpoint,
        /// RDMA READs and atomic operations that the peer can take at a time.
        64 => ord: u16,
        /// The same that the peer will have under way.
        66 => ird: u16,
        /// Length of `private_data`.
        68 => private_length: u16,
        /// Reserved, zero.
        70 => reserved: u16,
        /// What the peer's driver gave.
        72 => private_data: [u8; 256],
    }
}

constants! {
    /// Events of connections of iWARP.
    pub mod iw_event: u16 {
        /// There is none.
        NONE = 0,
        /// A peer wants a connection.
        CONNECT_REQUEST = 1,
        /// The answer to IW_CONNECT.
        CONNECT_REPLY = 2,
        /// The connection that was accepted is there.
        ESTABLISHED = 3,
        /// The connection is over, and the device has forgotten it.
        CLOSE = 5,
    }
}
