// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
//! Regions for fast registration: users in the kernel map memory into them, then post work requests
//! that register it.
//!
//! What was mapped is in tables that the device reads when it executes the work request. So a
//! mapping never goes to tables that a work request still needs: each of those holds a share of its
//! tables (see `kverbs`), and only tables that nobody else owns are written. With that,
//! registrations of one region can be in flight together, each with the memory that was mapped for
//! it.
use super::Pd;
use crate::device::Device;
use crate::pages::{Kind, ListWriter, Tables};
use crate::sys::alloc::{Arc, Wait};
use crate::sys::error::{Errno, Result};
use crate::sys::rdma::SgList;
use crate::sys::sync::{which, SpinLocked};
use virtio_rdma_spec::command::{alloc_mr_flag, opcode, AllocMr, PageList, RegMrResponse};
use virtio_rdma_spec::PAGE_SIZE;

/// Sets of tables that a region keeps. With more in flight, further ones come and go.
const KEPT: usize = 8;
/// The largest page that a page list can have.
const MAX_PAGE: u64 = 1 << 31;

/// A region for fast registration.
pub(crate) struct FastMr {
    lkey: u32,
    kind: Kind,
    max_pages: usize,
    state: SpinLocked<State>,
}

struct State {
    /// The first has room for all pages.
    kept: [Option<Kept>; KEPT],
    mapped: Option<Mapped>,
}

struct Kept {
    tables: Arc<Tables>,
    /// Pages there is room for.
    room: usize,
}

/// What was mapped last.
#[derive(Clone)]
pub(crate) struct Mapped {
    pub(crate) list: PageList,
    /// Offset of the first byte in the first page or block.
    pub(crate) offset: u32,
    /// Shared by the work requests that need it.
    pub(crate) tables: Arc<Tables>,
}

/// How much of a list was mapped.
#[derive(Clone, Copy, Default)]
pub(crate) struct Extent {
    /// Address of the first byte.
    pub(crate) start: u64,
    /// Bytes.
    pub(crate) length: u64,
    /// Entries that are mapped to their end.
    pub(crate) entries: u32,
    /// Bytes of the entry after those that are mapped, too.
    pub(crate) rest: u32,
}

/// Allocates a region for up to `max_pages` pages or blocks.
pub(crate) fn alloc_mr(device: &Device, pd: &Pd, kind: Kind, max_pages: u32) -> Result<FastMr> {
    if max_pages == 0 || max_pages > device.limits().max_fast_reg_pages {
        return Err(Errno::EINVAL);
    }
    let room = max_pages as usize;
    let tables = Arc::new(Tables::new(device.dma(), kind.tables(room)?, Wait::Yes)?)?;
    let mut kept = [const { None }; KEPT];
    if let Some(first) = kept.first_mut() {
        *first = Some(Kept { tables, room });
    }
    let state = SpinLocked::new(which::REGION, State { kept, mapped: None })?;
    let body = AllocMr {
        pd: pd.handle,
        max_pages,
        flags: match kind {
            Kind::Pages => 0,
            Kind::Blocks => alloc_mr_flag::BLOCKS,
        },
        key: device.next_key(),
        reserved: [0; 3],
    };
    let RegMrResponse { lkey, .. } = device.command(opcode::ALLOC_MR, &body)?;
    Ok(FastMr {
        lkey,
        kind,
        max_pages: room,
        state,
    })
}

impl FastMr {
    /// The key it was allocated with: its index is for good.
    pub(super) fn lkey(&self) -> u32 {
        self.lkey
    }

    /// What was mapped last, for a work request that registers it.
    pub(crate) fn mapped(&self) -> Option<Mapped> {
        self.state.with(|state| state.mapped.clone())
    }

    /// Maps a list, without its first `skip` bytes, as far as it goes, in pages of this size. Any
    /// context; nobody else may map or register the region meanwhile.
    pub(crate) fn map(
        &self,
        device: &Device,
        list: &SgList<'_>,
        skip: u32,
        page_size: u64,
    ) -> Result<Extent> {
        let fits = (PAGE_SIZE..=MAX_PAGE).contains(&page_size);
        if self.kind == Kind::Pages && !(fits && page_size.is_power_of_two()) {
            return Err(Errno::EINVAL);
        }
        let scan = Scan::new(self.kind, self.max_pages, skip, page_size);
        let mut kept = self.unused(device, list, &scan)?;
        let tables = kept.tables.get_mut().ok_or(Errno::EINVAL)?;
        let mut writer = ListWriter::new(tables, self.kind);
        let extent = scan.run(list, |addr, length| writer.add(addr, length));
        let page_shift = match self.kind {
            Kind::Pages => page_size.trailing_zeros() as u8,
            Kind::Blocks => 0,
        };
        let written = writer.finish(page_shift);
        let tables = kept.tables.clone();
        self.keep(kept);
        let (extent, list) = (extent?, written?);
        let offset = match self.kind {
            Kind::Pages => (extent.start & page_size.wrapping_sub(1)) as u32,
            Kind::Blocks => 0,
        };
        let mapped = Mapped {
            list,
            offset,
            tables,
        };
        self.state.with(|state| state.mapped = Some(mapped));
        Ok(extent)
    }

