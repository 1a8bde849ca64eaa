// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Page lists and block lists, read from guest memory bit by bit.
use std::sync::atomic::{AtomicU64, Ordering};

use virtio_rdma_spec::command::{Block, PageList};

use super::blocks::{BlockResolver, Blocks};
use super::pages::{Pages, Resolver};
use super::{Error, GuestMemory};
use crate::footprint::{boxed, listed, Footprint};

/// Addresses of pages that are read before they are resolved.
const AT_ONCE: usize = 64;
/// Addresses in a table.
const ADDRESSES: usize = 512;
/// Blocks in a table of the last level.
const BLOCKS: usize = 4096 / Block::SIZE;

/// What a list describes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Pages.
    Pages,
    /// Blocks of any address and length.
    Blocks,
}

impl Form {
    /// Entries in a table of the last level.
    fn entries(self) -> usize {
        match self {
            Self::Pages => ADDRESSES,
            Self::Blocks => BLOCKS,
        }
    }

    /// Memory of the process that an entry takes at most, bytes.
    #[must_use]
    pub fn footprint(self) -> u64 {
        match self {
            Self::Pages => Pages::PAGE_FOOTPRINT,
            Self::Blocks => Blocks::BLOCK_FOOTPRINT,
        }
    }

    /// Size of an entry in its table, bytes.
    #[must_use]
    pub fn entry_size(self) -> u64 {
        (4096 / self.entries()) as u64
    }

    /// Checks the description of a list.
    ///
    /// # Errors
    /// [`Error::PageList`] if it is malformed.
    pub fn check(self, list: &PageList) -> Result<(), Error> {
        let (levels, shifts) = match self {
            Self::Pages => (0..=3, 12..=31),
            Self::Blocks => (1..=3, 0..=0),
        };
        if !levels.contains(&list.levels) || !shifts.contains(&list.page_shift) {
            return Err(Error::PageList);
        }
        let capacity = match list.levels.checked_sub(1) {
            None => 1,
            Some(above) => self.entries() << (9 * u32::from(above)),
        };
        if list.count == 0 || list.count as usize > capacity || list.reserved != 0 {
            return Err(Error::PageList);
        }
        Ok(())
    }
}

/// The memory that a list describes.
#[derive(Debug)]
pub enum Resolved {
    /// Pages.
    Pages(Pages),
    /// Blocks.
    Blocks(Blocks),
}

#[derive(Debug)]
enum Into {
    Pages(Resolver),
    Blocks(BlockResolver),
}

/// Reads and resolves a list, bit by bit. Each entry is read once, and only what was read is used.
#[derive(Debug)]
pub struct ListReader {
    memory: GuestMemory,
    /// Address of the first table.
    top: u64,
    /// Addresses of the tables of the last level, if `top` is not the only one.
    tables: Vec<u64>,
    count: usize,
    /// Entries that were read.
    read: usize,
    /// Has a share for this and `tables`, too, until the end.
    into: Into,
}

impl ListReader {
    /// Begins to read the list that `list` describes: its tables, but those of the last level. What
    /// it may take in the end is in the account before anything is read: tables may name the same
    /// page many times, so a list may be far longer than the memory that it is in.
    ///
    /// # Errors
    /// [`Error::PageList`] for a malformed description, [`Error::NotGuestMemory`] for a table
    /// outside of guest memory, [`Error::NoMemory`]; with one page and no table, the errors of
    /// [`Self::step`].
    pub fn new(
        memory: &GuestMemory,
        list: &PageList,
        form: Form,
        account: &Footprint,
    ) -> Result<Self, Error> {
        form.check(list)?;
        let count = list.count as usize;
        let leaves = count.div_ceil(form.entries());
        // Two levels of tables at a time.
        let own = boxed::<Self>() + listed::<u64>(2 * leaves);
        let most = form.footprint() * u64::from(list.count);
        let share = account.share(own + most)?;
        let mut into = match form {
            Form::Pages => Into::Pages(Resolver::new(count, list.page_shift, share)?),
            Form::Blocks => Into::Blocks(BlockResolver::new(count, share)?),
        };
        let mut tables = Vec::new();
        for depth in (1..list.levels).rev() {
            // Tables of the next level in all: what one entry covers shrinks by 512 with each
            // level.
            let entries = leaves.div_ceil(1 << (9 * u32::from(depth - 1)));
            let mut next = Vec::new();
            next.try_reserve_exact(entries)
                .map_err(|_| Error::NoMemory)?;
            let above = if tables.is_empty() {
                std::slice::from_ref(&list.addr)
            } else {
                &tables
            };
            for table in above {
                let words = memory.table(*table).ok_or(Error::NotGuestMemory(*table))?;
                let left = entries - next.len();
                let read = words.iter().take(left);
                next.extend(read.map(|word| u64::from_le(word.load(Ordering::Relaxed))));
            }
            tables = next;
        }
        let mut read = 0;
        if let (0, Into::Pages(resolver)) = (list.levels, &mut into) {
            resolver.take(memory, &[list.addr])?;
            read = count;
        }
        Ok(Self {
            memory: memory.clone(),
            top: list.addr,
            tables,
            count,
            read,
            into,
        })
    }

