// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Where things are in the buffer of a queue: record, rings, strides (specification: "Rings").
use virtio_rdma_spec::ring::{
    recv_stride, send_stride, srd_send_stride, ud_send_stride, CqRecord, Cqe, CqeExtension,
    MaskedOperands, QpRecord, SrqRecord, MASKED_OPERANDS_OFFSET, MAX_CQ_ENTRIES, MAX_WQ_ENTRIES,
    SEND_DATA_OFFSET, SRD_DATA_OFFSET, UD_DATA_OFFSET,
};
use virtio_rdma_spec::PAGE_SIZE;

/// A ring in a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RingLayout {
    /// Entries, a power of two; zero where there is no such queue.
    pub entries: u32,
    /// Stride of the entries, bytes, a power of two.
    pub stride: u32,
    /// Offset of the first entry in the buffer, bytes, a multiple of the stride.
    pub offset: u32,
}

impl RingLayout {
    /// A ring behind the first `end` bytes of a buffer.
    fn behind(end: u32, entries: u32, stride: u32) -> Option<Self> {
        Some(Self {
            entries,
            stride,
            offset: end.checked_next_multiple_of(stride)?,
        })
    }

    /// Offset of the first byte behind the ring.
    fn end(&self) -> Option<u32> {
        self.entries
            .checked_mul(self.stride)?
            .checked_add(self.offset)
    }
}

/// What a queue pair is asked to hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct QpCaps {
    /// Send work requests.
    pub max_send_wr: u32,
    /// Receive work requests.
    pub max_recv_wr: u32,
    /// Scatter/gather entries of a send work request.
    pub max_send_sge: u32,
    /// Scatter/gather entries of a receive work request.
    pub max_recv_sge: u32,
    /// Inline bytes of a send work request.
    pub max_inline: u32,
}

/// The buffer of a queue pair: a `QpRecord`, the send queue, the receive queue. Small queues share
/// one page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QpLayout {
    /// Send queue.
    pub sq: RingLayout,
    /// Receive queue.
    pub rq: RingLayout,
    /// Size of the buffer, bytes, a multiple of the page size.
    pub size: usize,
    /// Inline bytes that an entry of the send queue has room for: what was asked for, or more that
    /// costs nothing.
    inline: u32,
}

impl QpLayout {
    /// The layout for these capabilities; `None` where they are more than the interface can express
    /// (EINVAL).
    #[must_use]
    pub fn new(caps: &QpCaps) -> Option<Self> {
        let stride = send_stride(caps.max_send_sge, caps.max_inline)?;
        Self::with_stride(caps, stride, SEND_DATA_OFFSET)
    }

    /// The same, where send work requests may be masked atomic operations.
    #[must_use]
    pub fn with_masked_atomics(caps: &QpCaps) -> Option<Self> {
        const LEAST: u32 =
            (MASKED_OPERANDS_OFFSET + MaskedOperands::SIZE).next_power_of_two() as u32;
        let stride = send_stride(caps.max_send_sge, caps.max_inline)?;
        Self::with_stride(caps, stride.max(LEAST), SEND_DATA_OFFSET)
    }

    /// The same, for a UD or GSI queue pair.
    #[must_use]
    pub fn datagram(caps: &QpCaps) -> Option<Self> {
        let stride = ud_send_stride(caps.max_send_sge, caps.max_inline)?;
        Self::with_stride(caps, stride, UD_DATA_OFFSET)
    }

    /// The same, for an SRD queue pair.
    #[must_use]
    pub fn reliable_datagram(caps: &QpCaps) -> Option<Self> {
        let stride = srd_send_stride(caps.max_send_sge, caps.max_inline)?;
        Self::with_stride(caps, stride, SRD_DATA_OFFSET)
    }

    /// The inline bytes to grant, where the device takes `limit` at most: all that fit into an
    /// entry, and what was asked for if that is more than the limit.
    #[must_use]
    pub fn max_inline(&self, caps: &QpCaps, limit: u32) -> u32 {
        self.inline.min(limit).max(caps.max_inline)
    }

