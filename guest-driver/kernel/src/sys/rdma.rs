// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
//! What the RDMA core offers to drivers: the device, user memory, driver data of commands,
//! mappings, events.
use super::alloc::{Arc, Array, Box};
use super::bindings;
use super::dma::{DmaDevice, DmaPage};
use super::error::{Errno, Result};
use core::ffi::{c_int, c_void};
use core::ptr::NonNull;
use virtio_rdma_spec::PAGE_SIZE;

pub(crate) use super::bindings::{ib_device_attr as DeviceAttr, ib_port_attr as PortAttr};

/// Capability flags of the device.
pub(crate) mod device_cap {
    use super::bindings;
    pub(crate) const RC_RNR_NAK_GEN: u64 = bindings::IB_DEVICE_RC_RNR_NAK_GEN as u64;
    pub(crate) const SYS_IMAGE_GUID: u64 = bindings::IB_DEVICE_SYS_IMAGE_GUID as u64;
    pub(crate) const PORT_ACTIVE_EVENT: u64 = bindings::IB_DEVICE_PORT_ACTIVE_EVENT as u64;
    pub(crate) const CURR_QP_STATE_MOD: u64 = bindings::IB_DEVICE_CURR_QP_STATE_MOD as u64;
    pub(crate) const BAD_QKEY_CNTR: u64 = bindings::IB_DEVICE_BAD_QKEY_CNTR as u64;
    pub(crate) const SRQ_RESIZE: u64 = bindings::IB_DEVICE_SRQ_RESIZE as u64;
    pub(crate) const XRC: u64 = bindings::IB_DEVICE_XRC as u64;
    pub(crate) const MEM_MGT_EXTENSIONS: u64 = bindings::IB_DEVICE_MEM_MGT_EXTENSIONS as u64;
    pub(crate) const MEM_WINDOW: u64 = bindings::IB_DEVICE_MEM_WINDOW as u64;
    pub(crate) const MEM_WINDOW_TYPE_2B: u64 = bindings::IB_DEVICE_MEM_WINDOW_TYPE_2B as u64;
    pub(crate) const ATOMIC_WRITE: u64 = bindings::IB_DEVICE_ATOMIC_WRITE as u64;
    pub(crate) const FLUSH_GLOBAL: u64 = bindings::IB_DEVICE_FLUSH_GLOBAL as u64;
}

/// Capability for users in the kernel: regions of pieces of any address and length.
pub(crate) const SG_GAPS_REG: u64 = bindings::IBK_SG_GAPS_REG as u64;
/// Capability flag of the port: the communication manager works on it.
pub(crate) const PORT_CM_SUP: u32 = bindings::IB_PORT_CM_SUP;
/// Access flags that may be ignored by a driver that does not know them.
pub(crate) const ACCESS_OPTIONAL: u32 = bindings::IB_ACCESS_OPTIONAL;
/// No atomic operations.
pub(crate) const ATOMIC_NONE: bindings::ib_atomic_cap = bindings::IB_ATOMIC_NONE;

/// Atomic operations are atomic for everybody who accesses the memory.
pub(crate) const ATOMIC_GLOB: bindings::ib_atomic_cap = bindings::IB_ATOMIC_GLOB;
/// Flag of a completion queue: completions have time stamps.
pub(crate) const CQ_TIMESTAMPS: u32 = bindings::VRDMA_CQ_TIMESTAMPS;

/// The `ib_device` with the driver's device behind it.
#[repr(C)]
pub(crate) struct DeviceObject<D> {
    pub(crate) ib: bindings::ib_device,
    pub(crate) device: core::mem::MaybeUninit<D>,
}

/// The operations of a device, as the core wants them.
pub(crate) struct DeviceOps(pub(crate) bindings::ib_device_ops);

/// A handle of the `ib_device`; valid as long as the driver is bound.
pub(crate) struct IbDevice<D>(NonNull<DeviceObject<D>>);

// SAFETY: a handle; what is done with it is safe from any thread.
unsafe impl<D: Sync> Send for IbDevice<D> {}
// SAFETY: as above.
unsafe impl<D: Sync> Sync for IbDevice<D> {}

impl<D> Clone for IbDevice<D> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<D> Copy for IbDevice<D> {}

impl<D> IbDevice<D> {
    /// # Safety
    /// The object must have been allocated by the core with this size, and live as long as this is
    /// used.
    pub(crate) unsafe fn new(object: NonNull<DeviceObject<D>>) -> Self {
        Self(object)
    }

    pub(crate) fn as_ptr(self) -> *mut bindings::ib_device {
        self.0.as_ptr().cast()
    }

