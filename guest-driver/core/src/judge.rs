// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What of a completion is believed, where the device is not trusted: which work request it is of
//! and how that fared. All else is known from the record of what was posted, and what disagrees
//! with that is refused.
use virtio_rdma_spec::facts::{completion_opcode, Kind, Opcode};
use virtio_rdma_spec::ring::Cqe;
use virtio_rdma_spec::verbs::{wc_opcode, wc_status};

use crate::record::{Posted, Private, Slots};
use crate::ring::Memory;
use crate::work::{RecvQueue, SendQueue, SharedRecvQueue};

/// Bytes before each datagram.
const GRH: u32 = 40;

/// What of a queue pair completes to the completion queue that is polled.
#[derive(Debug)]
pub struct Completing<'q, M, P> {
    /// Its work requests are datagrams.
    pub datagram: bool,
    /// Its sends, if they do.
    pub sends: Option<&'q SendQueue<M, Private<P>>>,
    /// Its receives, if they do.
    pub receives: Option<Receives<'q, M, P>>,
}

/// Where receives of a queue pair come from.
#[derive(Debug)]
pub enum Receives<'q, M, P> {
    /// Its own queue.
    Own(&'q RecvQueue<M, Private<P>>),
    /// A shared receive queue.
    Shared(&'q SharedRecvQueue<M, Slots<P>>),
}

impl<M: Memory, P: Memory> Completing<'_, M, P> {
    /// Judges a completion that names the queue pair, and frees what it completes, for sends after
    /// a call of `retire` with each index. What its user is told is returned.
    ///
    /// For one at a time, as all that frees entries: under the lock of the completion queue.
    ///
    /// # Errors
    /// No device writes this completion that does what it should; nothing has changed.
    pub fn take(&self, cqe: &Cqe, retire: impl FnMut(u32)) -> Result<Cqe, Violation> {
        if cqe.opcode & wc_opcode::RECV == 0 {
            let sends = self.sends.ok_or(Violation::QueuePair)?;
            let judged = sends.judge(cqe)?;
            sends.completing(cqe.wqe_index).for_each(retire);
            sends.complete(cqe.wqe_index);
            return Ok(judged);
        }
        match self.receives.as_ref().ok_or(Violation::QueuePair)? {
            Receives::Own(queue) => {
                let judged = queue.judge(cqe, self.datagram)?;
                queue.complete(cqe.wqe_index);
                Ok(judged)
            }
            Receives::Shared(queue) => queue.take(cqe, self.datagram),
        }
    }
}

/// Why a completion cannot be one that a device has to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Violation {
    /// Of its queue pair nothing completes to this completion queue.
    QueuePair,
    /// It is of no work request that is outstanding, or not of the one whose turn it is.
    NotOutstanding,
    /// A work request before it, which is signaled, would have completed without a word.
    Skipped,
    /// It is the success of a work request that is not signaled.
    Unsignaled,
    /// It is not of the kind of its work request.
    Opcode,
    /// It is longer than its work request, or shorter than anything that is received.
    Length,
}

impl Violation {
    /// What is wrong, for the log, which adds the number of the queue pair.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::QueuePair => {
                "the device is not trusted: a completion in the wrong queue; queue pair"
            }
            Self::NotOutstanding => {
                "the device is not trusted: a completion of nothing that is outstanding; queue pair"
            }
            Self::Skipped => {
                "the device is not trusted: no completion of a signaled work request; queue pair"
            }
            Self::Unsignaled => {
                "the device is not trusted: a completion that was not asked for; queue pair"
            }
            Self::Opcode => {
                "the device is not trusted: a completion with a wrong opcode; queue pair"
            }
            Self::Length => {
                "the device is not trusted: a completion with a wrong length; queue pair"
            }
        }
    }
}

/// What users are told of a send that was posted like this, for what the device says.
pub(crate) fn sent(cqe: &Cqe, posted: &Posted) -> Result<Cqe, Violation> {
    let opcode = completion_opcode(posted.opcode);
    let success = cqe.status == wc_status::SUCCESS;
    if success && !posted.signaled {
        return Err(Violation::Unsignaled);
    }
    if success && cqe.opcode != opcode {
        return Err(Violation::Opcode);
    }
    let brings = Opcode::of(posted.opcode).is_some_and(|of| Kind::brings(of.kind));
    Ok(Cqe {
        wr_id: posted.wr_id,
        byte_len: if success && brings { posted.length } else { 0 },
        opcode,
        ..outcome(cqe)
    })
}

/// What users are told of a receive of `length` bytes, for what the device says.
pub(crate) fn received(
    cqe: &Cqe,
    wr_id: u64,
    length: u32,
    datagram: bool,
) -> Result<Cqe, Violation> {
    if cqe.status != wc_status::SUCCESS {
        return Ok(Cqe {
            wr_id,
            opcode: wc_opcode::RECV,
            ..outcome(cqe)
        });
    }
    let least = if datagram { GRH } else { 0 };
    match cqe.opcode {
        wc_opcode::RECV if (least..=length).contains(&cqe.byte_len) => {}
        wc_opcode::RECV => return Err(Violation::Length),
        // Its data are not in the receive.
        wc_opcode::RECV_RDMA_WITH_IMM if !datagram => {}
        _ => return Err(Violation::Opcode),
    }
    Ok(Cqe { wr_id, ..*cqe })
}

/// What of a completion is as the device says, whatever it is of.
fn outcome(cqe: &Cqe) -> Cqe {
    Cqe {
        qp_num: cqe.qp_num,
        wqe_index: cqe.wqe_index,
        vendor_err: cqe.vendor_err,
        status: cqe.status,
        ..Cqe::default()
    }
}
