// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The shape of a page list or block list: how many tables it needs and what goes where
//! (specification: "Page lists", "Regions for fast registration").
//!
//! Tables are numbered: first those that hold page addresses or blocks, then those that hold
//! addresses of the former, and so on; the last one is the root.

use virtio_rdma_spec::command::Block;

/// Addresses in a table.
pub const TABLE_ENTRIES: u32 = 512;
/// Blocks in a table of the last level of a block list.
pub const TABLE_BLOCKS: u32 = TABLE_SIZE as u32 / Block::SIZE as u32;
/// Size of a table, bytes.
pub const TABLE_SIZE: usize = 4096;

/// A place in the tables of a page list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot {
    /// Number of the table.
    pub table: u32,
    /// Index of the address in the table, 0 to 511, or of the block, 0 to 255.
    pub index: u32,
}

/// The shape of a page list or block list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageTree {
    count: u32,
    /// Pages or blocks in a table.
    leaf_entries: u32,
    /// Tables per level, from the one with page addresses or blocks up.
    level_tables: [u32; 3],
}

impl PageTree {
    /// The shape for `count` pages; `None` where there are none or too many.
    #[must_use]
    pub fn new(count: u64) -> Option<Self> {
        Self::with_leaves(count, TABLE_ENTRIES)
    }

    /// The shape for `count` blocks, which are in a table even if there is only one; `None` where
    /// there are none or too many.
    #[must_use]
    pub fn of_blocks(count: u64) -> Option<Self> {
        Self::with_leaves(count, TABLE_BLOCKS)
    }

    fn with_leaves(count: u64, leaf_entries: u32) -> Option<Self> {
        let count = u32::try_from(count).ok()?;
        if count == 0 {
            return None;
        }
        let mut level_tables = [0; 3];
        let mut below = count;
        let mut entries = leaf_entries;
        for tables in &mut level_tables {
            // A page needs no table; what is there already needs no further one.
            if below == 1 && entries == TABLE_ENTRIES {
                break;
            }
            *tables = below.div_ceil(entries);
            below = *tables;
            entries = TABLE_ENTRIES;
        }
        (below == 1).then_some(Self {
            count,
            leaf_entries,
            level_tables,
        })
    }

    /// Number of pages or blocks: `PageList::count`.
    #[must_use]
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Levels of tables: `PageList::levels`. With none, `PageList::addr` is the page itself.
    #[must_use]
    pub fn levels(&self) -> u8 {
        self.level_tables
            .iter()
            .filter(|tables| **tables > 0)
            .count() as u8
    }

    /// Tables in all. The last one is the root, whose address is `PageList::addr`.
    #[must_use]
    pub fn tables(&self) -> u32 {
        self.level_tables.iter().sum()
    }

    /// Where the address of a page, or a block, goes; `None` if there are no tables.
    #[must_use]
    pub fn page_slot(&self, page: u32) -> Option<Slot> {
        (self.tables() > 0 && page < self.count).then_some(Slot {
            table: page / self.leaf_entries,
            index: page % self.leaf_entries,
        })
    }

    /// Where the address of a table goes; `None` for the root.
    #[must_use]
    pub fn table_slot(&self, table: u32) -> Option<Slot> {
        let mut first = 0;
        for tables in self.level_tables {
            let next = first + tables;
            if table < next {
                let slot = Slot {
                    table: next + (table - first) / TABLE_ENTRIES,
                    index: (table - first) % TABLE_ENTRIES,
                };
                return (slot.table < self.tables()).then_some(slot);
            }
            first = next;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    #[test]
    fn shapes() {
        let shape = |count| PageTree::new(count).map(|tree| (tree.levels(), tree.tables()));
        assert_eq!(shape(0), None);
        assert_eq!(shape(1), Some((0, 0)));
        assert_eq!(shape(2), Some((1, 1)));
        assert_eq!(shape(512), Some((1, 1)));
        assert_eq!(shape(513), Some((2, 3)));
        assert_eq!(shape(512 * 512), Some((2, 513)));
        assert_eq!(shape(512 * 512 + 1), Some((3, 513 + 2 + 1)));
        assert_eq!(shape(512 * 512 * 512), Some((3, 512 * 512 + 513)));
        assert_eq!(shape(512 * 512 * 512 + 1), None);
        assert_eq!(shape(u64::MAX), None);
        let blocks = |count| PageTree::of_blocks(count).map(|tree| (tree.levels(), tree.tables()));
        assert_eq!(blocks(0), None);
        assert_eq!(blocks(1), Some((1, 1)));
        assert_eq!(blocks(256), Some((1, 1)));
        assert_eq!(blocks(257), Some((2, 3)));
        assert_eq!(blocks(256 * 512), Some((2, 513)));
        assert_eq!(blocks(256 * 512 + 1), Some((3, 513 + 2 + 1)));
        assert_eq!(blocks(256 * 512 * 512 + 1), None);
    }

    proptest! {
        #[test]
        fn walking_down_finds_every_page(count in 2u32..600_000, pick in any::<u32>(), blocks: bool) {
            let tree = if blocks { PageTree::of_blocks(count.into()) } else { PageTree::new(count.into()) };
            let tree = tree.unwrap();
            let leaf = if blocks { TABLE_BLOCKS } else { TABLE_ENTRIES };
            let root = tree.tables() - 1;
            let mut slots = HashMap::new();
            for table in 0..tree.tables() {
                match tree.table_slot(table) {
                    Some(slot) => prop_assert!(slots.insert((slot.table, slot.index), table).is_none()),
                    None => prop_assert_eq!(table, root),
                }
            }
            let page = pick % count;
            let mut table = root;
            for level in (1..tree.levels()).rev() {
                table = slots[&(table, ((page / leaf) >> (9 * u32::from(level - 1))) % 512)];
            }
            prop_assert_eq!(tree.page_slot(page), Some(Slot { table, index: page % leaf }));
            prop_assert_eq!(tree.page_slot(count), None);
        }
    }
}
