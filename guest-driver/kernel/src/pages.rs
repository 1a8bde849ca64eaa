// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
//! Lists of pages for the device: trees of 4 KiB tables (specification: "Control commands", `PageList`).
//!
//! A tree lives as long as the command that carries it: the device takes what it needs before it answers.
use crate::sys::alloc::Array;
use crate::sys::dma::{DmaDevice, DmaPage};
use crate::sys::error::{Errno, Result};
use crate::sys::rdma::Umem;
use virtio_rdma_spec::command::PageList;
use virtio_rdma_spec::PAGE_SIZE;

/// Addresses in a table.
const FANOUT: usize = PAGE_SIZE as usize / 8;
/// Most levels of tables.
const MAX_LEVELS: u8 = 3;

/// A page list and the tables that it consists of.
pub(crate) struct PageTree {
    list: PageList,
    _tables: Array<DmaPage>,
}

impl PageTree {
    /// The list of `count` pages of 2^`page_shift` bytes whose addresses `fill` passes, in order, to its argument.
    pub(crate) fn new(
        dma: DmaDevice,
        count: usize,
        page_shift: u8,
        fill: impl FnOnce(&mut dyn FnMut(u64) -> Result<()>) -> Result<()>,
    ) -> Result<Self> {
        // The tables of all levels one after the other, the lowest first, the topmost one last.
        let mut levels = 0u8;
        let mut total = 0usize;
        let mut width = count;
        while width > 1 {
            width = width.div_ceil(FANOUT);
            total = total.saturating_add(width);
            levels = levels.saturating_add(1);
        }
        if count == 0 || levels > MAX_LEVELS {
            return Err(Errno::EINVAL);
        }
        let mut tables = Array::new(total, |_| DmaPage::new(dma))?;

        let mut single = 0;
        let mut filled = 0usize;
        fill(&mut |addr| {
            if filled >= count {
                return Err(Errno::EINVAL);
            }
            match tables.get_mut(filled / FANOUT) {
                Some(table) => table.set(filled % FANOUT, addr),
                None => single = addr,
            }
            filled = filled.wrapping_add(1);
            Ok(())
        })?;
        if filled != count {
            return Err(Errno::EINVAL);
        }

        let mut start = 0usize;
        let mut width = count.div_ceil(FANOUT);
        for _ in 1..levels {
            let above = start.wrapping_add(width);
            for i in 0..width {
                let addr = tables.get(start.wrapping_add(i)).map_or(0, DmaPage::addr);
                if let Some(table) = tables.get_mut(above.wrapping_add(i / FANOUT)) {
                    table.set(i % FANOUT, addr);
                }
            }
            start = above;
            width = width.div_ceil(FANOUT);
        }
        Ok(Self {
            list: PageList {
                addr: tables.last().map_or(single, DmaPage::addr),
                count: u32::try_from(count).map_err(|_| Errno::EINVAL)?,
                levels,
                page_shift,
                reserved: 0,
            },
            _tables: tables,
        })
    }

    /// The list of no pages, for what has none.
    pub(crate) fn empty() -> Self {
        Self {
            list: PageList::default(),
            _tables: Array::empty(),
        }
    }

    /// The list of 4 KiB pages of our own.
    pub(crate) fn of_pages(dma: DmaDevice, pages: &[DmaPage]) -> Result<Self> {
        let shift = PAGE_SIZE.trailing_zeros() as u8;
        Self::new(dma, pages.len(), shift, |add| {
            pages.iter().try_for_each(|page| add(page.addr()))
        })
    }

    /// The list of the pages of user memory, in pages of `page_size`, a power of two.
    pub(crate) fn of_umem(dma: DmaDevice, umem: &Umem, page_size: u64) -> Result<Self> {
        let shift = page_size.trailing_zeros() as u8;
        Self::new(dma, umem.pages(page_size), shift, |add| {
            umem.for_each(page_size, add)
        })
    }

    /// What goes into the command.
    pub(crate) fn list(&self) -> PageList {
        self.list
    }
}
