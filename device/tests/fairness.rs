// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a VM gets of a worker beside a neighbour that wants all of it, and what is work at all:
//! counted in messages and rounds of the scheduler, with a worker that does a round when it is told
//! to.
use std::path::PathBuf;
use std::sync::Arc;

use vhost_device_rdma::adapter::{Adapter, AdapterSettings};
use vhost_device_rdma::front_end::Server;
use vhost_device_rdma::rnic::RnicSettings;
use vhost_device_rdma::sandbox::Sandbox;
use vhost_device_rdma::socket::{Access, BoundSocket};
use vhost_device_rdma::vhost_user;
use vhost_device_rdma::worker::Loop;
use vhost_device_rdma_bare::core::buffer::QpCaps;
use vhost_device_rdma_bare::spec::ring::SendWqe;
use vhost_device_rdma_bare::spec::verbs::{access, wc_status, wr_opcode};
use vhost_device_rdma_bare::{
    Connection, Context, Cq, Mr, Pd, Placement, Qp, QpOptions, Vm, VmOptions,
};

/// Bytes of a message.
const SHORT: u32 = 64;
const LONG: u32 = 64 << 10;
/// Rounds in which anything must be done.
const ROUNDS: u32 = 1_000_000;

/// Four VMs and a worker. The first sends to the second, which is the victim's; the third to the
/// fourth, which is the neighbour's.
struct Bed {
    // Dropped in this order: the host serves the others to the end.
    victim: Flow,
    neighbour: Flow,
    host: Host,
}

/// The device.
struct Host {
    work: Loop,
    adapter: Arc<Adapter>,
    servers: Vec<Server>,
    directory: PathBuf,
}

/// From one VM to another.
struct Flow {
    // Dropped in this order: each before what it needs.
    qps: Vec<Qp>,
    _peers: Vec<Qp>,
    cq: Arc<Cq>,
    from: Mr,
    to: Mr,
    size: u32,
    entries: u32,
}

impl Flow {
    fn new(from: &Arc<Vm>, to: &Arc<Vm>, (count, entries, size): (u32, u32, u32)) -> Self {
        let contexts = [from, to].map(|vm| Context::new(vm).unwrap());
        let pds = [from, to].map(|vm| Pd::new(vm).unwrap());
        let rights = access::LOCAL_WRITE | access::REMOTE_WRITE;
        let [from_mr, to_mr] = [&pds[0], &pds[1]].map(|pd| pd.register(1 << 20, rights).unwrap());
        let cq = Cq::new(from, count * entries, 0).unwrap();
        let other = Cq::new(to, 1, 0).unwrap();
        let (mut qps, mut peers) = (Vec::new(), Vec::new());
        for _ in 0..count {
            let options = |max_send_wr| QpOptions {
                caps: QpCaps {
                    max_send_wr,
                    max_recv_wr: 1,
                    max_send_sge: 1,
                    max_recv_sge: 1,
                    max_inline: 0,
                },
                ..QpOptions::default()
            };
            let qp = Qp::new(&contexts[0], &pds[0], &cq, &cq, &options(entries)).unwrap();
            let peer = Qp::new(&contexts[1], &pds[1], &other, &other, &options(1)).unwrap();
            qp.connect(&Connection::to(&peer)).unwrap();
            peer.connect(&Connection::to(&qp)).unwrap();
            qps.push(qp);
            peers.push(peer);
        }
        Self {
            qps,
            _peers: peers,
            cq,
            from: from_mr,
            to: to_mr,
            size,
            entries,
        }
    }

    /// Posts so many WRITEs to each queue pair.
    fn post(&self, count: u32) {
        let wqe = SendWqe {
            opcode: wr_opcode::RDMA_WRITE,
            remote_addr: self.to.iova,
            rkey: self.to.rkey,
            ..SendWqe::default()
        };
        for qp in &self.qps {
            for _ in 0..count {
                let sges = [self.from.sge(0, self.size)];
                qp.send_queue().post(&wqe, sges).unwrap();
            }
            qp.ring().unwrap();
        }
    }

    /// Messages that have completed since the last call.
    fn completed(&self) -> u32 {
        let mut count = 0;
        while let Some(cqe) = self.cq.poll() {
            assert_eq!(cqe.status, wc_status::SUCCESS);
            let qp = self.qps.iter().find(|qp| qp.number() == cqe.qp_num);
            qp.unwrap().send_queue().complete(cqe.wqe_index);
            count += 1;
        }
        count
    }

    fn all(&self) -> u32 {
        self.qps.len() as u32 * self.entries
    }
}