    /// # Safety
    /// The device must be in place.
    pub(crate) unsafe fn device<'a>(self) -> &'a D {
        // SAFETY: the caller says that it is initialized; it is only shared, until it is dropped.
        unsafe { (*self.0.as_ptr()).device.assume_init_ref() }
    }

    /// Before it is known: it is a device of iWARP.
    pub(crate) fn set_iwarp(self) {
        let ib = self.as_ptr();
        // SAFETY: allocated and not registered yet, so nobody else looks at it.
        unsafe {
            (*ib).node_type = bindings::RDMA_NODE_RNIC as u8;
            bindings::vrdma_iwarp_setup(ib);
        }
    }

    /// Makes the device known: one port, with this GUID and as many completion vectors.
    pub(crate) fn register(
        self,
        dma: DmaDevice,
        node_guid: u64,
        comp_vectors: u16,
        ops: &DeviceOps,
    ) -> Result<()> {
        let ib = self.as_ptr();
        // SAFETY: allocated and not registered yet, so nobody else looks at it.
        unsafe {
            (*ib).node_guid = node_guid.to_be();
            (*ib).num_comp_vectors = c_int::from(comp_vectors);
            bindings::ib_set_device_ops(ib, &ops.0);
            Errno::check(bindings::ib_register_device(
                ib,
                c"vrdma%d".as_ptr(),
                dma.0.as_ptr(),
            ))
        }
    }

    /// Makes it unknown again: destroys what user space has of it. May sleep.
    pub(crate) fn unregister(self) {
        // SAFETY: registered (its caller keeps track).
        unsafe { bindings::ib_unregister_device(self.as_ptr()) }
    }

    /// Makes the GID table of the port follow the paired network interface. May sleep; not with the
    /// RTNL held.
    pub(crate) fn rescan_gids(self) {
        // SAFETY: registered.
        unsafe { bindings::rdma_roce_rescan_device(self.as_ptr()) }
    }

    /// Makes the core ask again for the GID of a port of iWARP, and pair it with the interface. Any
    /// context.
    pub(crate) fn renew_gid(self) {
        self.dispatch(bindings::IB_EVENT_GID_CHANGE as u16);
    }

    /// Empties the GID table: new connections do not find the device. May sleep; not with the RTNL
    /// held.
    pub(crate) fn delete_gids(self) {
        // SAFETY: registered.
        unsafe { bindings::vrdma_delete_gids(self.as_ptr()) }
    }

    /// Dispatches an event of the device or its port.
    pub(crate) fn dispatch(self, event_type: u16) {
        let event = bindings::ib_event {
            device: self.as_ptr(),
            element: bindings::ib_event__bindgen_ty_1 { port_num: 1 },
            event: bindings::ib_event_type::from(event_type),
        };
        // SAFETY: registered; the event is copied.
        unsafe { bindings::ib_dispatch_event(&event) }
    }
}

/// A completion queue of the core.
pub(crate) struct CqHandle(NonNull<bindings::ib_cq>);

/// A queue pair of the core.
pub(crate) struct QpHandle(NonNull<bindings::ib_qp>);

/// A shared receive queue of the core.
pub(crate) struct SrqHandle(NonNull<bindings::ib_srq>);

// SAFETY: the core's structures may be used from any thread, as long as they are there.
unsafe impl Send for CqHandle {}
// SAFETY: as above.
unsafe impl Sync for CqHandle {}
// SAFETY: as above.
unsafe impl Send for QpHandle {}
// SAFETY: as above.
unsafe impl Sync for QpHandle {}
// SAFETY: as above.
unsafe impl Send for SrqHandle {}
// SAFETY: as above.
unsafe impl Sync for SrqHandle {}

/// Calls the handler of asynchronous events of an object, which its user set at creation.
macro_rules! raise {
    ($object:expr, $element:ident, $context:ident, $event_type:expr) => {{
        let object = $object.as_ptr();
        // SAFETY: the object is there (new).
        unsafe {
            let mut event = bindings::ib_event {
                device: (*object).device,
                element: bindings::ib_event__bindgen_ty_1 { $element: object },
                event: bindings::ib_event_type::from($event_type),
            };
            if let Some(handler) = (*object).event_handler {
                handler(&mut event, (*object).$context);
            }
        }
    }};
}

impl CqHandle {
    /// # Safety
    /// The queue must be there as long as this is used.
    pub(crate) unsafe fn new(cq: NonNull<bindings::ib_cq>) -> Self {
        Self(cq)
    }

