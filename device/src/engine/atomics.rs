// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Messages that do more than moving data: atomic operations, ATOMIC_WRITE, FLUSH.
use std::sync::atomic::{fence, AtomicU64, Ordering};

use virtio_rdma_spec::verbs::{access, vendor_err, wc_status};

use super::cursor::{fetch, DataSource, Fault, Part, Sink};
use super::message::{Answer, Message};
use super::responder::{MessageContext, Responder};
use crate::memory::atomic::{self, AtomicOperation};
use crate::verbs::WcError;

impl Responder {
    /// Does `f` with the word that a message names, if the peer may access it as `wanted` says.
    fn with_word(
        &self,
        at: &MessageContext<'_>,
        message: &Message,
        wanted: u32,
        f: impl FnOnce(&AtomicU64) -> Answer,
    ) -> Answer {
        if self.access & wanted != wanted {
            return self.invalid_request(at.tables, at.qp, vendor_err::QP_ACCESS);
        }
        let addr = message.remote_addr;
        if addr % 8 != 0 {
            return self.invalid_request(at.tables, at.qp, vendor_err::ALIGNMENT);
        }
        // The grant lives until the word was accessed: nobody unbinds a window meanwhile.
        let keys = &at.tables.keys;
        let grant = match keys.grant(message.rkey, at.remote(), wanted, addr, 8) {
            Ok(grant) => grant,
            Err(key) => return self.violation(at, key.0),
        };
        match grant.range_at(addr, 8) {
            Ok(range) => match range.word() {
                Some(word) => f(word),
                // Where the region's first byte is not where its address says, modulo 8.
                None => self.invalid_request(at.tables, at.qp, vendor_err::ALIGNMENT),
            },
            Err(key) => self.violation(at, key.0),
        }
    }

    /// An atomic operation. If `sink` leads to memory of the requester, that has been checked.
    pub(super) fn atomic(
        &self,
        at: &MessageContext<'_>,
        message: &Message,
        operation: AtomicOperation,
        mut sink: Sink<'_>,
    ) -> Answer {
        if self.max_rd_atomic == 0 {
            return self.invalid_request(at.tables, at.qp, vendor_err::RD_ATOMIC);
        }
        self.with_word(at, message, access::REMOTE_ATOMIC, |word| {
            let Some(old) = operation.execute(word) else {
                return Answer::Busy;
            };
            let old = old.to_le_bytes();
            let placed = sink.fill(&mut DataSource::Bytes(&old), Part::whole(8));
            match placed {
                Ok(()) => Answer::Done,
                Err(Fault::Source(key) | Fault::Destination(key)) => {
                    Answer::Local(WcError::new(wc_status::LOC_PROT_ERR, key.0))
                }
            }
        })
    }

    /// ATOMIC_WRITE of the 8 bytes of `source`.
    pub(super) fn atomic_write(
        &self,
        at: &MessageContext<'_>,
        message: &Message,
        mut source: DataSource<'_>,
    ) -> Answer {
        let mut bytes = [0; 8];
        if let Err(key) = fetch(&mut source, &mut bytes) {
            return Answer::Local(WcError::new(wc_status::LOC_PROT_ERR, key.0));
        }
        self.with_word(at, message, access::REMOTE_WRITE, |word| {
            atomic::store(word, bytes);
            Answer::Done
        })
    }

    /// FLUSH with access `wanted`, of `range` bytes or of all that the key is for.
    pub(super) fn flush_memory(
        &self,
        at: &MessageContext<'_>,
        message: &Message,
        wanted: u32,
        range: Option<u64>,
    ) -> Answer {
        // No queue pair has a right to persistence to refuse: the region does.
        if wanted & !self.access & !access::FLUSH_PERSISTENT != 0 {
            return self.invalid_request(at.tables, at.qp, vendor_err::QP_ACCESS);
        }
        let (key, addr) = (message.rkey, message.remote_addr);
        let keys = &at.tables.keys;
        let granted = match range {
            Some(0) => Ok(()),
            Some(len) => keys
                .grant(key, at.remote(), wanted, addr, len)
                .and_then(|grant| grant.range_at(addr, 1).map(|_| ())),
            None => keys.check_whole(key, at.remote(), wanted),
        };
        match granted {
            Ok(()) => {
                // Memory is coherent: what was stored before a full fence is visible to all who
                // look after it.
                fence(Ordering::SeqCst);
                Answer::Done
            }
            Err(key) => self.violation(at, key.0),
        }
    }
}
