// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The memory of the VM: regions backed by memfds, a page allocator, buffers.
use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::{memfd_create, MemfdFlags};
use vhost::VhostUserMemoryRegionInfo;
use virtio_rdma_driver_core::pages::{PageTree, Slot, TABLE_SIZE};
use virtio_rdma_spec::command::{Block, PageList};

use crate::mapping::{Mapping, View};
use crate::{Error, PAGE};

/// How the pages of a buffer lie in guest-physical memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Placement {
    /// One behind the other.
    #[default]
    Contiguous,
    /// Anywhere, in any order: as the pages of a process.
    Scattered,
}

/// A region of guest memory.
#[derive(Debug)]
pub struct Region {
    guest_addr: u64,
    file: File,
    mapping: Arc<Mapping>,
    pages: Mutex<Pages>,
}

/// Which pages of a region are in use.
#[derive(Debug)]
struct Pages {
    /// One flag per page.
    used: Vec<bool>,
    /// Where to look for the next run of free pages.
    next: usize,
    /// Where to look for the next single page, in steps.
    next_scattered: usize,
}

/// Distance between the pages of a scattered buffer: a prime number.
const SCATTER: usize = 1009;

impl Pages {
    fn take_run(&mut self, count: usize) -> Option<Vec<usize>> {
        let total = self.used.len();
        let mut run = 0;
        for page in (self.next..total).chain(0..total) {
            if page == 0 {
                run = 0;
            }
            run = if self.used[page] { 0 } else { run + 1 };
            if run == count {
                self.next = page + 1;
                let pages: Vec<usize> = (page + 1 - count..=page).collect();
                self.used[page + 1 - count..=page].fill(true);
                return Some(pages);
            }
        }
        None
    }

    fn take_scattered(&mut self, count: usize) -> Option<Vec<usize>> {
        let total = self.used.len();
        let mut pages = Vec::with_capacity(count);
        // By steps around the region; where the step does not reach every page, one by one.
        for i in 0..2 * total {
            if pages.len() == count {
                break;
            }
            let step = if i < total { SCATTER } else { 1 };
            self.next_scattered = (self.next_scattered + step) % total;
            if !self.used[self.next_scattered] {
                self.used[self.next_scattered] = true;
                pages.push(self.next_scattered);
            }
        }
        if pages.len() < count {
            self.release(&pages);
            return None;
        }
        Some(pages)
    }

    fn release(&mut self, pages: &[usize]) {
        for page in pages {
            self.used[*page] = false;
        }
    }
}

impl Region {
    /// New, zeroed memory of `size` bytes at `guest_addr`, of huge pages of the host if
    /// `huge_pages`.
    pub(crate) fn new(guest_addr: u64, size: usize, huge_pages: bool) -> Result<Arc<Self>, Error> {
        let mut flags = MemfdFlags::CLOEXEC;
        flags.set(MemfdFlags::HUGETLB, huge_pages);
        let file = File::from(memfd_create("bare-vm", flags)?);
        file.set_len(size as u64)?;
        Self::of(guest_addr, file, size)
    }

    /// The first `size` bytes of a file.
    pub(crate) fn of(guest_addr: u64, file: File, size: usize) -> Result<Arc<Self>, Error> {
        let mapping = Arc::new(Mapping::new(&file, 0, size)?);
        Ok(Arc::new(Self {
            guest_addr,
            file,
            mapping,
            pages: Mutex::new(Pages {
                used: vec![false; size / PAGE],
                next: 0,
                next_scattered: 0,
            }),
        }))
    }

    /// Guest-physical address.
    #[must_use]
    pub fn guest_addr(&self) -> u64 {
        self.guest_addr
    }

    /// Size, bytes.
    #[must_use]
    pub fn size(&self) -> usize {
        self.mapping.len()
    }

    /// What ADD_MEM_REG tells of it.
    #[must_use]
    pub fn info(&self) -> VhostUserMemoryRegionInfo {
        VhostUserMemoryRegionInfo {
            guest_phys_addr: self.guest_addr,
            memory_size: self.mapping.len() as u64,
            userspace_addr: self.mapping.addr(),
            mmap_offset: 0,
            mmap_handle: self.file.as_raw_fd(),
        }
    }

    /// Takes the memory away: the file is truncated. Who accesses it from now on, in this process,
    /// too, gets a SIGBUS.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn truncate(&self) -> Result<(), Error> {
        Ok(self.file.set_len(0)?)
    }

    fn pages(&self) -> MutexGuard<'_, Pages> {
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A zeroed buffer of at least `size` bytes.
    ///
    /// # Errors
    /// If there are not as many free pages, or not one behind the other.
    pub fn buffer(self: &Arc<Self>, size: usize, placement: Placement) -> Result<Buffer, Error> {
        let count = size.div_ceil(PAGE).max(1);
        let taken = match placement {
            Placement::Contiguous => self.pages().take_run(count),
            Placement::Scattered => self.pages().take_scattered(count),
        };
        let pages = taken.ok_or(Error::NoMemory)?;
        let view = match placement {
            Placement::Contiguous => {
                View::new(self.mapping.clone(), pages[0] * PAGE, count * PAGE)?
            }
            Placement::Scattered => {
                let pieces: Vec<_> = pages
                    .iter()
                    .map(|page| ((page * PAGE) as u64, PAGE))
                    .collect();
                let mapping = Arc::new(Mapping::scattered(&self.file, &pieces)?);
                View::new(mapping, 0, count * PAGE)?
            }
        };
        view.zero();
        Ok(Buffer {
            region: self.clone(),
            pages,
            view,
        })
    }
}

