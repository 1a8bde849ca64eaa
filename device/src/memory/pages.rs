// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guest pages resolved to host addresses.
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use virtio_rdma_spec::command::PageList;

use super::{Error, GuestMemory, Span};

/// A host address within a mapping that the owning [`Pages`] keeps alive.
#[derive(Debug, Clone, Copy)]
struct Host(*mut u8);

// SAFETY: the address is only used through `Pages`, which keeps the mapping alive and accesses it by atomics and by copies
// that allow for others writing at the same time.
unsafe impl Send for Host {}
// SAFETY: as above.
unsafe impl Sync for Host {}

#[derive(Debug)]
enum Map {
    /// All pages follow each other, in guest and host.
    Linear { guest: u64, host: Host },
    /// Anything else.
    Scattered {
        guest: Box<[u64]>,
        host: Box<[Host]>,
    },
}

/// A list of guest pages, resolved. Keeps the mapping that it was resolved in alive.
#[derive(Debug)]
pub struct Pages {
    memory: GuestMemory,
    map: Map,
    /// log2 of the page size.
    shift: u8,
    /// In all, bytes.
    len: u64,
}

impl Pages {
    /// Resolves the pages of 2^`shift` bytes at the guest-physical addresses `guest`.
    ///
    /// # Errors
    /// [`Error::PageList`] if there is no page, the page size is not between 4 KiB and 2 GiB, or a page is not aligned to
    /// it; [`Error::NotGuestMemory`] if a page is not wholly in one region of guest memory.
    pub fn resolve(memory: &GuestMemory, guest: Vec<u64>, shift: u8) -> Result<Self, Error> {
        if guest.is_empty() || !(12..=31).contains(&shift) {
            return Err(Error::PageList);
        }
        let size = 1u64 << shift;
        let len = (guest.len() as u64)
            .checked_mul(size)
            .ok_or(Error::PageList)?;
        let mut host = Vec::with_capacity(guest.len());
        let mut linear = true;
        for (i, &page) in guest.iter().enumerate() {
            if page % size != 0 {
                return Err(Error::PageList);
            }
            let at = memory.host(page, size).ok_or(Error::NotGuestMemory(page))?;
            let offset = (i as u64) << shift;
            linear &= guest
                .first()
                .is_some_and(|first| first.checked_add(offset) == Some(page))
                && host.first().is_none_or(|first: &Host| {
                    (first.0 as u64).checked_add(offset) == Some(at as u64)
                });
            host.push(Host(at));
        }
        let map = match (linear, guest.first(), host.first()) {
            (true, Some(&guest), Some(&host)) => Map::Linear { guest, host },
            _ => Map::Scattered {
                guest: guest.into(),
                host: host.into(),
            },
        };
        Ok(Self {
            memory: memory.clone(),
            map,
            shift,
            len,
        })
    }

    /// The same guest pages, resolved anew in `memory`.
    ///
    /// # Errors
    /// If a page is not in `memory`.
    pub fn rebase(&self, memory: &GuestMemory) -> Result<Self, Error> {
        let guest = match &self.map {
            Map::Linear { guest, .. } => (0..self.count())
                .map(|i| guest.wrapping_add(i << self.shift))
                .collect(),
            Map::Scattered { guest, .. } => guest.to_vec(),
        };
        Self::resolve(memory, guest, self.shift)
    }

    /// Number of pages.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.len >> self.shift
    }

    /// Size in all, bytes.
    #[must_use]
    #[allow(clippy::len_without_is_empty)] // there is always a page
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Memory of the process that this list takes, bytes.
    #[must_use]
    pub fn footprint(&self) -> u64 {
        match &self.map {
            Map::Linear { .. } => 0,
            Map::Scattered { guest, .. } => 16 * guest.len() as u64,
        }
    }

    /// The memory that the pages were resolved in.
    #[must_use]
    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// Host address of `offset`, and the bytes that follow it contiguously.
    #[inline]
    fn at(&self, offset: u64) -> Option<(*mut u8, u64)> {
        let left = self.len.checked_sub(offset).filter(|left| *left > 0)?;
        match &self.map {
            // `offset` < `len`: within the mapping.
            Map::Linear { host, .. } => Some((host.0.wrapping_add(offset as usize), left)),
            Map::Scattered { host, .. } => {
                let page = host.get((offset >> self.shift) as usize)?;
                let in_page = offset & ((1 << self.shift) - 1);
                Some((
                    page.0.wrapping_add(in_page as usize),
                    (1 << self.shift) - in_page,
                ))
            }
        }
    }

    /// The longest contiguous piece that starts at `offset`, of at most `max` bytes; `None` beyond the end.
    #[inline]
    #[must_use]
    pub fn span(&self, offset: u64, max: u64) -> Option<Span<'_>> {
        let (ptr, contiguous) = self.at(offset)?;
        Some(Span {
            ptr,
            len: contiguous.min(max) as usize,
            pages: PhantomData,
        })
    }

    /// The aligned 8-byte word at `offset`.
    #[inline]
    #[must_use]
    pub fn word(&self, offset: u64) -> Option<&AtomicU64> {
        if offset % 8 != 0 {
            return None;
        }
        let (ptr, _) = self.at(offset)?;
        // SAFETY: `ptr` is valid for the 8 bytes: pages are page aligned and a multiple of 8 long, and `offset` is a multiple of 8
        // below `len`. The mapping lives as long as `self`. All access to ring memory, ours and the guest's, is atomic.
        Some(unsafe { &*ptr.cast::<AtomicU64>() })
    }

    /// The aligned 4-byte word at `offset`.
    #[inline]
    #[must_use]
    pub fn half_word(&self, offset: u64) -> Option<&AtomicU32> {
        if offset % 4 != 0 {
            return None;
        }
        let (ptr, _) = self.at(offset)?;
        // SAFETY: as in `word`, for 4 bytes.
        Some(unsafe { &*ptr.cast::<AtomicU32>() })
    }
}

/// Reads the page list that `list` describes: guest-physical addresses, at most `max` of them.
///
/// # Errors
/// [`Error::PageList`] for a malformed list, [`Error::NotGuestMemory`] for a table outside of guest memory.
pub fn read_page_list(memory: &GuestMemory, list: &PageList, max: u32) -> Result<Vec<u64>, Error> {
    let capacity = match list.levels {
        0 => 1,
        levels @ 1..=3 => 512u64.pow(u32::from(levels)),
        _ => return Err(Error::PageList),
    };
    if list.count == 0 || list.count > max || u64::from(list.count) > capacity || list.reserved != 0
    {
        return Err(Error::PageList);
    }
    let mut level = vec![list.addr];
    for depth in (0..list.levels).rev() {
        // Entries of this level in all: pages covered by one entry shrink by 512 with each level.
        let covers = 512usize.pow(u32::from(depth));
        let entries = (list.count as usize).div_ceil(covers);
        let mut next = Vec::with_capacity(entries);
        for table in &level {
            let words = memory.table(*table).ok_or(Error::NotGuestMemory(*table))?;
            let wanted = entries.saturating_sub(next.len()).min(512);
            next.extend(
                words
                    .iter()
                    .take(wanted)
                    .map(|word| u64::from_le(word.load(Ordering::Relaxed))),
            );
        }
        level = next;
    }
    Ok(level)
}