    /// Whether it reads this very memory.
    #[must_use]
    pub fn reads(&self, memory: &GuestMemory) -> bool {
        self.memory.same(memory)
    }

    /// Whether all was read.
    #[must_use]
    pub fn done(&self) -> bool {
        let stray = matches!(&self.into, Into::Pages(resolver) if resolver.stray());
        self.read == self.count && !stray
    }

    /// Goes on, by the time that `max` entries take. Returns for how many it took.
    ///
    /// # Errors
    /// [`Error::NotGuestMemory`] if a table, a page or a block is not guest memory,
    /// [`Error::PageList`] if a page is not aligned, or a block has no length, [`Error::NoMemory`].
    pub fn step(&mut self, max: usize) -> Result<usize, Error> {
        let Self {
            memory,
            top,
            tables,
            count,
            read,
            into,
            ..
        } = self;
        let memory = &*memory;
        let mut left = max;
        while left > 0 && read < count {
            match into {
                Into::Pages(resolver) => {
                    left -= resolver.spread(left)?;
                    if left == 0 {
                        break;
                    }
                    let words = table(memory, *top, tables, *read / ADDRESSES)?;
                    let words = words.get(*read % ADDRESSES..).unwrap_or_default();
                    // Read once: the guest may change them at any time.
                    let mut pages = [0; AT_ONCE];
                    let many = words.len().min(left).min(*count - *read).min(AT_ONCE);
                    for (page, word) in pages.iter_mut().zip(words).take(many) {
                        *page = u64::from_le(word.load(Ordering::Relaxed));
                    }
                    let pages = pages.get(..many).unwrap_or_default();
                    let taken = resolver.take(memory, pages)?;
                    *read += taken;
                    left -= taken;
                }
                Into::Blocks(resolver) => {
                    let words = table(memory, *top, tables, *read / BLOCKS)?;
                    let words = words.get(2 * (*read % BLOCKS)..).unwrap_or_default();
                    let many = left.min(*count - *read);
                    for block in words.chunks_exact(2).take(many) {
                        if let [addr, length] = block {
                            let value =
                                |word: &AtomicU64| u64::from_le(word.load(Ordering::Relaxed));
                            resolver.push(memory, value(addr), value(length))?;
                            *read += 1;
                            left -= 1;
                        }
                    }
                }
            }
        }
        if let Into::Pages(resolver) = into {
            left -= resolver.spread(left)?;
        }
        Ok(max - left)
    }

    /// What the list describes. All must have been read.
    ///
    /// # Errors
    /// [`Error::PageList`] if not all was read, or there is more than can be addressed.
    pub fn finish(self) -> Result<Resolved, Error> {
        if !self.done() {
            return Err(Error::PageList);
        }
        match self.into {
            Into::Pages(resolver) => resolver.finish(&self.memory).map(Resolved::Pages),
            Into::Blocks(resolver) => resolver.finish(&self.memory).map(Resolved::Blocks),
        }
    }
}

fn table<'a>(
    memory: &'a GuestMemory,
    top: u64,
    tables: &[u64],
    number: usize,
) -> Result<&'a [AtomicU64; ADDRESSES], Error> {
    let addr = match tables.get(number) {
        Some(addr) => *addr,
        None if tables.is_empty() && number == 0 => top,
        None => return Err(Error::PageList),
    };
    memory.table(addr).ok_or(Error::NotGuestMemory(addr))
}
