// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
//! Connections as the kernel's connection manager of iWARP (iw_cm) has them.
use super::bindings;
use super::error::{Errno, Result};
use super::rdma::IbDevice;
use core::ptr::NonNull;
use virtio_rdma_spec::iwarp::IwEndpoint;

/// The event of a connection.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A peer wants a connection.
    ConnectRequest,
    /// The answer to a connection that was asked for.
    ConnectReply,
    /// A connection that was accepted is there.
    Established,
    /// It is over.
    Close,
}

/// An event of a connection, or of a listener.
#[derive(Clone, Copy)]
pub(crate) struct CmEvent<'a> {
    pub(crate) kind: Kind,
    pub(crate) status: Result<()>,
    /// Of a request: this end, the other end, and the connection.
    pub(crate) request: Option<(&'a IwEndpoint, &'a IwEndpoint, u32)>,
    /// What the peer takes at a time, and what it has under way: RDMA READs.
    pub(crate) depth: (u16, u16),
    pub(crate) private_data: &'a [u8],
}

impl CmEvent<'_> {
    /// One that says no more than this.
    pub(crate) fn new(kind: Kind, status: Result<()>) -> Self {
        Self {
            kind,
            status,
            request: None,
            depth: (0, 0),
            private_data: &[],
        }
    }
}

/// A reference of a connection, or of a listener, of iw_cm.
pub(crate) struct CmId(NonNull<bindings::iw_cm_id>);

// SAFETY: its functions may be called from any thread.
unsafe impl Send for CmId {}
// SAFETY: as above.
unsafe impl Sync for CmId {}

impl CmId {
    /// Takes a reference.
    ///
    /// # Safety
    /// It must be there.
    pub(crate) unsafe fn new(id: NonNull<bindings::iw_cm_id>) -> Self {
        // SAFETY: the caller's.
        unsafe {
            if let Some(add_ref) = (*id.as_ptr()).add_ref {
                add_ref(id.as_ptr());
            }
        }
        Self(id)
    }

    /// Where it listens, or is from.
    pub(crate) fn local(&self) -> Result<IwEndpoint> {
        // SAFETY: referenced; set before the driver is told of it. There is room for an address.
        endpoint(|addr, port| unsafe {
            bindings::vrdma_address_get(&(*self.0.as_ptr()).local_addr, addr, port)
        })
    }

    /// Where it goes, after what a port mapper says.
    pub(crate) fn remote(&self) -> Result<IwEndpoint> {
        // SAFETY: as above.
        endpoint(|addr, port| unsafe {
            bindings::vrdma_address_get(&(*self.0.as_ptr()).m_remote_addr, addr, port)
        })
    }

    /// Does it listen for one family of addresses only?
    pub(crate) fn one_family(&self) -> bool {
        // SAFETY: as above.
        unsafe { (*self.0.as_ptr()).afonly() }
    }

    /// What the driver has stored there.
    pub(crate) fn data(&self) -> u64 {
        // SAFETY: referenced; the core does not change it.
        unsafe { (*self.0.as_ptr()).provider_data as u64 }
    }

    /// Stores something there.
    pub(crate) fn set_data(&self, data: u64) {
        // SAFETY: referenced; the field is the driver's.
        unsafe { (*self.0.as_ptr()).provider_data = data as *mut core::ffi::c_void }
    }

