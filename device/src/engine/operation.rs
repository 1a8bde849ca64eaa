// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What work requests do, by their opcodes, and what they need for it beyond addresses and keys.
use virtio_rdma_spec::config::feature;
use virtio_rdma_spec::ring::{
    BindMw, FastReg, MaskedOperands, SendWqe, Sge, BIND_MW_OFFSET, FAST_REG_OFFSET,
    MASKED_OPERANDS_OFFSET,
};
use virtio_rdma_spec::verbs::{
    access, flush_level, flush_type, qp_type, vendor_err, wc_status, wr_opcode,
};

use super::queue::WorkQueue;
use crate::memory::{atomic, Pages};

/// What a work request does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Sends a message to a receive.
    Send,
    /// Writes remote memory.
    Write,
    /// Reads remote memory.
    Read,
    /// Changes a word of remote memory and brings what it was.
    Atomic,
    /// Writes a word of remote memory.
    AtomicWrite,
    /// Makes what was written visible.
    Flush,
    /// Binds a memory window.
    Bind,
    /// Invalidates a local key.
    Invalidate,
    /// Registers a fast region.
    Register,
}

impl Kind {
    /// What `opcode` does, and the features of which it needs one, if there are any.
    #[must_use]
    pub fn of(opcode: u8) -> Option<(Self, &'static [u32])> {
        const INVALIDATION: &[u32] = &[feature::MW, feature::FAST_REG];
        const ATOMIC: &[u32] = &[feature::ATOMIC];
        Some(match opcode {
            wr_opcode::SEND | wr_opcode::SEND_WITH_IMM => (Self::Send, &[]),
            wr_opcode::SEND_WITH_INV => (Self::Send, INVALIDATION),
            wr_opcode::RDMA_WRITE | wr_opcode::RDMA_WRITE_WITH_IMM => (Self::Write, &[]),
            wr_opcode::RDMA_READ => (Self::Read, &[]),
            wr_opcode::RDMA_READ_WITH_INV => (Self::Read, &[feature::FAST_REG]),
            wr_opcode::ATOMIC_CMP_AND_SWP
            | wr_opcode::ATOMIC_FETCH_AND_ADD
            | wr_opcode::MASKED_ATOMIC_CMP_AND_SWP
            | wr_opcode::MASKED_ATOMIC_FETCH_AND_ADD => (Self::Atomic, ATOMIC),
            wr_opcode::ATOMIC_WRITE => (Self::AtomicWrite, ATOMIC),
            wr_opcode::FLUSH => (Self::Flush, &[feature::FLUSH]),
            wr_opcode::BIND_MW => (Self::Bind, &[feature::MW]),
            wr_opcode::LOCAL_INV => (Self::Invalidate, INVALIDATION),
            wr_opcode::REG_MR => (Self::Register, &[feature::FAST_REG]),
            _ => return None,
        })
    }

    /// Whether queue pairs of this type do it.
    #[must_use]
    pub fn allowed(self, opcode: u8, qp_type: u8) -> bool {
        match qp_type {
            qp_type::RC | qp_type::XRC_INI => true,
            qp_type::UC => matches!(
                self,
                Self::Send | Self::Write | Self::Bind | Self::Invalidate | Self::Register
            ),
            qp_type::UD | qp_type::GSI => {
                matches!(opcode, wr_opcode::SEND | wr_opcode::SEND_WITH_IMM)
            }
            _ => false,
        }
    }

    /// Whether its payload may be in the entry itself.
    #[must_use]
    pub fn may_be_inline(self) -> bool {
        matches!(self, Self::Send | Self::Write | Self::AtomicWrite)
    }

    /// Whether it is done at the requester, with no message to anybody.
    #[must_use]
    pub fn is_local(self) -> bool {
        matches!(self, Self::Bind | Self::Invalidate | Self::Register)
    }

    /// Whether it brings data, to which its scatter/gather list must lead.
    #[must_use]
    pub fn brings(self) -> bool {
        matches!(self, Self::Read | Self::Atomic)
    }
}

/// What a message asks for beyond moving data.
#[derive(Debug, Clone, Copy)]
pub enum Operation {
    /// Nothing.
    None,
    /// An atomic operation.
    Atomic(atomic::Operation),
    /// FLUSH with this access, of a range of this length, or of all that the key is for.
    Flush(u32, Option<u64>),
    /// A window is bound.
    Bind(BindMw),
    /// A fast region is registered.
    Register(FastReg),
}

/// An error of an entry: `wc_status` and `vendor_err`.
type Refused = (u8, u8);

const FLAGS: Refused = (wc_status::LOC_QP_OP_ERR, vendor_err::FLAGS);
const TOO_LONG: Refused = (wc_status::LOC_QP_OP_ERR, vendor_err::TOO_LONG_ENTRY);

