// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Commands about connections of iWARP.
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use virtio_rdma_spec::command::status;
use virtio_rdma_spec::config::feature;
use virtio_rdma_spec::iwarp::{
    iw_event, IwAccept, IwConnect, IwEvent, IwListen, IwReject, MAX_PRIVATE_DATA,
};
use virtio_rdma_spec::verbs::{qp_state, qp_type};

use super::{encode, handle_response, zero};
use crate::engine::queue_pair::Qp;
use crate::fabric::iwarp::port::{
    address, endpoint, Depths, Port, PrivateData, Request, MOST_BACKLOG,
};
use crate::fabric::iwarp::tcp;
use crate::limits::MAX_RD_ATOMIC;
use crate::rnic::Rnic;
use crate::verbs::Error;

/// The port, if it is one of iWARP and the driver knows that.
fn port(rnic: &Rnic) -> Result<&Arc<Port>, Error> {
    let accepted = rnic.vm().accepted(feature::IWARP);
    rnic.iwarp().filter(|_| accepted).ok_or(Error::NotSupported)
}

fn private(length: u16, data: &[u8; 256]) -> Result<PrivateData, Error> {
    zero(length <= MAX_PRIVATE_DATA)?;
    let data = data.get(..length.into()).ok_or(Error::Invalid)?;
    PrivateData::try_from(data).map_err(|_| Error::Invalid)
}

fn depths(ord: u16, ird: u16) -> Result<Depths, Error> {
    let within = |depth: u16| {
        let depth = u8::try_from(depth).map_err(|_| Error::Invalid);
        depth.map(|depth| depth.min(MAX_RD_ATOMIC))
    };
    Ok(Depths {
        ord: within(ord)?,
        ird: within(ird)?,
    })
}

/// The queue pair of a connection, which must wait for one.
fn queue_pair(rnic: &Rnic, number: u32) -> Result<Arc<Qp>, Error> {
    let tables = rnic.tables();
    let qp = tables.qps.get(number).ok_or(Error::NotFound)?;
    zero(qp.qp_type == qp_type::IWARP && qp.state() == qp_state::INIT)?;
    Ok(qp.clone())
}

/// The address of the host that stands for the one that a driver names for its own.
fn own_address(port: &Port, named: SocketAddr) -> Result<IpAddr, Error> {
    let own = port.settings.address;
    if named.ip().is_ipv4() == own.is_ipv4() || named.ip().is_unspecified() {
        return Ok(own);
    }
    Err(Error::NoSuchAddress)
}

pub(super) fn connect(rnic: &Arc<Rnic>, body: &IwConnect) -> Result<Vec<u8>, Error> {
    let port = port(rnic)?;
    zero(body.reserved == [0; 6])?;
    let private = private(body.private_length, &body.private_data)?;
    let depths = depths(body.ord, body.ird)?;
    let (local, remote) = (address(&body.local)?, address(&body.remote)?);
    zero(!local.ip().is_unspecified() && !remote.ip().is_unspecified() && remote.port() != 0)?;
    let qp = queue_pair(rnic, body.qpn)?;
    let from = own_address(port, local)?;
    let to = port.remote(remote)?;
    let id = port.connect(body.cookie, &qp)?;
    rnic.claim_own_gid();
    match tcp::begin_connect(from, to) {
        Ok(socket) => rnic.ask_iwarp(Request::Connect {
            port: port.clone(),
            id,
            qp,
            socket,
            depths,
            private,
        }),
        Err(error) => {
            let status = match error.kind() {
                ErrorKind::AddrNotAvailable => {
                    port.forget(id);
                    return Err(Error::NoSuchAddress);
                }
                ErrorKind::ConnectionRefused => status::ECONNREFUSED,
                _ => status::EHOSTUNREACH,
            };
            let event = IwEvent {
                kind: iw_event::CONNECT_REPLY,
                status,
                local: endpoint(local),
                remote: endpoint(remote),
                ..IwEvent::default()
            };
            port.tell(id, event);
            port.raise(&rnic.tables());
        }
    }
    Ok(handle_response(id))
}

pub(super) fn accept(rnic: &Arc<Rnic>, body: &IwAccept) -> Result<Vec<u8>, Error> {
    let port = port(rnic)?;
    zero(body.reserved == 0)?;
    let private = private(body.private_length, &body.private_data)?;
    let depths = depths(body.ord, body.ird)?;
    let qp = queue_pair(rnic, body.qpn)?;
    port.accept(body.connection, body.cookie, &qp)?;
    rnic.claim_own_gid();
    rnic.ask_iwarp(Request::Accept {
        port: port.clone(),
        id: body.connection,
        qp,
        depths,
        private,
    });
    Ok(Vec::new())
}

pub(super) fn reject(rnic: &Arc<Rnic>, body: &IwReject) -> Result<Vec<u8>, Error> {
    let port = port(rnic)?;
    zero(body.reserved == 0)?;
    let private = private(body.private_length, &body.private_data)?;
    port.reject(body.connection)?;
    rnic.ask_iwarp(Request::Reject {
        port: port.clone(),
        id: body.connection,
        private,
    });
    Ok(Vec::new())
}

pub(super) fn listen(rnic: &Arc<Rnic>, body: &IwListen) -> Result<Vec<u8>, Error> {
    let port = port(rnic)?;
    zero(body.reserved == 0)?;
    let local = address(&body.local)?;
    zero(local.port() != 0)?;
    let at = SocketAddr::new(own_address(port, local)?, local.port());
    let backlog = body.backlog.clamp(1, MOST_BACKLOG);
    // The port counts those that wait for the driver; in the kernel they wait for the worker.
    let other_family = local.ip().is_ipv4() != at.ip().is_ipv4();
    let socket = match tcp::listen(at, MOST_BACKLOG) {
        Ok(socket) => Some(Arc::new(socket)),
        Err(error) => match error.kind() {
            // Who listens everywhere may do so for each family by itself. The port has one.
            ErrorKind::AddrInUse if other_family && port.listens_at(local.port()) => None,
            ErrorKind::AddrInUse => return Err(Error::AddressInUse),
            ErrorKind::AddrNotAvailable => return Err(Error::NoSuchAddress),
            ErrorKind::PermissionDenied => return Err(Error::NotAllowed),
            _ => return Err(Error::NoMemory),
        },
    };
    let listener = port.listen(body.cookie, local.port(), backlog, socket.clone())?;
    if let Some(socket) = socket {
        rnic.ask_iwarp(Request::Listen {
            port: port.clone(),
            listener,
            socket,
        });
    }
    Ok(handle_response(listener))
}

pub(super) fn destroy_listen(rnic: &Arc<Rnic>, listener: u32) -> Result<Vec<u8>, Error> {
    let port = port(rnic)?;
    let heir = port.destroy_listen(listener)?;
    rnic.ask_iwarp(Request::DestroyListen {
        port: port.clone(),
        listener,
        heir,
    });
    Ok(Vec::new())
}

pub(super) fn next_event(rnic: &Arc<Rnic>) -> Result<Vec<u8>, Error> {
    Ok(encode(port(rnic)?.next_event().to_bytes()))
}
