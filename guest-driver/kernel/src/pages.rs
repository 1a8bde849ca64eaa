// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
//! Lists of pages, and of blocks, for the device: trees of 4 KiB tables (specification: "Control
//! commands", `PageList`, and "Regions for fast registration").
//!
//! The tree of a command lives as long as the command: the device takes what it needs before it
//! answers. The tables of a fast registration are written again and again ([`ListWriter`]), by
//! their one owner.
use crate::sys::alloc::{Array, Wait};
use crate::sys::dma::{DmaDevice, DmaPage};
use crate::sys::error::{Errno, Result};
use crate::sys::rdma::Umem;
use virtio_rdma_spec::command::{Block, PageList};
use virtio_rdma_spec::PAGE_SIZE;

/// Addresses in a table.
const FANOUT: usize = PAGE_SIZE as usize / 8;
/// Blocks in a table of the last level.
const BLOCKS: usize = PAGE_SIZE as usize / Block::SIZE;
/// Most levels of tables.
const MAX_LEVELS: u8 = 3;

/// Tables: those of the lowest level first, the topmost one last.
pub(crate) struct Tables(Array<Array<DmaPage>>);

impl Tables {
    /// In one array: no more than a page, so that it can be dropped in any context.
    const CHUNK: usize = 128;

    /// This many tables.
    pub(crate) fn new(dma: DmaDevice, count: usize, wait: Wait) -> Result<Self> {
        const { assert!(Self::CHUNK * size_of::<DmaPage>() <= PAGE_SIZE as usize) };
        let chunk = |n: usize| {
            let rest = count.saturating_sub(n.saturating_mul(Self::CHUNK));
            Array::new_in(rest.min(Self::CHUNK), wait, |_| DmaPage::new_in(dma, wait))
        };
        Array::new_in(count.div_ceil(Self::CHUNK), wait, chunk).map(Self)
    }

    fn get_mut(&mut self, table: usize) -> Option<&mut DmaPage> {
        let chunk = self.0.get_mut(table / Self::CHUNK)?;
        chunk.get_mut(table % Self::CHUNK)
    }

    fn addr(&self, table: usize) -> u64 {
        let page = self.0.get(table / Self::CHUNK);
        let page = page.and_then(|chunk| chunk.get(table % Self::CHUNK));
        page.map_or(0, DmaPage::addr)
    }

    /// Sets the words of an entry; false if there is no such table.
    fn set<const N: usize>(&mut self, table: usize, entry: usize, words: [u64; N]) -> bool {
        let Some(page) = self.get_mut(table) else {
            return false;
        };
        for (n, word) in words.into_iter().enumerate() {
            page.set(entry.wrapping_mul(N).wrapping_add(n), word);
        }
        true
    }

    /// Writes the upper levels over this many tables of the lowest; returns the number of levels
    /// and the address of the topmost table.
    fn raise(&mut self, lowest: usize) -> (u8, u64) {
        let (mut start, mut width, mut levels) = (0usize, lowest, 1u8);
        while width > 1 {
            let above = start.wrapping_add(width);
            for i in 0..width {
                let addr = self.addr(start.wrapping_add(i));
                self.set(above.wrapping_add(i / FANOUT), i % FANOUT, [addr]);
            }
            start = above;
            width = width.div_ceil(FANOUT);
            levels = levels.wrapping_add(1);
        }
        (levels, self.addr(start))
    }
}

/// What a list consists of.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Pages.
    Pages,
    /// Blocks of any address and length.
    Blocks,
}

impl Kind {
    /// Tables for a list of this many.
    pub(crate) fn tables(self, count: usize) -> Result<usize> {
        let (mut width, mut levels) = (self.lowest(count), 0u8);
        let mut total = width;
        if width != 0 {
            levels = 1;
        }
        while width > 1 {
            width = width.div_ceil(FANOUT);
            total = total.saturating_add(width);
            levels = levels.saturating_add(1);
        }
        if count == 0 || levels > MAX_LEVELS {
            return Err(Errno::EINVAL);
        }
        Ok(total)
    }

    /// Tables of the lowest level. One page needs none; one block does.
    fn lowest(self, count: usize) -> usize {
        match self {
            Self::Pages if count <= 1 => 0,
            Self::Pages => count.div_ceil(FANOUT),
            Self::Blocks => count.div_ceil(BLOCKS),
        }
    }
}

/// Writes a list into tables that nobody else uses.
pub(crate) struct ListWriter<'t> {
    tables: &'t mut Tables,
    kind: Kind,
    count: usize,
    first: u64,
}

impl<'t> ListWriter<'t> {
    /// The tables must be as many as [`Kind::tables`] says.
    pub(crate) fn new(tables: &'t mut Tables, kind: Kind) -> Self {
        Self {
            tables,
            kind,
            count: 0,
            first: 0,
        }
    }

    /// Adds a page, or a block with its length.
    pub(crate) fn add(&mut self, addr: u64, length: u64) -> Result<()> {
        let n = self.count;
        let fits = match self.kind {
            Kind::Pages => self.tables.set(n / FANOUT, n % FANOUT, [addr]) || n == 0,
            Kind::Blocks => self.tables.set(n / BLOCKS, n % BLOCKS, [addr, length]),
        };
        if !fits {
            return Err(Errno::EINVAL);
        }
        if n == 0 {
            self.first = addr;
        }
        self.count = n.wrapping_add(1);
        Ok(())
    }

    /// The list; `page_shift` is log2 of the page size, or for blocks zero.
    pub(crate) fn finish(self, page_shift: u8) -> Result<PageList> {
        if self.count == 0 {
            return Err(Errno::EINVAL);
        }
        let (levels, addr) = match self.kind.lowest(self.count) {
            0 => (0, self.first),
            lowest => self.tables.raise(lowest),
        };
        Ok(PageList {
            addr,
            count: u32::try_from(self.count).map_err(|_| Errno::EINVAL)?,
            levels,
            page_shift,
            reserved: 0,
        })
    }
}

/// A page list and the tables that it consists of.
pub(crate) struct PageTree {
    list: PageList,
    _tables: Tables,
}

impl PageTree {
    /// The list of `count` pages of 2^`page_shift` bytes whose addresses `fill` passes, in order,
    /// to its argument.
    pub(crate) fn new(
        dma: DmaDevice,
        count: usize,
        page_shift: u8,
        fill: impl FnOnce(&mut dyn FnMut(u64) -> Result<()>) -> Result<()>,
    ) -> Result<Self> {
        let mut tables = Tables::new(dma, Kind::Pages.tables(count)?, Wait::Yes)?;
        let mut writer = ListWriter::new(&mut tables, Kind::Pages);
        fill(&mut |addr| {
            if writer.count >= count {
                return Err(Errno::EINVAL);
            }
            writer.add(addr, 0)
        })?;
        if writer.count != count {
            return Err(Errno::EINVAL);
        }
        Ok(Self {
            list: writer.finish(page_shift)?,
            _tables: tables,
        })
    }

    /// The list of no pages, for what has none.
    pub(crate) fn empty() -> Self {
        Self {
            list: PageList::default(),
            _tables: Tables(Array::empty()),
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
