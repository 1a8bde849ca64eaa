// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
//! Memory regions.
use super::{FastMr, Pd};
use crate::device::Device;
use crate::pages::PageTree;
use crate::sys::error::{Errno, Result};
use crate::sys::rdma::{Umem, ACCESS_OPTIONAL};
use crate::sys::sync::Locked;
use virtio_rdma_spec::command::{opcode, rereg_flag, RegMr, RegMrResponse, ReregMr};
use virtio_rdma_spec::verbs::access;

/// A memory region.
pub(crate) enum Mr {
    /// Registered by a command.
    Plain(Locked<Region>),
    /// Registered by work requests.
    Fast(FastMr),
}

/// A region that a command registered.
pub(crate) struct Region {
    lkey: u32,
    rkey: u32,
    /// None for regions of all memory and of device memory.
    user: Option<UserMemory>,
}

/// Memory of a process, pinned.
pub(super) struct UserMemory {
    place: UserRange,
    access: u32,
    /// Pinned for writing.
    writable: bool,
    /// How it was described to the device: pages, and log2 of their size.
    pages: (u32, u32),
    umem: Umem,
}

/// Where a region is.
#[derive(Clone, Copy)]
pub(crate) struct UserRange {
    /// Address in the current process.
    pub(crate) start: u64,
    /// Bytes.
    pub(crate) length: u64,
    /// What work requests call the first byte.
    pub(crate) virt: u64,
}

/// Pages as the device is told of them.
struct Described {
    tree: PageTree,
    /// Offset of the first byte in the first page. It need not be that of the address that work
    /// requests use.
    offset: u64,
}

impl UserMemory {
    fn pin(device: &Device, place: UserRange, access: u32) -> Result<Self> {
        if place.length == 0 {
            return Err(Errno::EINVAL);
        }
        Ok(Self {
            place,
            access,
            writable: needs_writing(access),
            pages: (0, 0),
            umem: Umem::new(device.ib(), place.start, place.length, access)?,
        })
    }

    fn describe(&mut self, device: &Device) -> Result<Described> {
        /// Page sizes that a page list can have: 2^12 to 2^31.
        const SIZES: u64 = 0xffff_f000;
        let (start, sizes) = (self.place.start, device.limits().page_size_cap & SIZES);
        let page_size = self.umem.best_page_size(sizes, start);
        if !page_size.is_power_of_two() {
            return Err(Errno::EINVAL);
        }
        let tree = PageTree::of_umem(device.dma(), &self.umem, page_size)?;
        let list = tree.list();
        self.pages = (list.count, u32::from(list.page_shift));
        Ok(Described {
            tree,
            offset: start & page_size.wrapping_sub(1),
        })
    }
}

/// Must memory that grants this be pinned for writing?
fn needs_writing(access: u32) -> bool {
    const WRITING: u32 =
        access::LOCAL_WRITE | access::REMOTE_WRITE | access::REMOTE_ATOMIC | access::MW_BIND;
    access & WRITING != 0
}

impl Mr {
    /// Local and remote key.
    pub(crate) fn keys(&self) -> (u32, u32) {
        match self {
            Self::Plain(region) => region.with(|region| (region.lkey, region.rkey)),
            Self::Fast(fast) => (fast.lkey(), fast.lkey()),
        }
    }

    /// Pages of pinned memory, and log2 of their size.
    pub(crate) fn pages(&self) -> Option<(u32, u32)> {
        match self {
            Self::Plain(region) => {
                region.with(|region| region.user.as_ref().map(|user| user.pages))
            }
            Self::Fast(_) => None,
        }
    }

    /// The region, if it is for fast registration.
    pub(crate) fn fast(&self) -> Option<&FastMr> {
        match self {
            Self::Plain(_) => None,
            Self::Fast(fast) => Some(fast),
        }
    }

    /// Access flags from the core, as the device may know them: optional ones that it cannot are
    /// left out. All memory is not for processes.
    pub(crate) fn known_access(flags: u32) -> Result<u32> {
        const KNOWN: u32 = access::RELAXED_ORDERING | !ACCESS_OPTIONAL;
        if flags & access::PHYSICAL != 0 {
            return Err(Errno::EINVAL);
        }
        if flags & access::ON_DEMAND != 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        Ok(flags & KNOWN)
    }