    /// Tells of an event: the connection manager queues it. An error says that it was not taken.
    pub(crate) fn deliver<D>(&self, ib: IbDevice<D>, event: &CmEvent<'_>) -> Result<()> {
        let id = self.0.as_ptr();
        // SAFETY: plain data for which zero is a value.
        let mut to: bindings::iw_cm_event = unsafe { core::mem::zeroed() };
        to.event = match event.kind {
            Kind::ConnectRequest => bindings::IW_CM_EVENT_CONNECT_REQUEST,
            Kind::ConnectReply => bindings::IW_CM_EVENT_CONNECT_REPLY,
            Kind::Established => bindings::IW_CM_EVENT_ESTABLISHED,
            Kind::Close => bindings::IW_CM_EVENT_CLOSE,
        };
        to.status = super::error::code(event.status);
        // `ird` and `ord` there are those of the peer.
        let narrow = |depth: u16| u8::try_from(depth).unwrap_or(u8::MAX);
        to.ird = narrow(event.depth.0);
        to.ord = narrow(event.depth.1);
        // Of others the connection manager makes no copy.
        if matches!(event.kind, Kind::ConnectRequest | Kind::ConnectReply) {
            to.private_data_len = u8::try_from(event.private_data.len()).unwrap_or(0);
            to.private_data = event.private_data.as_ptr().cast_mut().cast();
        }
        // SAFETY: referenced; places to write to, and addresses of 16 bytes. The handler copies
        // what it keeps.
        unsafe {
            if let Some((local, remote, connection)) = event.request {
                to.provider_data = connection as usize as *mut core::ffi::c_void;
                for (to, from) in [(&mut to.local_addr, local), (&mut to.remote_addr, remote)] {
                    bindings::vrdma_address_set(ib.as_ptr(), to, from.addr.as_ptr(), from.port);
                }
            } else if event.status.is_ok() {
                to.local_addr = (*id).m_local_addr;
                to.remote_addr = (*id).m_remote_addr;
            } else {
                to.local_addr = (*id).local_addr;
                to.remote_addr = (*id).remote_addr;
            }
            let handler = (*id).event_handler.ok_or(Errno::EINVAL)?;
            Errno::check(handler(id, &mut to))
        }
    }
}

impl Drop for CmId {
    fn drop(&mut self) {
        // SAFETY: our reference, given back once.
        unsafe {
            if let Some(rem_ref) = (*self.0.as_ptr()).rem_ref {
                rem_ref(self.0.as_ptr());
            }
        }
    }
}

/// What `get` writes: an address of 16 bytes and a port. If it returns false, the address is of
/// another family than those of IP.
fn endpoint(get: impl FnOnce(*mut u8, *mut u16) -> bool) -> Result<IwEndpoint> {
    let mut to = IwEndpoint::default();
    if get(to.addr.as_mut_ptr(), &mut to.port) {
        Ok(to)
    } else {
        Err(Errno::EAFNOSUPPORT)
    }
}

/// What a connection is asked for, or accepted, with.
pub(crate) struct ConnParam<'a> {
    pub(crate) qpn: u32,
    pub(crate) ord: u32,
    pub(crate) ird: u32,
    pub(crate) private_data: &'a [u8],
}

impl<'a> ConnParam<'a> {
    /// # Safety
    /// The parameters must be there as long as this is used.
    pub(crate) unsafe fn new(from: &'a bindings::iw_cm_conn_param) -> Self {
        Self {
            qpn: from.qpn,
            ord: from.ord,
            ird: from.ird,
            // SAFETY: the caller's; there are that many bytes.
            private_data: unsafe {
                private_data(from.private_data, usize::from(from.private_data_len))
            },
        }
    }
}

/// # Safety
/// Null, or that many bytes as long as this is used.
pub(crate) unsafe fn private_data<'a>(from: *const core::ffi::c_void, length: usize) -> &'a [u8] {
    if from.is_null() {
        return &[];
    }
    // SAFETY: the caller's.
    unsafe { core::slice::from_raw_parts(from.cast(), length) }
}

/// The address of the paired interface that `remote` is answered from: `local`, if it is one. None
/// if the interface has none that fits.
pub(crate) fn local_address<D>(
    ib: IbDevice<D>,
    remote: &IwEndpoint,
    local: [u8; 16],
) -> Option<[u8; 16]> {
    let mut local = local;
    // SAFETY: the device is allocated; addresses of 16 bytes.
    let found = unsafe {
        bindings::vrdma_local_address(ib.as_ptr(), remote.addr.as_ptr(), local.as_mut_ptr())
    };
    found.then_some(local)
}

/// The MAC address of the paired interface.
pub(crate) fn interface_mac<D>(ib: IbDevice<D>) -> Option<[u8; 6]> {
    let mut mac = [0; 6];
    // SAFETY: the device is allocated; room for an address.
    let found = unsafe { bindings::vrdma_netdev_mac(ib.as_ptr(), mac.as_mut_ptr()) };
    found.then_some(mac)
}