    /// Tells its user that there is a completion. Any context.
    pub(crate) fn complete(&self) {
        let cq = self.0.as_ptr();
        // SAFETY: the queue is there (new); the handler is set by its user at creation.
        unsafe {
            if let Some(handler) = (*cq).comp_handler {
                handler(cq, (*cq).cq_context);
            }
        }
    }

    /// Takes back what an event had the core do for a user in the kernel: poll the queue. Process
    /// context, for a queue of the kernel whose user is not told of events any longer.
    pub(crate) fn cancel_polling(&self) {
        // SAFETY: the queue is there (new).
        unsafe { bindings::vrdma_cq_cancel_polling(self.0.as_ptr()) }
    }

    /// Tells its user of an asynchronous event. Process context.
    pub(crate) fn event(&self, event_type: u16) {
        raise!(self.0, cq, cq_context, event_type);
    }
}

impl QpHandle {
    /// # Safety
    /// The queue pair must be there as long as this is used.
    pub(crate) unsafe fn new(qp: NonNull<bindings::ib_qp>) -> Self {
        Self(qp)
    }

    pub(crate) fn as_ptr(&self) -> *mut bindings::ib_qp {
        self.0.as_ptr()
    }

    /// Does it take its receives from a shared queue?
    pub(crate) fn has_srq(&self) -> bool {
        // SAFETY: the queue pair is there (new); the field is set at its creation.
        unsafe { !(*self.0.as_ptr()).srq.is_null() }
    }

    /// Tells its user of an asynchronous event. Process context.
    pub(crate) fn event(&self, event_type: u16) {
        raise!(self.0, qp, qp_context, event_type);
    }
}

impl SrqHandle {
    /// # Safety
    /// The queue must be there as long as this is used.
    pub(crate) unsafe fn new(srq: NonNull<bindings::ib_srq>) -> Self {
        Self(srq)
    }

    /// Tells its user of an asynchronous event. Process context.
    pub(crate) fn event(&self, event_type: u16) {
        raise!(self.0, srq, srq_context, event_type);
    }
}

/// The driver data of a command: what the provider sent, and room for an answer. None for commands
/// of the kernel.
#[derive(Clone, Copy)]
pub(crate) struct Udata<'a>(*mut bindings::ib_udata, core::marker::PhantomData<&'a ()>);

impl Udata<'_> {
    /// # Safety
    /// Null, or what the core gave for the command under way.
    pub(crate) unsafe fn new(udata: *mut bindings::ib_udata) -> Self {
        Self(udata, core::marker::PhantomData)
    }

    /// That of a command of the kernel: there is none.
    pub(crate) fn none_of_kernel() -> Self {
        Self(core::ptr::null_mut(), core::marker::PhantomData)
    }

    /// Does the command come from user space?
    pub(crate) fn is_user(&self) -> bool {
        !self.0.is_null()
    }

    /// What the provider sent. Missing bytes are zero; ones that we do not know must be zero.
    pub(crate) fn read<const N: usize>(&self) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        // SAFETY: valid or null (new), and there is room for N bytes.
        Errno::check(unsafe { bindings::vrdma_udata_read(self.0, bytes.as_mut_ptr().cast(), N) })?;
        Ok(bytes)
    }

    /// The answer, cut to the room there is.
    pub(crate) fn write(&self, bytes: &[u8]) -> Result<()> {
        // SAFETY: valid or null (new).
        Errno::check(unsafe {
            bindings::vrdma_udata_write(self.0, bytes.as_ptr().cast(), bytes.len())
        })
    }

    /// For commands without driver data: nothing is expected, nothing answered.
    pub(crate) fn none(&self) -> Result<()> {
        self.read::<0>()?;
        self.write(&[])
    }

    /// The context that the command is in, if it comes from user space.
    pub(crate) fn context(&self) -> Result<NonNull<bindings::ib_ucontext>> {
        if self.0.is_null() {
            return Err(Errno::EOPNOTSUPP);
        }
        // SAFETY: valid (new).
        let context = unsafe { bindings::vrdma_udata_context(self.0) };
        NonNull::new(context).ok_or(Errno::EINVAL)
    }
}

/// Where the buffer of a completion queue comes from: newer cores have attributes for it.
#[derive(Clone, Copy)]
pub(crate) struct CqBuffer(pub(crate) *mut bindings::uverbs_attr_bundle);

/// A list of memory that is mapped for the device.
pub(crate) struct SgList<'a> {
    first: *mut bindings::scatterlist,
    entries: c_int,
    lifetime: core::marker::PhantomData<&'a ()>,
}

