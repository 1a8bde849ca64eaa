// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What work requests need beyond addresses and keys.
use virtio_rdma_spec::ring::{
    BindMw, FastReg, MaskedOperands, SendWqe, Sge, BIND_MW_OFFSET, FAST_REG_OFFSET,
    MASKED_OPERANDS_OFFSET,
};
use virtio_rdma_spec::verbs::{access, flush_level, flush_type, vendor_err, wc_status, wr_opcode};

use crate::memory::atomic::AtomicOperation;
use crate::memory::Pages;
use crate::verbs::work_queue::WorkQueue;
use crate::verbs::WcError;

/// What a message asks for beyond moving data.
#[derive(Debug, Clone, Copy)]
pub enum Operation {
    /// Nothing was read yet.
    None,
    /// An atomic operation.
    Atomic(AtomicOperation),
    /// FLUSH with this access, of a range of this length, or of all that the key is for.
    Flush(u32, Option<u64>),
    /// A window is bound.
    Bind(BindMw),
    /// A fast region is registered.
    Register(FastReg),
}

const FLAGS: WcError = WcError::new(wc_status::LOC_QP_OP_ERR, vendor_err::FLAGS);
const OPCODE: WcError = WcError::new(wc_status::LOC_QP_OP_ERR, vendor_err::OPCODE);
const TOO_LONG: WcError = WcError::new(wc_status::LOC_QP_OP_ERR, vendor_err::TOO_LONG_ENTRY);

/// The access that FLUSH of these types (`flush_type`) needs; `None` if it is of none, or of one that
/// nobody knows.
pub(crate) fn flush_access(kind: u8) -> Option<u32> {
    let known = flush_type::GLOBAL | flush_type::PERSISTENT;
    if kind == 0 || kind & !known != 0 {
        return None;
    }
    let mut wanted = 0;
    if kind & flush_type::GLOBAL != 0 {
        wanted |= access::FLUSH_GLOBAL;
    }
    if kind & flush_type::PERSISTENT != 0 {
        wanted |= access::FLUSH_PERSISTENT;
    }
    Some(wanted)
}

impl Operation {
    /// The operation of the current entry of `queue`, of which `wqe` is a copy.
    pub(super) fn read(queue: &WorkQueue, buffer: &Pages, wqe: &SendWqe) -> Result<Self, WcError> {
        match wqe.opcode {
            wr_opcode::ATOMIC_CMP_AND_SWP => Ok(Self::Atomic(AtomicOperation::CompareSwap {
                compare: wqe.operand0,
                compare_mask: u64::MAX,
                swap: wqe.operand1,
                swap_mask: u64::MAX,
            })),
            wr_opcode::ATOMIC_FETCH_AND_ADD => Ok(Self::Atomic(AtomicOperation::FetchAdd {
                add: wqe.operand0,
                boundary: 0,
            })),
            wr_opcode::MASKED_ATOMIC_CMP_AND_SWP => {
                let masks = read_masks(queue, buffer, wqe)?;
                Ok(Self::Atomic(AtomicOperation::CompareSwap {
                    compare: wqe.operand0,
                    compare_mask: masks.mask0,
                    swap: wqe.operand1,
                    swap_mask: masks.mask1,
                }))
            }
            wr_opcode::MASKED_ATOMIC_FETCH_AND_ADD => {
                let masks = read_masks(queue, buffer, wqe)?;
                Ok(Self::Atomic(AtomicOperation::FetchAdd {
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
            // A kind with operands, and no operands that are known.
            _ => Err(OPCODE),
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
fn read_masks(queue: &WorkQueue, buffer: &Pages, wqe: &SendWqe) -> Result<MaskedOperands, WcError> {
    const _: () = assert!(SendWqe::SIZE + Sge::SIZE == MASKED_OPERANDS_OFFSET);
    let end = MASKED_OPERANDS_OFFSET + MaskedOperands::SIZE;
    if wqe.count > 1 || (queue.stride as usize) < end {
        return Err(TOO_LONG);
    }
    let masks = read_operands(queue, buffer, MASKED_OPERANDS_OFFSET);
    Ok(MaskedOperands::from_bytes(&masks))
}

fn read_flush(wqe: &SendWqe) -> Result<Operation, WcError> {
    let [kind, level, rest @ ..] = wqe.operand1.to_le_bytes();
    let wanted = flush_access(kind).ok_or(FLAGS)?;
    if rest != [0; 6] {
        return Err(FLAGS);
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
