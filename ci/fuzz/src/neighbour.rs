// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A VM that keeps to the rules beside one that does not, and must not notice.
use serde_json::Value;
use virtio_rdma_spec::ring::{SendWqe, Sge};
use virtio_rdma_spec::verbs::{access, qp_type, send_flag, wc_status, wr_opcode};

use crate::host::{Guest, Host, FEATURES, PAGE};
use crate::queues::{Cq, Mr, Qp, Refs, REMOTE};

/// Number of the VM: the last byte of its GID.
pub const NUMBER: u8 = 99;
/// Rounds that the worker may take for a message: others have their turns, too.
const ROUNDS: usize = 10_000;

/// The VM, with a queue pair that is connected to another of its own.
pub struct Neighbour {
    guest: Guest,
    qps: [Qp; 2],
    cq: Cq,
    mr: Mr,
    messages: u64,
    counts: Value,
}

impl Neighbour {
    /// Brings it up.
    ///
    /// # Panics
    /// If the device refuses anything.
    #[must_use]
    pub fn new(host: &Host) -> Self {
        let mut guest = host.guest(NUMBER, FEATURES);
        let context = guest.context().expect("a context");
        let pd = guest
            .create(virtio_rdma_spec::command::opcode::CREATE_PD)
            .expect("a protection domain");
        let cq = guest.cq().expect("a completion queue");
        let mr = guest
            .mr(pd, access::LOCAL_WRITE | REMOTE, 2)
            .expect("a region");
        let refs = Refs {
            pd,
            cq: cq.number,
            ..Refs::default()
        };
        let qps = [0, 1].map(|_| guest.qp(qp_type::RC, context, refs).expect("a queue pair"));
        for (qp, peer) in [(&qps[0], &qps[1]), (&qps[1], &qps[0])] {
            guest
                .connect(qp, guest.gid, peer.number)
                .expect("a connection");
        }
        let counts = guest.status()["counts"].clone();
        Self {
            guest,
            qps,
            cq,
            mr,
            messages: 0,
            counts,
        }
    }

    /// Sends a message from one page to another, and looks at what came.
    ///
    /// # Panics
    /// If it did not come as it was sent, or objects are missing or more.
    pub fn check(&mut self, host: &mut Host) {
        self.messages += 1;
        let from = self.mr.page * PAGE;
        let data: Vec<u8> = (0..200u64)
            .map(|i| (i.wrapping_mul(self.messages) >> 1) as u8 ^ 0x35)
            .collect();
        self.guest.view.write(from, &data);
        let wqe = SendWqe {
            opcode: wr_opcode::RDMA_WRITE,
            flags: send_flag::SIGNALED,
            count: 1,
            wr_id: self.messages,
            remote_addr: self.mr.iova + PAGE as u64 + 8,
            rkey: self.mr.key,
            ..SendWqe::default()
        };
        let sge = Sge {
            addr: self.mr.iova,
            length: data.len() as u32,
            lkey: self.mr.key,
        };
        let [qp, _] = &mut self.qps;
        let entry = [&wqe.to_bytes()[..], &sge.to_bytes()].concat();
        qp.sq.post(&self.guest, &entry);
        self.guest.ring_qp(qp);
        let mut rounds = 0;
        let cqe = loop {
            host.rounds(1);
            rounds += 1;
            match self.cq.take(&self.guest) {
                Some(cqe) => break cqe,
                None => assert!(rounds < ROUNDS, "the neighbour is not served"),
            }
        };
        assert_eq!((cqe.status, cqe.wr_id), (wc_status::SUCCESS, self.messages));
        let got = self.guest.view.get(from + PAGE + 8, data.len());
        assert!(got == data, "the neighbour's data are wrong");
        assert_eq!(
            self.guest
                .view
                .u64(from + PAGE)
                .load(std::sync::atomic::Ordering::Relaxed),
            0
        );
        let counts = self.guest.status()["counts"].clone();
        assert_eq!(counts, self.counts);
    }

    /// It goes away.
    pub fn leave(self, host: &mut Host) {
        host.remove(self.guest);
    }
}