    fn with_stride(caps: &QpCaps, send_stride: u32, data_offset: usize) -> Option<Self> {
        let sq = RingLayout::behind(
            QpRecord::SIZE as u32,
            wq_entries(caps.max_send_wr)?,
            send_stride,
        )?;
        let rq = RingLayout::behind(
            sq.end()?,
            wq_entries(caps.max_recv_wr)?,
            recv_stride(caps.max_recv_sge)?,
        )?;
        Some(Self {
            sq,
            rq,
            size: pages(rq.end()?)?,
            inline: match sq.entries {
                0 => caps.max_inline,
                _ => send_stride.checked_sub(data_offset as u32)?,
            },
        })
    }
}

/// The buffer of a shared receive queue: an `SrqRecord` and the ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SrqLayout {
    /// The ring.
    pub ring: RingLayout,
    /// Size of the buffer, bytes, a multiple of the page size.
    pub size: usize,
}

impl SrqLayout {
    /// The layout for at least `max_wr` work requests of up to `max_sge` scatter/gather entries;
    /// `None` where there are none or too many (EINVAL).
    #[must_use]
    pub fn new(max_wr: u32, max_sge: u32) -> Option<Self> {
        if max_wr == 0 {
            return None;
        }
        let ring = RingLayout::behind(
            SrqRecord::SIZE as u32,
            wq_entries(max_wr)?,
            recv_stride(max_sge)?,
        )?;
        Some(Self {
            ring,
            size: pages(ring.end()?)?,
        })
    }
}

/// The buffer of a completion queue: a `CqRecord` and the ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CqLayout {
    /// The ring.
    pub ring: RingLayout,
    /// Size of the buffer, bytes, a multiple of the page size.
    pub size: usize,
}

impl CqLayout {
    /// The layout for at least `cqe` entries; `None` where there are none or too many (EINVAL).
    #[must_use]
    pub fn new(cqe: u32) -> Option<Self> {
        Self::with_stride(cqe, Cqe::SIZE as u32)
    }

    /// The same, for entries that have a `CqeExtension`: time stamps.
    #[must_use]
    pub fn extended(cqe: u32) -> Option<Self> {
        Self::with_stride(cqe, (Cqe::SIZE + CqeExtension::SIZE) as u32)
    }

    fn with_stride(cqe: u32, stride: u32) -> Option<Self> {
        if cqe == 0 || cqe > MAX_CQ_ENTRIES {
            return None;
        }
        let ring = RingLayout::behind(CqRecord::SIZE as u32, cqe.next_power_of_two(), stride)?;
        Some(Self {
            ring,
            size: pages(ring.end()?)?,
        })
    }
}

fn wq_entries(wr: u32) -> Option<u32> {
    match wr {
        0 => Some(0),
        1..=MAX_WQ_ENTRIES => Some(wr.next_power_of_two()),
        _ => None,
    }
}