impl Operation {
    /// The operation of the current entry of `queue`, of which `wqe` is a copy.
    pub(super) fn read(queue: &WorkQueue, buffer: &Pages, wqe: &SendWqe) -> Result<Self, Refused> {
        match wqe.opcode {
            wr_opcode::ATOMIC_CMP_AND_SWP => Ok(Self::Atomic(atomic::Operation::CompareSwap {
                compare: wqe.operand0,
                compare_mask: u64::MAX,
                swap: wqe.operand1,
                swap_mask: u64::MAX,
            })),
            wr_opcode::ATOMIC_FETCH_AND_ADD => Ok(Self::Atomic(atomic::Operation::FetchAdd {
                add: wqe.operand0,
                boundary: 0,
            })),
            wr_opcode::MASKED_ATOMIC_CMP_AND_SWP => {
                let masks = read_masks(queue, buffer, wqe)?;
                Ok(Self::Atomic(atomic::Operation::CompareSwap {
                    compare: wqe.operand0,
                    compare_mask: masks.mask0,
                    swap: wqe.operand1,
                    swap_mask: masks.mask1,
                }))
            }
            wr_opcode::MASKED_ATOMIC_FETCH_AND_ADD => {
                let masks = read_masks(queue, buffer, wqe)?;
                Ok(Self::Atomic(atomic::Operation::FetchAdd {
                    add: wqe.operand0,
                    boundary: masks.mask0,
                }))
            }
            wr_opcode::FLUSH => read_flush(wqe),
            wr_opcode::BIND_MW => {
                let bind = read_operands(queue, buffer, BIND_MW_OFFSET);
                Ok(Self::Bind(BindMw::from_bytes(&bind)))
            }
            wr_opcode::REG_MR => {
                let reg = read_operands(queue, buffer, FAST_REG_OFFSET);
                Ok(Self::Register(FastReg::from_bytes(&reg)))
            }
            _ => Ok(Self::None),
        }
    }
}

/// The `N` bytes of operands at `within`.
fn read_operands<const N: usize>(queue: &WorkQueue, buffer: &Pages, within: usize) -> [u8; N] {
    let mut bytes = [0; N];
    for (i, chunk) in bytes.chunks_exact_mut(8).enumerate() {
        chunk.copy_from_slice(&queue.word(buffer, within + 8 * i));
    }
    bytes
}

/// The masks of a masked atomic operation, which follow its only scatter/gather entry.
fn read_masks(queue: &WorkQueue, buffer: &Pages, wqe: &SendWqe) -> Result<MaskedOperands, Refused> {
    const _: () = assert!(SendWqe::SIZE + Sge::SIZE == MASKED_OPERANDS_OFFSET);
    let end = MASKED_OPERANDS_OFFSET + MaskedOperands::SIZE;
    if wqe.count > 1 || (queue.stride as usize) < end {
        return Err(TOO_LONG);
    }
    let masks = read_operands(queue, buffer, MASKED_OPERANDS_OFFSET);
    Ok(MaskedOperands::from_bytes(&masks))
}

fn read_flush(wqe: &SendWqe) -> Result<Operation, Refused> {
    let [kind, level, rest @ ..] = wqe.operand1.to_le_bytes();
    let known = flush_type::GLOBAL | flush_type::PERSISTENT;
    if kind == 0 || kind & !known != 0 || rest != [0; 6] {
        return Err(FLAGS);
    }
    let mut wanted = 0;
    if kind & flush_type::GLOBAL != 0 {
        wanted |= access::FLUSH_GLOBAL;
    }
    if kind & flush_type::PERSISTENT != 0 {
        wanted |= access::FLUSH_PERSISTENT;
    }
    match level {
        flush_level::RANGE => Ok(Operation::Flush(wanted, Some(wqe.operand0))),
        flush_level::MR => Ok(Operation::Flush(wanted, None)),
        _ => Err(FLAGS),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_type_of_queue_pair_has_its_opcodes() {
        let has = |opcode, qp_type| {
            Kind::of(opcode).is_some_and(|(kind, _)| kind.allowed(opcode, qp_type))
        };
        for opcode in 0..=255 {
            let known = matches!(opcode, 0..=9 | 11..=15 | 32);
            let unreliable = matches!(opcode, 0..=3 | 7..=9 | 32);
            assert_eq!(has(opcode, qp_type::RC), known, "{opcode}");
            assert_eq!(has(opcode, qp_type::XRC_INI), known, "{opcode}");
            assert_eq!(has(opcode, qp_type::UC), unreliable, "{opcode}");
            assert_eq!(has(opcode, qp_type::UD), matches!(opcode, 2 | 3));
            assert_eq!(has(opcode, qp_type::GSI), matches!(opcode, 2 | 3));
            assert!(!has(opcode, qp_type::XRC_TGT));
        }
    }

    #[test]
    fn flush_needs_a_type_and_a_level() {
        let read = |operand1| {
            read_flush(&SendWqe {
                operand0: 9,
                operand1,
                ..SendWqe::default()
            })
        };
        let (global, persistent) = (access::FLUSH_GLOBAL, access::FLUSH_PERSISTENT);
        assert!(matches!(read(1), Ok(Operation::Flush(a, Some(9))) if a == global));
        assert!(matches!(read(0x103), Ok(Operation::Flush(a, None)) if a == global | persistent));
        for bad in [0, 4, 0x100, 0x201, 0x1_0001, 1 << 63 | 1] {
            assert_eq!(read(bad).err(), Some(FLAGS), "{bad:#x}");
        }
    }
}
