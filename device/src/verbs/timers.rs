// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the codes of timers stand for.

/// The time that an RNR NAK timer code stands for, nanoseconds (InfiniBand architecture
/// specification, volume 1, table 45).
#[must_use]
pub fn rnr_nanoseconds(code: u8) -> u64 {
    /// Units of 10 microseconds.
    const TABLE: [u64; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024,
        1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];
    TABLE.get(usize::from(code)).copied().unwrap_or(65536) * 10_000
}