    /// Tables that no work request needs: those that have room for everything, or enough for the
    /// list.
    fn unused(&self, device: &Device, list: &SgList<'_>, scan: &Scan) -> Result<Kept> {
        self.state.with(|state| state.mapped = None);
        if let Some(kept) = self.take(self.max_pages) {
            return Ok(kept);
        }
        let mut needed = 0usize;
        scan.clone().run(list, |_, _| {
            needed = needed.wrapping_add(1);
            Ok(())
        })?;
        if let Some(kept) = self.take(needed) {
            return Ok(kept);
        }
        let tables = Tables::new(device.dma(), self.kind.tables(needed)?, Wait::No)?;
        Ok(Kept {
            tables: Arc::new_in(tables, Wait::No)?,
            room: needed,
        })
    }

    fn take(&self, room: usize) -> Option<Kept> {
        self.state.with(|state| {
            let free = |kept: &mut Kept| kept.room >= room && kept.tables.get_mut().is_some();
            let mut kept = state.kept.iter_mut();
            kept.find_map(|kept| kept.take_if(free))
        })
    }

    /// Keeps tables for later, in place of smaller ones if there are too many.
    fn keep(&self, new: Kept) {
        let dropped = self.state.with(|state| {
            let room = |kept: &Option<Kept>| kept.as_ref().map_or(0, |kept| kept.room);
            let least = state.kept.iter_mut().min_by_key(|kept| room(kept));
            match least {
                Some(least) if room(least) <= new.room => least.replace(new),
                _ => Some(new),
            }
        });
        drop(dropped);
    }
}

/// Goes through a list and says which pages or blocks it consists of.
#[derive(Clone)]
struct Scan {
    kind: Kind,
    /// Pages or blocks there may be.
    room: usize,
    skip: u32,
    page_size: u64,
    extent: Extent,
    /// Address behind the last byte.
    end: u64,
    /// Address behind the last page.
    page_end: u64,
}

impl Scan {
    fn new(kind: Kind, room: usize, skip: u32, page_size: u64) -> Self {
        Self {
            kind,
            room,
            skip,
            page_size,
            extent: Extent::default(),
            end: 0,
            page_end: 0,
        }
    }

    fn run(
        mut self,
        list: &SgList<'_>,
        mut put: impl FnMut(u64, u64) -> Result<()>,
    ) -> Result<Extent> {
        let mut result = Ok(());
        list.for_each(|addr, length| {
            // Only in the first.
            let skip = core::mem::take(&mut self.skip);
            match self.entry(addr, length, skip, &mut put) {
                Ok(goes_on) => goes_on,
                Err(error) => {
                    result = Err(error);
                    false
                }
            }
        });
        result.map(|()| self.extent)
    }

    /// One entry; returns whether all of it is mapped.
    fn entry(
        &mut self,
        addr: u64,
        length: u32,
        skip: u32,
        put: &mut impl FnMut(u64, u64) -> Result<()>,
    ) -> Result<bool> {
        let rest = length.checked_sub(skip).ok_or(Errno::EINVAL)?;
        let start = addr.checked_add(skip.into()).ok_or(Errno::EINVAL)?;
        let end = start.checked_add(rest.into()).ok_or(Errno::EINVAL)?;
        let first = self.extent.entries == 0;
        if first {
            self.extent.start = start;
        }
        if rest != 0 {
            let goes_on = match self.kind {
                Kind::Blocks => self.block(start, rest, put)?,
                Kind::Pages => self.pages(addr, start, end, first, put)?,
            };
            if !goes_on {
                return Ok(false);
            }
        }
        self.extent.length = self.extent.length.saturating_add(rest.into());
        self.extent.entries = self.extent.entries.saturating_add(1);
        self.end = end;
        Ok(true)
    }

    fn block(
        &mut self,
        start: u64,
        length: u32,
        put: &mut impl FnMut(u64, u64) -> Result<()>,
    ) -> Result<bool> {
        let Some(room) = self.room.checked_sub(1) else {
            return Ok(false);
        };
        self.room = room;
        put(start, length.into())?;
        Ok(true)
    }

    fn pages(
        &mut self,
        addr: u64,
        start: u64,
        end: u64,
        first: bool,
        put: &mut impl FnMut(u64, u64) -> Result<()>,
    ) -> Result<bool> {
        let within = self.page_size.wrapping_sub(1);
        let follows = !first && start == self.end;
        // Only the first page may have something before it, only the last something behind.
        if !first && !follows && (self.end | start) & within != 0 {
            return Ok(false);
        }
        let mut page = start & !within;
        if follows {
            // It may go on in the page that was the last.
            page = page.max(self.page_end);
        }
        while page < end {
            let Some(room) = self.room.checked_sub(1) else {
                // Whole pages of this entry are mapped.
                if page > start {
                    let mapped = page.wrapping_sub(start);
                    self.extent.length = self.extent.length.saturating_add(mapped);
                    self.extent.rest = page.wrapping_sub(addr) as u32;
                }
                return Ok(false);
            };
            self.room = room;
            put(page, 0)?;
            page = page.checked_add(self.page_size).ok_or(Errno::EINVAL)?;
        }
        self.page_end = page;
        Ok(true)
    }
}