fn pages(end: u32) -> Option<usize> {
    (end as usize).checked_next_multiple_of(PAGE_SIZE as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn small_queues_share_a_page() {
        let layout = QpLayout::new(&QpCaps {
            max_send_wr: 16,
            max_recv_wr: 16,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline: 0,
        })
        .unwrap();
        assert_eq!(layout.size, 4096);
        assert_eq!(
            layout.sq,
            RingLayout {
                entries: 16,
                stride: 64,
                offset: 64
            }
        );
        assert_eq!(
            layout.rq,
            RingLayout {
                entries: 16,
                stride: 32,
                offset: 1088
            }
        );
    }

    #[test]
    fn too_much_is_refused() {
        let caps = QpCaps {
            max_send_wr: 1,
            max_recv_wr: 1,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline: 0,
        };
        assert!(QpLayout::new(&caps).is_some());
        assert!(QpLayout::new(&QpCaps {
            max_send_wr: u32::MAX,
            ..caps
        })
        .is_none());
        assert!(QpLayout::new(&QpCaps {
            max_recv_wr: 32769,
            ..caps
        })
        .is_none());
        assert!(QpLayout::new(&QpCaps {
            max_send_sge: 33,
            ..caps
        })
        .is_none());
        assert!(QpLayout::new(&QpCaps {
            max_recv_sge: u32::MAX,
            ..caps
        })
        .is_none());
        assert!(QpLayout::new(&QpCaps {
            max_inline: 977,
            ..caps
        })
        .is_none());
        assert!(QpLayout::datagram(&QpCaps {
            max_inline: 961,
            ..caps
        })
        .is_none());
        assert!(SrqLayout::new(0, 1).is_none());
        assert!(SrqLayout::new(32769, 1).is_none());
        assert!(SrqLayout::new(1, 33).is_none());
        assert!(CqLayout::new(0).is_none());
        assert!(CqLayout::new(u32::MAX).is_none());
    }

    proptest! {
        #[test]
        fn queues_do_not_overlap_and_entries_do_not_straddle_pages(
            max_send_wr in 0u32..=32768,
            max_recv_wr in 0u32..=32768,
            max_send_sge in 0u32..=32,
            max_recv_sge in 0u32..=32,
            max_inline in 0u32..=960,
        ) {
            let caps = QpCaps { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline };
            let layouts = [
                (48, QpLayout::new(&caps)),
                (48, QpLayout::with_masked_atomics(&caps)),
                (64, QpLayout::datagram(&caps)),
            ];
            for (data_offset, layout) in layouts {
                let layout = layout.unwrap();
                let (sq, rq) = (layout.sq, layout.rq);
                prop_assert!(sq.offset >= 64);
                prop_assert!(rq.offset >= sq.offset + sq.entries * sq.stride);
                prop_assert!((rq.offset + rq.entries * rq.stride) as usize <= layout.size);
                prop_assert_eq!(layout.size % 4096, 0);
                for ring in [sq, rq] {
                    prop_assert_eq!(ring.offset % ring.stride, 0);
                    prop_assert_eq!(4096 % ring.stride, 0);
                    prop_assert!(ring.entries == 0 || ring.entries.is_power_of_two());
                }
                prop_assert!(sq.entries >= max_send_wr && rq.entries >= max_recv_wr);
                prop_assert!(sq.stride >= data_offset + (16 * max_send_sge).max(max_inline));
                // What is granted is what fits, and no other layout.
                let inline = layout.max_inline(&caps, 976);
                prop_assert!(inline >= max_inline && data_offset + inline <= sq.stride);
                prop_assert!(sq.entries == 0 || inline >= 16);
                prop_assert_eq!(layout.max_inline(&caps, max_inline), max_inline);
                let granted = QpCaps { max_inline: inline, ..caps };
                let again = if data_offset == 64 { QpLayout::datagram(&granted) } else { QpLayout::new(&granted) };
                prop_assert!(again.unwrap().sq.stride <= sq.stride);
                prop_assert!(rq.stride >= 16 + 16 * max_recv_sge);
            }
            prop_assert!(QpLayout::with_masked_atomics(&caps).unwrap().sq.stride >= 80);
        }

        #[test]
        fn shared_receive_and_completion_queues_fit(max_wr in 1u32..=32768, max_sge in 0u32..=32, cqe in 1u32..=1 << 20) {
            let srq = SrqLayout::new(max_wr, max_sge).unwrap();
            prop_assert!(srq.ring.offset >= 128 && srq.ring.entries >= max_wr && srq.ring.stride >= 16 + 16 * max_sge);
            let cq = CqLayout::new(cqe).unwrap();
            let extended = CqLayout::extended(cqe).unwrap();
            prop_assert_eq!((cq.ring.stride, extended.ring.stride), (32, 64));
            prop_assert!(cq.ring.entries >= cqe && extended.ring.entries == cq.ring.entries);
            for (ring, size) in [(srq.ring, srq.size), (cq.ring, cq.size), (extended.ring, extended.size)] {
                prop_assert!((ring.offset + ring.entries * ring.stride) as usize <= size);
                prop_assert_eq!((ring.offset % ring.stride, size % 4096), (0, 0));
            }
        }
    }
}