/// Some pages of the VM, which are one buffer for a process in it. They are free again when it is
/// dropped.
#[derive(Debug)]
pub struct Buffer {
    region: Arc<Region>,
    pages: Vec<usize>,
    view: View,
}

impl Buffer {
    /// Its contents.
    #[must_use]
    pub fn view(&self) -> &View {
        &self.view
    }

    /// Its address for a process, which is what work requests name.
    #[must_use]
    pub fn addr(&self) -> u64 {
        self.view.addr()
    }

    /// Number of pages.
    #[must_use]
    pub fn page_count(&self) -> usize {
        self.pages.len()
    }

    /// Guest-physical address of a page.
    ///
    /// # Panics
    /// If there is no such page.
    #[must_use]
    pub fn page(&self, page: usize) -> u64 {
        self.region.guest_addr + (self.pages[page] * PAGE) as u64
    }

    /// The region it is in.
    #[must_use]
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Describes it as a page list. The tables belong to the second value: keep it until the
    /// command is done.
    ///
    /// # Errors
    /// If there is no memory for the tables.
    pub fn page_list(&self) -> Result<(PageList, Option<Self>), Error> {
        let pages: Vec<u64> = (0..self.pages.len()).map(|page| self.page(page)).collect();
        page_list(&self.region, &pages)
    }
}

/// A page list of the guest-physical addresses `pages`, with its tables in `region`.
///
/// # Errors
/// If there are no or too many pages, or no memory for the tables.
pub fn page_list(region: &Arc<Region>, pages: &[u64]) -> Result<(PageList, Option<Buffer>), Error> {
    let tree = PageTree::new(pages.len() as u64).ok_or(Error::BadAddress)?;
    let mut list = PageList {
        count: tree.count(),
        levels: tree.levels(),
        page_shift: 12,
        ..PageList::default()
    };
    if tree.tables() == 0 {
        list.addr = pages.first().copied().unwrap_or(0);
        return Ok((list, None));
    }
    let (tables, root) = page_tables(region, &tree)?;
    list.addr = root;
    for (page, addr) in (0..).zip(pages) {
        if let Some(slot) = tree.page_slot(page) {
            put(&tables, slot, 8, &addr.to_le_bytes());
        }
    }
    Ok((list, Some(tables)))
}

/// A block list of the pieces of memory with these guest-physical addresses and lengths, with its
/// tables in `region`.
///
/// # Errors
/// If there are no or too many blocks, or no memory for the tables.
pub fn block_list(
    region: &Arc<Region>,
    blocks: &[(u64, u64)],
) -> Result<(PageList, Buffer), Error> {
    let tree = PageTree::of_blocks(blocks.len() as u64).ok_or(Error::BadAddress)?;
    let (tables, root) = page_tables(region, &tree)?;
    for (number, (addr, length)) in (0..).zip(blocks) {
        if let Some(slot) = tree.page_slot(number) {
            let block = Block {
                addr: *addr,
                length: *length,
            };
            put(&tables, slot, Block::SIZE, &block.to_bytes());
        }
    }
    let list = PageList {
        addr: root,
        count: tree.count(),
        levels: tree.levels(),
        ..PageList::default()
    };
    Ok((list, tables))
}

/// Tables with the addresses of each other; and the address of the topmost one.
fn page_tables(region: &Arc<Region>, tree: &PageTree) -> Result<(Buffer, u64), Error> {
    let size = tree.tables() as usize * TABLE_SIZE;
    // Where there is no such run of pages left, any pages will do.
    let tables = region
        .buffer(size, Placement::Contiguous)
        .or_else(|_| region.buffer(size, Placement::Scattered))?;
    let mut root = 0;
    for table in 0..tree.tables() {
        let addr = tables.page(table as usize);
        match tree.table_slot(table) {
            Some(slot) => put(&tables, slot, 8, &addr.to_le_bytes()),
            None => root = addr,
        }
    }
    Ok((tables, root))
}

/// Writes an entry of a table, in which each has `size` bytes.
fn put(tables: &Buffer, slot: Slot, size: usize, entry: &[u8]) {
    let offset = slot.table as usize * TABLE_SIZE + slot.index as usize * size;
    tables.view().write(offset, entry);
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.region.pages().release(&self.pages);
    }
}