    /// Registers what `body` describes.
    pub(super) fn register(
        device: &Device,
        body: &RegMr,
        user: Option<UserMemory>,
    ) -> Result<Self> {
        let region = Locked::new(Region {
            lkey: 0,
            rkey: 0,
            user,
        })?;
        let RegMrResponse { lkey, rkey } = device.command(opcode::REG_MR, body)?;
        region.with(|region| (region.lkey, region.rkey) = (lkey, rkey));
        Ok(Self::Plain(region))
    }
}

/// Registers memory of the current process.
pub(crate) fn reg_mr(device: &Device, pd: &Pd, place: UserRange, access: u32) -> Result<Mr> {
    let access = Mr::known_access(access)?;
    let mut memory = UserMemory::pin(device, place, access)?;
    let Described { tree, offset } = memory.describe(device)?;
    let body = RegMr {
        pd: pd.handle,
        access,
        iova: place.virt,
        length: place.length,
        offset,
        pages: tree.list(),
        key: device.next_key(),
        ..Default::default()
    };
    Mr::register(device, &body, Some(memory))
}

/// Registers all memory of the guest, for users in the kernel: addresses are those for DMA.
pub(crate) fn get_dma_mr(device: &Device, pd: &Pd, access: u32) -> Result<Mr> {
    let body = RegMr {
        pd: pd.handle,
        access: Mr::known_access(access)? | access::PHYSICAL,
        key: device.next_key(),
        ..Default::default()
    };
    Mr::register(device, &body, None)
}

/// What is to change about a region: each if it is there.
pub(crate) struct Change<'a> {
    pub(crate) place: Option<UserRange>,
    pub(crate) pd: Option<&'a Pd>,
    pub(crate) access: Option<u32>,
}

/// Changes a region in one step. On an error it is as before.
pub(crate) fn rereg_mr(device: &Device, mr: &Mr, change: &Change<'_>) -> Result<()> {
    match mr {
        Mr::Plain(region) => region.with(|region| region.change(device, change)),
        Mr::Fast(_) => Err(Errno::EINVAL),
    }
}

impl Region {
    fn change(&mut self, device: &Device, change: &Change<'_>) -> Result<()> {
        let old = self.user.as_ref().ok_or(Errno::EOPNOTSUPP)?;
        let access = match change.access {
            Some(access) => Mr::known_access(access)?,
            None => old.access,
        };
        let mut body = ReregMr {
            lkey: self.lkey,
            // Users that were told of the region go on to name it so.
            key: self.lkey as u8,
            ..Default::default()
        };
        if let Some(pd) = change.pd {
            body.flags |= rereg_flag::PD;
            body.pd = pd.handle;
        }
        if change.access.is_some() {
            body.flags |= rereg_flag::ACCESS;
            body.access = access;
        }
        // What is pinned for reading only is pinned anew if it is to be written.
        let pin_anew = needs_writing(access) && !old.writable;
        let place = change.place.or(pin_anew.then_some(old.place));
        let mut new = match place {
            Some(place) => Some(UserMemory::pin(device, place, access)?),
            None => None,
        };
        // The tree lives until the command has been answered.
        let described = match &mut new {
            Some(new) => Some(new.describe(device)?),
            None => None,
        };
        if let (Some(new), Some(described)) = (&new, &described) {
            body.flags |= rereg_flag::TRANSLATION;
            body.iova = new.place.virt;
            body.length = new.place.length;
            body.offset = described.offset;
            body.pages = described.tree.list();
        }
        let RegMrResponse { lkey, rkey } = device.command(opcode::REREG_MR, &body)?;
        (self.lkey, self.rkey) = (lkey, rkey);
        if let Some(new) = new {
            self.user = Some(new);
        } else if let Some(user) = &mut self.user {
            user.access = access;
        }
        Ok(())
    }
}

/// Deregisters a region. The device answers when the last access has ended.
pub(crate) fn dereg_mr(device: &Device, mr: &Mr) -> Result<()> {
    device.destroy(opcode::DEREG_MR, mr.keys().0)
}

/// Takes a region back whose registration could not be completed.
pub(crate) fn discard_mr(device: &Device, mr: &Mr) {
    device.must_destroy(opcode::DEREG_MR, mr.keys().0);
}