impl SgList<'_> {
    /// # Safety
    /// There must be that many entries, mapped for DMA, as long as this is used.
    pub(crate) unsafe fn new(first: *mut bindings::scatterlist, entries: c_int) -> Self {
        Self {
            first,
            entries,
            lifetime: core::marker::PhantomData,
        }
    }

    /// Calls `each` with address and length of every entry, until it returns false.
    pub(crate) fn for_each<F: FnMut(u64, u32) -> bool>(&self, mut each: F) {
        unsafe extern "C" fn call<F: FnMut(u64, u32) -> bool>(
            each: *mut c_void,
            addr: u64,
            length: u32,
        ) -> bool {
            // SAFETY: the closure below, which nobody else uses meanwhile.
            let each = unsafe { &mut *each.cast::<F>() };
            each(addr, length)
        }
        // SAFETY: valid (new); the closure lives until the call returns.
        unsafe {
            bindings::vrdma_sg_for_each(
                self.first,
                self.entries,
                Some(call::<F>),
                (&raw mut each).cast(),
            );
        }
    }
}

/// Pinned memory of a process, mapped for the device.
pub(crate) struct Umem(NonNull<bindings::ib_umem>);

// SAFETY: owned; release may be called from any thread.
unsafe impl Send for Umem {}
// SAFETY: shared use is read-only.
unsafe impl Sync for Umem {}

impl Umem {
    /// Pins `length` bytes at `addr` of the current process, for this (verbs) access.
    pub(crate) fn new<D>(ib: IbDevice<D>, addr: u64, length: u64, access: u32) -> Result<Self> {
        let length = usize::try_from(length).map_err(|_| Errno::EINVAL)?;
        // SAFETY: the device is registered.
        Self::check(unsafe { bindings::vrdma_umem_get(ib.as_ptr(), addr, length, access as c_int) })
    }

    /// Pins the buffer of a completion queue, by default at `addr`.
    pub(crate) fn new_cq<D>(
        ib: IbDevice<D>,
        from: CqBuffer,
        addr: u64,
        length: u64,
        access: u32,
    ) -> Result<Self> {
        let length = usize::try_from(length).map_err(|_| Errno::EINVAL)?;
        // SAFETY: the device is registered; the attributes are those of the command under way.
        Self::check(unsafe {
            bindings::vrdma_umem_get_cq(ib.as_ptr(), from.0, addr, length, access as c_int)
        })
    }

    fn check(umem: *mut bindings::ib_umem) -> Result<Self> {
        let code = umem as isize;
        if (-4095..0).contains(&code) {
            return Err(Errno::from_kernel(code as c_int));
        }
        NonNull::new(umem).map(Self).ok_or(Errno::EINVAL)
    }

    /// The largest of the page sizes in `sizes` (bit n: 2^n bytes) in which the memory can be
    /// described, if addresses in it keep their offset in a page from `virt`; zero if none is.
    pub(crate) fn best_page_size(&self, sizes: u64, virt: u64) -> u64 {
        // SAFETY: valid.
        unsafe { bindings::ib_umem_find_best_pgsz(self.0.as_ptr(), sizes, virt) }
    }

    /// How many pages of this size (4 KiB, or from [`Self::best_page_size`]) describe the memory.
    pub(crate) fn pages(&self, page_size: u64) -> usize {
        // SAFETY: valid.
        unsafe { bindings::vrdma_umem_blocks(self.0.as_ptr(), page_size) }
    }

    /// Calls `each` with the device's address of every page of this size, in order.
    pub(crate) fn for_each<F: FnMut(u64) -> Result<()>>(
        &self,
        page_size: u64,
        mut each: F,
    ) -> Result<()> {
        unsafe extern "C" fn call<F: FnMut(u64) -> Result<()>>(
            each: *mut c_void,
            addr: u64,
        ) -> c_int {
            // SAFETY: the closure below, which nobody else uses meanwhile.
            let each = unsafe { &mut *each.cast::<F>() };
            super::error::code(each(addr))
        }
        // SAFETY: valid; the closure lives until the call returns.
        Errno::check(unsafe {
            bindings::vrdma_umem_for_each(
                self.0.as_ptr(),
                page_size,
                Some(call::<F>),
                (&raw mut each).cast(),
            )
        })
    }
}

impl Drop for Umem {
    fn drop(&mut self) {
        // SAFETY: owned; the device has no access any longer (the command that ends it came back).
        unsafe { bindings::ib_umem_release(self.0.as_ptr()) }
    }
}

/// A context under creation or in use.
#[derive(Clone, Copy)]
pub(crate) struct UserContext(pub(crate) NonNull<bindings::ib_ucontext>);