/// Queue pairs, entries of each, and bytes of a message.
type Size = (u32, u32, u32);

impl Bed {
    fn new(name: &str, victim: Size, neighbour: Size) -> Self {
        let directory =
            std::env::temp_dir().join(format!("fairness-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let (adapter, mut work) = Adapter::without_threads(&AdapterSettings::default()).unwrap();
        let mut servers = Vec::new();
        let vms = [1, 2, 3, 4].map(|i| {
            let path = directory.join(format!("vm{i}"));
            let settings = RnicSettings {
                name: path.display().to_string(),
                mac: [0x52, 0x54, 0, 0, 0, i],
                ..RnicSettings::default()
            };
            let socket = BoundSocket::bind(&path, &Access::default()).unwrap();
            let sandbox = Sandbox::default();
            servers.push(vhost_user::serve(socket, adapter.clone(), settings, &sandbox).unwrap());
            let options = VmOptions {
                placement: Placement::Contiguous,
                ..VmOptions::default()
            };
            Vm::connect(&path, options).unwrap()
        });
        Self {
            victim: Flow::new(&vms[0], &vms[1], victim),
            neighbour: Flow::new(&vms[2], &vms[3], neighbour),
            host: Host {
                work: work.pop().unwrap(),
                adapter,
                servers,
                directory,
            },
        }
    }

    /// Both have all of their entries posted. Returns how many messages of the victim and of the
    /// neighbour are carried out in the rounds at the end of which both have more.
    fn beside(&mut self) -> (u32, u32) {
        self.neighbour.post(self.neighbour.entries);
        self.victim.post(self.victim.entries);
        let (mut own, mut others) = (0, 0);
        for _ in 0..ROUNDS {
            let before = (own, others);
            self.host.work.round();
            others += self.neighbour.completed();
            own += self.victim.completed();
            if own == self.victim.all() {
                assert!(
                    others < self.neighbour.all(),
                    "the neighbour had too little"
                );
                return before;
            }
        }
        panic!("{own} of {} are carried out", self.victim.all());
    }

    /// How many rounds a message of the victim takes at most, while the neighbour has work.
    fn longest_wait(&mut self) -> u32 {
        self.neighbour.post(self.neighbour.entries);
        let mut others = 0;
        let mut longest = 0;
        // From the start, when all of the neighbour's doorbells have just rung.
        loop {
            self.victim.post(1);
            let mut rounds = 0;
            while self.victim.completed() == 0 {
                assert!(rounds < ROUNDS, "it is never carried out");
                self.host.work.round();
                rounds += 1;
                others += self.neighbour.completed();
            }
            if others == self.neighbour.all() {
                return longest;
            }
            longest = longest.max(rounds);
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.servers.drain(..).map(Server::end).for_each(drop);
        self.adapter.shutdown();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// What is 0.9 of a fair share for one of two has the other get this much at most.
fn assert_fair(own: u32, others: u32) {
    let share = f64::from(own) / f64::from(own + others);
    assert!(
        share >= 0.45,
        "{own} of the victim and {others} of the neighbour"
    );
}

#[test]
fn beside_many_queue_pairs_with_the_same_messages_a_vm_has_its_share() {
    for (name, size) in [("short", SHORT), ("long", LONG)] {
        for count in [1, 16] {
            let entries = 1024 / count;
            let mut bed = Bed::new(
                &format!("{name}-{count}"),
                (count, entries, size),
                (100, 64, size),
            );
            let (own, others) = bed.beside();
            assert!(own > bed.victim.all() / 2, "too few rounds: {own}");
            assert_fair(own, others);
        }
    }
}

#[test]
fn no_message_waits_for_more_than_two_rounds_beside_a_flood() {
    for (name, flood) in [
        ("long-messages", (100, 8, LONG)),
        ("short-messages", (100, 64, SHORT)),
        ("one-queue-pair", (1, 512, LONG)),
    ] {
        let mut bed = Bed::new(name, (1, 16, SHORT), flood);
        let rounds = bed.longest_wait();
        assert!((1..=2).contains(&rounds), "{name}: {rounds} rounds");
    }
}

#[test]
fn a_doorbell_that_rings_for_nothing_is_no_work() {
    let mut bed = Bed::new("no-work", (1, 16, SHORT), (1, 1, SHORT));
    while bed.host.work.round() {}
    for _ in 0..10 {
        bed.victim.post(1);
        assert!(bed.host.work.round());
        assert_eq!(bed.victim.completed(), 1);
        // As a doorbell does whose work request was found before by busy polling.
        bed.victim.qps[0].ring().unwrap();
        assert!(!bed.host.work.round());
    }
}
