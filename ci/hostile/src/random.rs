// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Numbers that a seed stands for.

/// Numbers drawn from a seed (splitmix64).
#[derive(Debug)]
pub struct Random(u64);

impl Random {
    /// The same seed gives the same numbers.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Random(seed)
    }

    /// Any number.
    pub fn any(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `limit`, which is small beside 2^64.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.any() % limit.max(1)
    }

    /// An index below `limit`.
    pub fn index(&mut self, limit: usize) -> usize {
        self.below(limit as u64) as usize
    }

    /// One of several.
    pub fn of<T: Copy>(&mut self, choices: &[T], default: T) -> T {
        let at = self.index(choices.len());
        choices.get(at).copied().unwrap_or(default)
    }

    /// So many random bytes.
    pub fn bytes(&mut self, length: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(length + 8);
        while bytes.len() < length {
            bytes.extend_from_slice(&self.any().to_le_bytes());
        }
        bytes.truncate(length);
        bytes
    }

    /// A number that is small, has few bits, or is any: what makes wrong fields likely to get past
    /// the first check.
    pub fn odd(&mut self) -> u64 {
        match self.below(4) {
            0 => self.below(16),
            1 => self.below(0x1_0000),
            2 => self.any() & 0x00ff_8003,
            _ => self.any(),
        }
    }
}