/// What a mapping shows.
enum Mapped {
    /// Pages of memory.
    Pages {
        pages: Array<*mut c_void>,
        read_only: bool,
        /// Keeps them, where the context does not.
        _owner: Option<Arc<Array<DmaPage>>>,
    },
    /// Device memory.
    Io { addr: u64, length: usize },
}

#[repr(C)]
struct MmapObject {
    entry: bindings::rdma_user_mmap_entry,
    mapped: Mapped,
}

/// Something that a process may map; its offset for mmap is what names it. Gone with this, though
/// mappings that exist stay until the process unmaps them.
pub(crate) struct MmapEntry(NonNull<MmapObject>);

// SAFETY: the core's functions on it may be called from any thread.
unsafe impl Send for MmapEntry {}
// SAFETY: as above.
unsafe impl Sync for MmapEntry {}

impl MmapEntry {
    /// Pages of memory; they must live as long as the context.
    pub(crate) fn pages(context: UserContext, pages: &[DmaPage], read_only: bool) -> Result<Self> {
        Self::of_pages(context, pages, read_only, None)
    }

    /// Pages of memory that may go before the context does; read and write.
    pub(crate) fn shared_pages(context: UserContext, pages: &Arc<Array<DmaPage>>) -> Result<Self> {
        Self::of_pages(context, pages, false, Some(pages.clone()))
    }

    fn of_pages(
        context: UserContext,
        pages: &[DmaPage],
        read_only: bool,
        owner: Option<Arc<Array<DmaPage>>>,
    ) -> Result<Self> {
        let list = Array::new(pages.len(), |i| {
            pages.get(i).map(DmaPage::memory).ok_or(Errno::EINVAL)
        })?;
        let length = pages.len().saturating_mul(PAGE_SIZE as usize);
        let mapped = Mapped::Pages {
            pages: list,
            read_only,
            _owner: owner,
        };
        Self::new(context, mapped, length)
    }

    /// Device memory at a physical address.
    pub(crate) fn io(context: UserContext, addr: u64, length: usize) -> Result<Self> {
        Self::new(context, Mapped::Io { addr, length }, length)
    }

    fn new(context: UserContext, mapped: Mapped, length: usize) -> Result<Self> {
        let object = Box::new(MmapObject {
            // SAFETY: plain data for which zero is the initial value.
            entry: unsafe { core::mem::zeroed() },
            mapped,
        })?;
        // SAFETY: the context is being created or in use; the entry is not inserted yet.
        Errno::check(unsafe {
            bindings::rdma_user_mmap_entry_insert(
                context.0.as_ptr(),
                object.as_ptr().cast(),
                length,
            )
        })?;
        // From here on the core owns it, until `free_mapping`.
        NonNull::new(object.into_raw())
            .map(Self)
            .ok_or(Errno::ENOMEM)
    }

    /// The offset for mmap on the command file.
    pub(crate) fn offset(&self) -> u64 {
        // SAFETY: inserted, and not removed before drop.
        unsafe { self.0.as_ref() }
            .entry
            .start_pgoff
            .wrapping_mul(PAGE_SIZE)
    }
}

impl Drop for MmapEntry {
    fn drop(&mut self) {
        // SAFETY: inserted once, removed once.
        unsafe { bindings::rdma_user_mmap_entry_remove(self.0.as_ptr().cast()) }
    }
}

/// `mmap` of the command file.
///
/// # Safety
/// As called by the core.
pub(crate) unsafe extern "C" fn map(
    context: *mut bindings::ib_ucontext,
    vma: *mut bindings::vm_area_struct,
) -> c_int {
    // SAFETY: the arguments are the core's. An entry that it finds is one of ours, and stays until
    // it is put.
    unsafe {
        let entry = bindings::rdma_user_mmap_entry_get(context, vma);
        let Some(object) = NonNull::new(entry.cast::<MmapObject>()) else {
            return Errno::EINVAL.code();
        };
        let code = match &object.as_ref().mapped {
            Mapped::Pages {
                pages, read_only, ..
            } => bindings::vrdma_mmap_pages(vma, pages.as_ptr(), pages.len(), *read_only),
            Mapped::Io { addr, length } => {
                bindings::vrdma_mmap_io(context, vma, *addr, *length, entry)
            }
        };
        bindings::rdma_user_mmap_entry_put(entry);
        code
    }
}

/// The last user of a mapping has gone.
///
/// # Safety
/// As called by the core.
pub(crate) unsafe extern "C" fn free_mapping(entry: *mut bindings::rdma_user_mmap_entry) {
    if let Some(object) = NonNull::new(entry.cast::<MmapObject>()) {
        // SAFETY: the entry was made by MmapEntry::new, and the core uses it no more.
        drop(unsafe { Box::from_raw(object) });
    }
}
