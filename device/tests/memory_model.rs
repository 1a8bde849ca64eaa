// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The chapter "Memory model" of the specification, statement by statement: random work requests of
//! several queues, run by a device whose workers do a round when they are told to, against a model
//! of what keys and memory must be.
use std::cell::RefCell;
use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestRunner};
use vhost_device_rdma::adapter::{Adapter, AdapterSettings};
use vhost_device_rdma::front_end::Server;
use vhost_device_rdma::rnic::RnicSettings;
use vhost_device_rdma::sandbox::Sandbox;
use vhost_device_rdma::socket::{Access, BoundSocket};
use vhost_device_rdma::vhost_user;
use vhost_device_rdma::worker::Loop;
use vhost_device_rdma_bare::spec::command::{mw_type, PageList};
use vhost_device_rdma_bare::spec::config::feature;
use vhost_device_rdma_bare::spec::ring::{BindMw, Cqe, FastReg, SendWqe, Sge};
use vhost_device_rdma_bare::spec::verbs::{
    access, qp_state, qp_type, send_flag, vendor_err, wc_status, wr_opcode,
};
use vhost_device_rdma_bare::{
    page_list, Buffer, Connection, Context, Cq, FastMr, Mr, Mw, Pd, Placement, Qp, QpOptions, Uses,
    Vm, VmOptions, PAGE,
};

/// Long enough for a busy machine.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Everything that a key can grant.
const ALL: u32 = access::LOCAL_WRITE
    | access::REMOTE_WRITE
    | access::REMOTE_READ
    | access::REMOTE_ATOMIC
    | access::MW_BIND;
/// Where registered regions begin for those who name them.
const IOVA: u64 = 0x10_0000;
/// Where windows begin.
const WINDOW: u64 = 0x5000;
/// Words of the first side's region: what is written and sent, and behind it what is read.
const WORDS: u64 = 512;

/// Two VMs, and a device whose workers do nothing by themselves.
struct Bed {
    a: Arc<Vm>,
    b: Arc<Vm>,
    work: RefCell<Vec<Loop>>,
    adapter: Arc<Adapter>,
    servers: Vec<Server>,
    directory: PathBuf,
}

impl Bed {
    fn new(workers: u16) -> Self {
        Self::with(workers, 64 << 20)
    }

    /// With VMs of so many bytes.
    fn with(workers: u16, memory: usize) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let directory = std::env::temp_dir().join(format!("model-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let settings = AdapterSettings {
            workers,
            ..AdapterSettings::default()
        };
        let (adapter, work) = Adapter::without_threads(&settings).unwrap();
        let mut servers = Vec::new();
        let [a, b] = [1, 2].map(|i| {
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
                features: 1 << feature::FAST_REG
                    | 1 << feature::PHYSICAL_MR
                    | 1 << feature::MW
                    | 1 << feature::UC,
                memory,
                ..VmOptions::default()
            };
            Vm::connect(&path, options).unwrap()
        });
        Self {
            a,
            b,
            work: RefCell::new(work),
            adapter,
            servers,
            directory,
        }
    }

    /// Each worker polls one queue pair.
    fn round(&self) {
        for worker in self.work.borrow_mut().iter_mut() {
            worker.step();
        }
    }

    /// Rounds until `f` has something.
    fn until<T>(&self, mut f: impl FnMut() -> Option<T>) -> Result<T, TestCaseError> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            if let Some(found) = f() {
                return Ok(found);
            }
            prop_assert!(Instant::now() < deadline, "nothing comes");
            self.round();
        }
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        self.servers.drain(..).map(Server::end).for_each(drop);
        self.adapter.shutdown();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// A queue pair and its completion queues.
struct End {
    // Dropped first.
    qp: Qp,
    sent: Arc<Cq>,
    received: Arc<Cq>,
}

/// What a process has.
struct Process {
    context: Arc<Context>,
    pd: Arc<Pd>,
    vm: Arc<Vm>,
}

impl Process {
    fn new(vm: &Arc<Vm>) -> Self {
        Self {
            context: Context::new(vm).unwrap(),
            pd: Pd::new(vm).unwrap(),
            vm: vm.clone(),
        }
    }

    fn end(&self, qp_type: u8) -> End {
        let [sent, received] = [(); 2].map(|()| Cq::new(&self.vm, 128, 0).unwrap());
        let uses = Uses {
            context: Some(&self.context),
            pd: Some(&self.pd),
            send_cq: Some(&sent),
            recv_cq: Some(&received),
            ..Uses::default()
        };
        let qp = Qp::create(&self.vm, &uses, &QpOptions::of(qp_type)).unwrap();
        End { qp, sent, received }
    }
}

fn connect_to(from: &End, to: &End) {
    let connection = Connection {
        access: ALL,
        timeout: 1,
        retry_cnt: 0,
        ..Connection::to(&to.qp)
    };
    from.qp.connect(&connection).unwrap();
}

fn connect(a: &End, b: &End) {
    connect_to(a, b);
    connect_to(b, a);
}

/// Memory that a fast region can be registered for: a list of its pages, and a long one.
struct Backing {
    lists: [PageList; 2],
    _tables: [Option<Buffer>; 2],
    memory: Buffer,
}

impl Backing {
    fn new(vm: &Arc<Vm>, pages: usize, long: usize) -> Self {
        let memory = vm.buffer(pages * PAGE, Placement::Scattered).unwrap();
        // The same pages again and again.
        let list = |count: usize| {
            let pages: Vec<u64> = (0..count).map(|i| memory.page(i % pages)).collect();
            page_list(&vm.region(0), &pages).unwrap()
        };
        let [(short, short_tables), (long, long_tables)] = [list(pages), list(long)];
        Self {
            lists: [short, long],
            _tables: [short_tables, long_tables],
            memory,
        }
    }

    fn word(&self) -> u64 {
        u64::from_le_bytes(self.memory.view().get(0, 8).try_into().unwrap())
    }

    fn reg(&self, key: u32, lkey: u32, long: bool) -> FastReg {
        let pages = self.lists[usize::from(long)];
        FastReg {
            iova: IOVA,
            key,
            access: ALL,
            length: u64::from(pages.count) * PAGE as u64,
            pages,
            offset: 0,
            lkey,
        }
    }
}

// Random work requests of several queues: there is an order of them in which all is as the model
// says.

const PAIRS: usize = 2;
const QUEUES: usize = 2 * PAIRS;
const REGIONS: usize = 2;
const BACKINGS: usize = 3;
/// Pages of a long list: more than a poll reads.
const LONG: usize = 20_000;

/// A key, as the model names it: with the low 8 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Key {
    Region(usize, u8),
    /// The window of a pair.
    Window(usize, u8),
}

/// A work request. Those of the first sides reach for the second VM's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Op {
    /// A first side writes a word.
    Write(Key, u64),
    /// A first side reads a word.
    Fetch(Key),
    /// A first side has a key invalidated.
    SendWithInv(Key),
    /// A second side registers a region for a backing, by a long list or not.
    Register(usize, u8, usize, bool),
    /// A second side invalidates, with a fence or not.
    Invalidate(Key, bool),
    /// A second side reads a word of the first into a region, and invalidates it or not.
    Bring(usize, u8, u64, bool),
    /// A second side binds its window, which has the first low bits, to a region, and gives it the
    /// others.
    Bind(u8, u8, usize, u8),
}

/// How it fared: status, reason, and what a [`Op::Fetch`] brought.
type Outcome = (u8, u8, u64);

/// What all keys and memory are.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Model {
    unreliable: [bool; PAIRS],
    /// Low bits and backing.
    regions: [Option<(u8, usize)>; REGIONS],
    /// Low bits, and the region that it is bound to.
    windows: [(u8, Option<usize>); PAIRS],
    memory: [u64; BACKINGS],
    /// Queue pairs that execute nothing any longer, and those that do not answer either.
    failed: [bool; QUEUES],
    silent: [bool; QUEUES],
}

impl Model {
    fn new(unreliable: [bool; PAIRS]) -> Self {
        Self {
            unreliable,
            regions: [None; REGIONS],
            windows: [(0, None); PAIRS],
            memory: [0; BACKINGS],
            failed: [false; QUEUES],
            silent: [false; QUEUES],
        }
    }

    /// The backing that a peer reaches through pair `pair` by a key.
    fn reach(&self, pair: usize, key: Key) -> Result<usize, u8> {
        let unknown = Err(vendor_err::KEY_UNKNOWN);
        match key {
            Key::Region(region, low) => match self.regions[region] {
                Some((key, backing)) if key == low => Ok(backing),
                _ => unknown,
            },
            Key::Window(window, low) => match self.windows[window] {
                (key, Some(region)) if key == low => {
                    if window != pair {
                        return Err(vendor_err::KEY_PD);
                    }
                    self.regions[region].map_or(unknown, |(_, backing)| Ok(backing))
                }
                _ => unknown,
            },
        }
    }

    fn invalidate(&mut self, pair: usize, key: Key) -> Result<(), u8> {
        self.reach(pair, key).map_err(|_| vendor_err::BIND)?;
        match key {
            Key::Window(window, _) => self.windows[window].1 = None,
            Key::Region(region, _) => {
                if self.windows.iter().any(|(_, bound)| *bound == Some(region)) {
                    return Err(vendor_err::BIND);
                }
                self.regions[region] = None;
            }
        }
        Ok(())
    }

    /// Executes a work request of a queue; how it fares.
    fn execute(&mut self, queue: usize, op: Op) -> Outcome {
        if self.failed[queue] {
            return (wc_status::WR_FLUSH_ERR, vendor_err::FLUSHED, 0);
        }
        let pair = queue / 2;
        let (peer, unreliable) = (queue ^ 1, self.unreliable[pair]);
        let remote = |reason| (wc_status::REM_ACCESS_ERR, reason);
        let message = matches!(op, Op::Write(..) | Op::Fetch(_) | Op::SendWithInv(_));
        let silence = Err((wc_status::RETRY_EXC_ERR, vendor_err::NO_ANSWER));
        let result: Result<u64, (u8, u8)> = match op {
            _ if message && self.silent[peer] => silence,
            Op::Write(key, value) => self.reach(pair, key).map_err(remote).map(|backing| {
                self.memory[backing] = value;
                0
            }),
            Op::Fetch(key) => {
                let reached = self.reach(pair, key).map_err(remote);
                reached.map(|backing| self.memory[backing])
            }
            Op::SendWithInv(key) => self.invalidate(pair, key).map_err(remote).map(|()| 0),
            Op::Register(region, low, backing, _) => match self.regions[region] {
                Some(_) => Err((wc_status::MW_BIND_ERR, vendor_err::REGISTERED)),
                None => {
                    self.regions[region] = Some((low, backing));
                    Ok(0)
                }
            },
            Op::Invalidate(key, _) => {
                let refused = |reason| (wc_status::LOC_QP_OP_ERR, reason);
                self.invalidate(pair, key).map_err(refused).map(|()| 0)
            }
            Op::Bring(region, low, value, invalidates) => {
                let key = Key::Region(region, low);
                let bound = self.windows.iter().any(|(_, to)| *to == Some(region));
                match self.reach(pair, key) {
                    Err(reason) => Err((wc_status::LOC_PROT_ERR, reason)),
                    Ok(_) if invalidates && bound => {
                        Err((wc_status::LOC_QP_OP_ERR, vendor_err::BIND))
                    }
                    Ok(_) if self.silent[peer] => silence,
                    Ok(backing) => {
                        self.memory[backing] = value;
                        if invalidates {
                            self.regions[region] = None;
                        }
                        Ok(0)
                    }
                }
            }
            Op::Bind(old, new, region, low) => {
                let (key, bound) = self.windows[pair];
                let there = self.regions[region].is_some_and(|(key, _)| key == low);
                if key == old && bound.is_none() && there {
                    self.windows[pair] = (new, Some(region));
                    Ok(0)
                } else {
                    Err((wc_status::MW_BIND_ERR, vendor_err::BIND))
                }
            }
        };
        match result {
            Ok(value) => (wc_status::SUCCESS, 0, value),
            // The sender does not learn of it.
            Err(_) if unreliable && message => (wc_status::SUCCESS, 0, 0),
            Err((status, reason)) => {
                self.failed[queue] = true;
                if !unreliable {
                    self.silent[queue] = true;
                }
                if status == wc_status::REM_ACCESS_ERR {
                    self.failed[peer] = true;
                    self.silent[peer] = true;
                }
                (status, reason, 0)
            }
        }
    }
}

/// A work request that is done.
#[derive(Debug, Clone, Copy)]
struct Done {
    op: Op,
    outcome: Outcome,
    /// Work requests of each queue whose completion was polled before it was posted.
    after: [usize; QUEUES],
}

/// Whether there is an order of all work requests, that of each queue kept, in which they fare as
/// they did and memory is what it is.
fn explained(
    queues: &[Vec<Done>; QUEUES],
    at: [usize; QUEUES],
    model: &Model,
    memory: &[u64; BACKINGS],
    hopeless: &mut HashSet<([usize; QUEUES], Model)>,
) -> bool {
    if queues.iter().zip(at).all(|(queue, at)| at == queue.len()) {
        return model.memory == *memory;
    }
    if hopeless.contains(&(at, model.clone())) {
        return false;
    }
    for queue in 0..QUEUES {
        let Some(done) = queues[queue].get(at[queue]) else {
            continue;
        };
        if done.after.iter().zip(at).any(|(after, at)| *after > at) {
            continue;
        }
        let mut next = model.clone();
        if next.execute(queue, done.op) != done.outcome {
            continue;
        }
        let mut then = at;
        then[queue] += 1;
        if explained(queues, then, &next, memory, hopeless) {
            return true;
        }
    }
    hopeless.insert((at, model.clone()));
    false
}

/// A random choice of a work request: its queue, what to do and with what, whether it is to be
/// possible, and how many rounds to do before the next.
#[derive(Debug, Clone, Copy)]
struct Choice {
    queue: usize,
    what: u8,
    which: usize,
    good: bool,
    rounds: u8,
}

fn choices() -> impl Strategy<Value = Vec<Choice>> {
    // From all at once to one by one.
    (0u8..6).prop_flat_map(|pace| {
        let choice = (0..QUEUES, any::<u8>(), any::<u8>(), 0u8..60, 0..=2 * pace).prop_map(
            |(queue, what, which, good, rounds)| Choice {
                queue,
                what,
                which: usize::from(which),
                good: good != 0,
                rounds,
            },
        );
        prop::collection::vec(choice, 1..28)
    })
}

/// The work request that a choice stands for, if there is one. `guess` is what all would be if each
/// were done when it is posted.
fn op(choice: Choice, guess: &Model, value: u64) -> Option<Op> {
    let Choice {
        queue,
        what,
        which,
        good,
        ..
    } = choice;
    let pair = queue / 2;
    let mut region = which % REGIONS;
    if queue % 2 == 0 && good {
        // For a first side, one that there is.
        let mut regions = (which..which + REGIONS).map(|region| region % REGIONS);
        region = regions.find(|region| guess.regions[*region].is_some())?;
    }
    let low = match guess.regions[region] {
        Some((low, _)) if good => low,
        _ => value as u8 | 0x80,
    };
    let (window, bound) = guess.windows[pair];
    let key = if bound.is_some() && what & 1 == 0 {
        let other = if good { pair } else { (pair + 1) % PAIRS };
        Key::Window(other, guess.windows[other].0)
    } else {
        Key::Region(region, low)
    };
    let reliable = !guess.unreliable[pair];
    if queue % 2 == 0 {
        return Some(match what % 8 {
            0 => Op::SendWithInv(key),
            1..=3 if reliable => Op::Fetch(key),
            _ => Op::Write(key, value),
        });
    }
    if guess.regions[region].is_none() == good {
        let long = what % 4 == 0;
        return Some(Op::Register(region, value as u8, which % BACKINGS, long));
    }
    Some(match what % 8 {
        0 if reliable => Op::Bring(region, low, value, true),
        1 if reliable => Op::Bring(region, low, value, false),
        2 | 3 if bound.is_none() == good => Op::Bind(window, window.wrapping_add(1), region, low),
        _ => Op::Invalidate(key, what & 16 != 0),
    })
}

/// What the random sequences run on.
struct Stage {
    // Dropped in this order.
    regions: Vec<FastMr>,
    windows: Vec<Mw>,
    own: Mr,
    ends: Vec<End>,
    backings: Vec<Backing>,
    physical: u32,
    _a: Process,
    _b: Process,
}

impl Stage {
    fn new(bed: &Bed, unreliable: [bool; PAIRS]) -> Self {
        let (a, b) = (Process::new(&bed.a), Process::new(&bed.b));
        let mut ends = Vec::new();
        for unreliable in unreliable {
            let kind = if unreliable { qp_type::UC } else { qp_type::RC };
            let (first, second) = (a.end(kind), b.end(kind));
            connect(&first, &second);
            for i in 0..32 {
                second.qp.post_recv(i, &[]).unwrap();
            }
            ends.extend([first, second]);
        }
        let own = a.pd.register(PAGE * 4, ALL).unwrap();
        for i in 0..WORDS {
            own.write(8 * i as usize, &i.to_le_bytes());
        }
        Self {
            regions: (0..REGIONS)
                .map(|_| b.pd.fast_region(LONG as u32, 0).unwrap())
                .collect(),
            windows: (0..PAIRS)
                .map(|_| b.pd.window(mw_type::TYPE_2).unwrap())
                .collect(),
            own,
            ends,
            backings: (0..BACKINGS)
                .map(|_| Backing::new(&bed.b, 2, LONG))
                .collect(),
            physical: b.pd.register_physical(access::LOCAL_WRITE).unwrap(),
            _a: a,
            _b: b,
        }
    }

    fn key(&self, key: Key) -> u32 {
        match key {
            Key::Region(region, low) => self.regions[region].key(low),
            Key::Window(window, low) => self.windows[window].rkey & !0xff | u32::from(low),
        }
    }

    /// A remote access by a key.
    fn remote(&self, opcode: u8, key: Key) -> SendWqe {
        SendWqe {
            opcode,
            remote_addr: match key {
                Key::Region(..) => IOVA,
                Key::Window(..) => WINDOW,
            },
            rkey: self.key(key),
            ..SendWqe::default()
        }
    }

    /// Posts a work request; `number` is that of all.
    fn post(&self, queue: usize, op: Op, number: u64) {
        let qp = &self.ends[queue].qp;
        match op {
            Op::Write(key, value) => {
                let wqe = self.remote(wr_opcode::RDMA_WRITE, key);
                qp.post_send(&wqe, &[self.own.sge(8 * value, 8)])
            }
            Op::Fetch(key) => {
                let wqe = self.remote(wr_opcode::RDMA_READ, key);
                qp.post_send(&wqe, &[self.own.sge(8 * (WORDS + number), 8)])
            }
            Op::SendWithInv(key) => {
                let wqe = SendWqe {
                    opcode: wr_opcode::SEND_WITH_INV,
                    imm: self.key(key),
                    ..SendWqe::default()
                };
                qp.post_send(&wqe, &[])
            }
            Op::Register(region, low, backing, long) => {
                let key = self.regions[region].key(low);
                qp.post_reg(0, &self.backings[backing].reg(key, self.physical, long))
            }
            Op::Invalidate(key, fence) => {
                let wqe = SendWqe {
                    opcode: wr_opcode::LOCAL_INV,
                    flags: if fence { send_flag::FENCE } else { 0 },
                    imm: self.key(key),
                    ..SendWqe::default()
                };
                qp.post_send(&wqe, &[])
            }
            Op::Bring(region, low, value, invalidates) => {
                let wqe = SendWqe {
                    opcode: if invalidates {
                        wr_opcode::RDMA_READ_WITH_INV
                    } else {
                        wr_opcode::RDMA_READ
                    },
                    remote_addr: self.own.iova + 8 * value,
                    rkey: self.own.rkey,
                    ..SendWqe::default()
                };
                let sink = Sge {
                    addr: IOVA,
                    length: 8,
                    lkey: self.regions[region].key(low),
                };
                qp.post_send(&wqe, &[sink])
            }
            Op::Bind(old, new, region, low) => {
                let window = queue / 2;
                let bind = BindMw {
                    addr: WINDOW,
                    mw_rkey: self.key(Key::Window(window, old)),
                    length: 64,
                    access: access::REMOTE_WRITE | access::REMOTE_READ,
                    mr_lkey: self.regions[region].key(low),
                    mr_addr: IOVA,
                    new_rkey: self.key(Key::Window(window, new)),
                    ..BindMw::default()
                };
                qp.post_bind(0, &bind)
            }
        }
        .unwrap();
    }

    fn fetched(&self, number: u64) -> u64 {
        let word = self.own.read(8 * (WORDS + number) as usize, 8);
        u64::from_le_bytes(word.try_into().unwrap())
    }
}

/// A work request that was posted: its number, and what completed before.
type Posted = (u64, Op, [usize; QUEUES]);

fn run_random(
    bed: &Bed,
    unreliable: [bool; PAIRS],
    choices: &[Choice],
) -> Result<(usize, usize), TestCaseError> {
    let stage = Stage::new(bed, unreliable);
    let mut guess = Model::new(unreliable);
    let mut posted: [Vec<Posted>; QUEUES] = Default::default();
    let mut done: [Vec<Done>; QUEUES] = Default::default();
    let collect = |posted: &[Vec<Posted>; QUEUES], done: &mut [Vec<Done>; QUEUES]| {
        for (queue, end) in stage.ends.iter().enumerate() {
            while let Some(cqe) = end.sent.poll() {
                let (number, op, after) = posted[queue][done[queue].len()];
                let fetched = matches!(op, Op::Fetch(_)) && cqe.status == wc_status::SUCCESS;
                let value = if fetched { stage.fetched(number) } else { 0 };
                done[queue].push(Done {
                    op,
                    outcome: (cqe.status, cqe.vendor_err, value),
                    after,
                });
            }
        }
    };
    for (number, choice) in (0..).zip(choices) {
        let Some(op) = op(*choice, &guess, number + 1) else {
            continue;
        };
        guess.execute(choice.queue, op);
        // It goes on as if nothing could fail.
        (guess.failed, guess.silent) = ([false; QUEUES], [false; QUEUES]);
        collect(&posted, &mut done);
        let after = [0, 1, 2, 3].map(|queue: usize| done[queue].len());
        posted[choice.queue].push((number, op, after));
        stage.post(choice.queue, op, number);
        for _ in 0..choice.rounds {
            bed.round();
        }
    }
    bed.until(|| {
        collect(&posted, &mut done);
        posted
            .iter()
            .zip(&done)
            .all(|(p, d)| p.len() == d.len())
            .then_some(())
    })?;
    let memory = [0, 1, 2].map(|backing: usize| stage.backings[backing].word());
    let start = Model::new(unreliable);
    let found = explained(&done, [0; QUEUES], &start, &memory, &mut HashSet::new());
    prop_assert!(found, "no order explains {done:#?}\nwith memory {memory:?}");
    // Receives tell what was invalidated, in the order of the messages.
    for pair in 0..PAIRS {
        let sent = done[2 * pair].iter();
        let invalidated: Vec<u32> = sent
            .filter_map(|done| match (done.op, done.outcome.0) {
                (Op::SendWithInv(key), wc_status::SUCCESS) => Some(stage.key(key)),
                _ => None,
            })
            .collect();
        let mut told = Vec::new();
        while let Some(cqe) = stage.ends[2 * pair + 1].received.poll() {
            if cqe.status == wc_status::SUCCESS {
                told.push(cqe.imm);
            }
        }
        if unreliable[pair] {
            let mut sent = invalidated.iter();
            prop_assert!(told.iter().all(|key| sent.any(|sent| sent == key)));
        } else {
            prop_assert_eq!(told, invalidated);
        }
    }
    let good = |done: &&Done| done.outcome.0 == wc_status::SUCCESS;
    let all = done.iter().flatten().count();
    Ok((all, done.iter().flatten().filter(good).count()))
}

fn config(cases: u32) -> Config {
    Config {
        cases,
        failure_persistence: None,
        ..Config::default()
    }
}

#[test]
fn whatever_is_posted_there_is_an_order_that_explains_it() {
    // D-MM-001, D-MM-002, D-MM-005, D-MM-006, D-MM-010, D-MM-011, D-MM-012.
    for workers in [1, 2] {
        let bed = Bed::new(workers);
        let (all, good) = (RefCell::new(0), RefCell::new(0));
        let strategy = (prop::array::uniform2(any::<bool>()), choices());
        TestRunner::new(config(300))
            .run(&strategy, |(unreliable, choices)| {
                let (posted, done) = run_random(&bed, unreliable, &choices)?;
                *all.borrow_mut() += posted;
                *good.borrow_mut() += done;
                Ok(())
            })
            .unwrap();
        // Otherwise it is about errors only.
        assert!(2 * good.into_inner() > all.into_inner());
    }
}

/// The model refuses what must not be: otherwise it would explain anything.
#[test]
fn what_must_not_be_is_not_explained() {
    let done = |op, status, reason, value, after| Done {
        op,
        outcome: (status, reason, value),
        after,
    };
    let good = wc_status::SUCCESS;
    let register = done(Op::Register(0, 1, 0, false), good, 0, 0, [0; QUEUES]);
    let key = Key::Region(0, 1);
    let write = done(Op::Write(key, 7), good, 0, 0, [0; QUEUES]);
    let invalidate = done(Op::Invalidate(key, false), good, 0, 0, [0; QUEUES]);
    let explained = |queues: [Vec<Done>; QUEUES], word: u64| {
        let start = Model::new([false; PAIRS]);
        explained(
            &queues,
            [0; QUEUES],
            &start,
            &[word, 0, 0],
            &mut HashSet::new(),
        )
    };
    let none = Vec::new;
    assert!(explained(
        [vec![write], vec![register, invalidate], none(), none()],
        7
    ));
    // Another value; a write before or after the region was registered; in another order of the
    // queue.
    assert!(!explained(
        [vec![write], vec![register, invalidate], none(), none()],
        8
    ));
    assert!(!explained(
        [vec![write], vec![invalidate, register], none(), none()],
        7
    ));
    assert!(!explained([vec![write], none(), none(), none()], 7));
    let late = Done {
        after: [0, 2, 0, 0],
        ..write
    };
    assert!(!explained(
        [vec![late], vec![register, invalidate], none(), none()],
        7
    ));
    // Two that invalidate the same.
    assert!(!explained(
        [none(), vec![register, invalidate], none(), vec![invalidate]],
        0
    ));
    // What is there is found.
    let missed = done(
        Op::Write(key, 7),
        wc_status::REM_ACCESS_ERR,
        vendor_err::KEY_UNKNOWN,
        0,
        [0, 1, 0, 0],
    );
    assert!(!explained(
        [vec![missed], vec![register], none(), none()],
        0
    ));
    let fetched = done(Op::Fetch(key), good, 0, 7, [0, 1, 0, 0]);
    assert!(!explained(
        [vec![fetched], vec![register], none(), none()],
        0
    ));
}

// Messages of many accesses, and changes between them.

/// Bytes of a long message: of several polls.
const MESSAGE: usize = 3 << 20;

/// A pair whose second side has a fast region, and memory to register.
struct Long {
    // Dropped in this order.
    region: FastMr,
    own: Mr,
    a: End,
    b: End,
    /// Gets no traffic but its own.
    c: End,
    backings: [Backing; 2],
    physical: u32,
    _a: Process,
    b_process: Process,
}

impl Long {
    fn new(bed: &Bed) -> Self {
        let (a_process, b_process) = (Process::new(&bed.a), Process::new(&bed.b));
        let (a, b) = (a_process.end(qp_type::RC), b_process.end(qp_type::RC));
        connect(&a, &b);
        let pages = MESSAGE / PAGE;
        let c = b_process.end(qp_type::RC);
        connect_to(&c, &c);
        Self {
            region: b_process.pd.fast_region(1 << 20, 0).unwrap(),
            own: a_process.pd.register(MESSAGE, ALL).unwrap(),
            a,
            b,
            c,
            backings: [(); 2].map(|()| Backing::new(&bed.b, pages, pages)),
            physical: b_process
                .pd
                .register_physical(access::LOCAL_WRITE | access::REMOTE_WRITE)
                .unwrap(),
            _a: a_process,
            b_process,
        }
    }

    fn reg(&self, backing: usize) -> FastReg {
        self.backings[backing].reg(self.region.key(1), self.physical, false)
    }

    /// Executes a registration.
    fn register(&self, bed: &Bed, backing: usize) -> Result<(), TestCaseError> {
        self.c.qp.post_reg(0, &self.reg(backing)).unwrap();
        self.good(bed, &self.c)
    }

    fn good(&self, bed: &Bed, end: &End) -> Result<(), TestCaseError> {
        let cqe = bed.until(|| end.sent.poll())?;
        prop_assert_eq!(outcome(&cqe), (wc_status::SUCCESS, 0));
        Ok(())
    }

    /// How many bytes of a backing, from the first on, are `byte`; the others must all be `other`.
    fn prefix(&self, backing: usize, byte: u8, other: u8) -> Result<usize, TestCaseError> {
        let bytes = self.backings[backing].memory.view().get(0, MESSAGE);
        let end = bytes.iter().position(|b| *b != byte).unwrap_or(MESSAGE);
        prop_assert!(bytes[end..].iter().all(|b| *b == other));
        Ok(end)
    }
}

fn outcome(cqe: &Cqe) -> (u8, u8) {
    (cqe.status, cqe.vendor_err)
}

#[test]
fn a_message_is_cut_off_when_its_key_becomes_invalid() {
    // D-MM-003, D-MM-004.
    let bed = Bed::new(2);
    let cut = RefCell::new(0);
    let strategy = (0u32..8, any::<bool>(), 0u8..3);
    TestRunner::new(config(40))
        .run(&strategy, |(rounds, late, again)| {
            let l = Long::new(&bed);
            l.own.write(0, &vec![7; MESSAGE]);
            l.register(&bed, 0)?;
            let key = l.region.key(1);
            let whole = l.own.sge(0, MESSAGE as u32);
            l.a.qp.write(0, &[whole], IOVA, key).unwrap();
            for _ in 0..rounds {
                bed.round();
            }
            // Invalidated by its owner or remotely, and registered again for the same memory, or
            // other memory, or not.
            let by = if late { &l.b } else { &l.c };
            by.qp.invalidate(1, key).unwrap();
            l.good(&bed, by)?;
            let before = l.prefix(0, 7, 0)?;
            if again != 0 {
                l.register(&bed, usize::from(again) - 1)?;
            }
            let cqe = bed.until(|| l.a.sent.poll())?;
            for _ in 0..50 {
                bed.round();
            }
            let done = before == MESSAGE;
            match outcome(&cqe) {
                (wc_status::SUCCESS, 0) => prop_assert!(done || again != 0),
                (wc_status::REM_ACCESS_ERR, vendor_err::KEY_UNKNOWN) => prop_assert!(!done),
                other => prop_assert!(false, "{other:?}"),
            }
            let written = l.prefix(0, 7, 0)?;
            match again {
                // Into the same memory: on from where it was.
                1 if cqe.status == wc_status::SUCCESS => prop_assert_eq!(written, MESSAGE),
                // Into other memory: what was missing, and nothing else.
                2 if cqe.status == wc_status::SUCCESS => {
                    prop_assert_eq!(written, before);
                    let other = l.backings[1].memory.view().get(0, MESSAGE);
                    prop_assert!(other[..before].iter().all(|byte| *byte == 0));
                    prop_assert!(other[before..].iter().all(|byte| *byte == 7));
                }
                0 => prop_assert_eq!(written, before),
                _ => {}
            }
            *cut.borrow_mut() += u32::from(!done && before != 0);
            Ok(())
        })
        .unwrap();
    assert!(cut.into_inner() >= 5, "hardly a message was under way");
}

#[test]
fn reads_end_before_what_is_fenced_and_are_whole_or_fail_otherwise() {
    // D-MM-003, D-MM-007, D-MM-008, D-ORD-002.
    let bed = Bed::new(2);
    let strategy = (any::<bool>(), any::<bool>(), 0u32..10);
    TestRunner::new(config(40))
        .run(&strategy, |(fence, change, rounds)| {
            let l = Long::new(&bed);
            l.own.write(0, &vec![7; MESSAGE]);
            l.register(&bed, 0)?;
            let key = l.region.key(1);
            let sink = Sge {
                addr: IOVA,
                length: MESSAGE as u32,
                lkey: key,
            };
            let read = SendWqe {
                opcode: wr_opcode::RDMA_READ,
                remote_addr: l.own.iova,
                rkey: l.own.rkey,
                ..SendWqe::default()
            };
            let invalidate = SendWqe {
                opcode: wr_opcode::LOCAL_INV,
                flags: if fence { send_flag::FENCE } else { 0 },
                imm: key,
                ..SendWqe::default()
            };
            let mut batch = l.b.qp.send_queue().batch();
            batch.push(&read, [sink]).unwrap();
            batch.push(&invalidate, []).unwrap();
            if change {
                // And registered anew at once, for other memory.
                let wqe = SendWqe {
                    opcode: wr_opcode::REG_MR,
                    ..SendWqe::default()
                };
                batch.push_reg(&wqe, &l.reg(1)).unwrap();
            }
            batch.commit();
            l.b.qp.ring().unwrap();
            for _ in 0..rounds {
                bed.round();
            }
            let read = bed.until(|| l.b.sent.poll())?;
            let invalidated = bed.until(|| l.b.sent.poll())?;
            let before = l.prefix(0, 7, 0)?;
            match outcome(&read) {
                (wc_status::SUCCESS, 0) => {
                    prop_assert_eq!(outcome(&invalidated), (wc_status::SUCCESS, 0));
                    prop_assert_eq!(before, MESSAGE);
                }
                (wc_status::LOC_PROT_ERR, vendor_err::KEY_UNKNOWN) => prop_assert!(!fence),
                other => prop_assert!(false, "{other:?}"),
            }
            for _ in 0..50 {
                bed.round();
            }
            prop_assert_eq!(l.prefix(0, 7, 0)?, before);
            prop_assert_eq!(l.prefix(1, 7, 0)?, 0);
            Ok(())
        })
        .unwrap();
}

#[test]
fn invalidations_that_come_with_data_come_after_it() {
    // D-MM-009, D-MM-010.
    let bed = Bed::new(2);
    let strategy = (0u8..4, 0u32..10);
    TestRunner::new(config(40))
        .run(&strategy, |(way, rounds)| {
            let l = Long::new(&bed);
            l.own.write(0, &vec![7; MESSAGE]);
            l.register(&bed, 0)?;
            let key = l.region.key(1);
            let whole = Sge {
                addr: IOVA,
                length: MESSAGE as u32,
                lkey: key,
            };
            let theirs = l.own.sge(0, MESSAGE as u32);
            let reads = way < 2;
            if reads {
                // The second time the peer gives no access: nothing is invalidated.
                let read = SendWqe {
                    opcode: wr_opcode::RDMA_READ_WITH_INV,
                    remote_addr: l.own.iova + u64::from(way),
                    rkey: l.own.rkey,
                    ..SendWqe::default()
                };
                l.b.qp.post_send(&read, &[whole]).unwrap();
            } else {
                // Into the very region that is invalidated, by this message or by the next.
                l.b.qp.post_recv(0, &[whole]).unwrap();
                l.b.qp.post_recv(1, &[]).unwrap();
                let send = SendWqe {
                    opcode: wr_opcode::SEND_WITH_INV,
                    imm: key,
                    ..SendWqe::default()
                };
                if way == 2 {
                    l.a.qp.post_send(&send, &[theirs]).unwrap();
                } else {
                    let mut batch = l.a.qp.send_queue().batch();
                    let first = SendWqe {
                        opcode: wr_opcode::SEND,
                        ..SendWqe::default()
                    };
                    batch.push(&first, [theirs]).unwrap();
                    batch.push(&send, []).unwrap();
                    // Later ones of the queue find it invalid.
                    let write = SendWqe {
                        opcode: wr_opcode::RDMA_WRITE,
                        remote_addr: IOVA,
                        rkey: key,
                        ..SendWqe::default()
                    };
                    batch.push(&write, [l.own.sge(0, 8)]).unwrap();
                    batch.commit();
                    l.a.qp.ring().unwrap();
                }
            }
            for _ in 0..rounds {
                bed.round();
            }
            // While data is missing, the key is good.
            if l.prefix(0, 7, 0)? < MESSAGE && rounds % 2 == 0 {
                let somewhere = bed.b.buffer(PAGE, Placement::Contiguous).unwrap();
                let own = Sge {
                    addr: somewhere.page(0),
                    length: 1,
                    lkey: l.physical,
                };
                l.c.qp.read(0, &[own], IOVA, key).unwrap();
                let cqe = bed.until(|| l.c.sent.poll())?;
                if outcome(&cqe) != (wc_status::SUCCESS, 0) {
                    prop_assert_eq!(l.prefix(0, 7, 0)?, MESSAGE);
                    l.c.qp.set_state(qp_state::RESET).unwrap();
                    connect_to(&l.c, &l.c);
                }
            }
            let end = if reads { &l.b.sent } else { &l.b.received };
            let cqe = bed.until(|| end.poll())?;
            if way == 1 {
                let refused = (wc_status::REM_ACCESS_ERR, vendor_err::KEY_RANGE);
                prop_assert_eq!(outcome(&cqe), refused);
                l.c.qp.invalidate(0, key).unwrap();
                return l.good(&bed, &l.c);
            }
            prop_assert_eq!(outcome(&cqe), (wc_status::SUCCESS, 0));
            prop_assert_eq!(l.prefix(0, 7, 0)?, MESSAGE);
            let last = if way == 3 {
                bed.until(|| end.poll())?
            } else {
                cqe
            };
            prop_assert!(reads || last.imm == key);
            // It is invalid, so it can be registered anew.
            l.register(&bed, 1)?;
            if way == 3 {
                let statuses: Vec<u8> = (0..3)
                    .map(|_| bed.until(|| l.a.sent.poll()).map(|cqe| cqe.status))
                    .collect::<Result<_, _>>()?;
                let good = wc_status::SUCCESS;
                // Unless the key had been registered anew before that came.
                prop_assert_eq!(&statuses[..2], &[good, good]);
                let late = l.prefix(1, 7, 0)?;
                match statuses[2] {
                    wc_status::SUCCESS => prop_assert_eq!(late, 8),
                    status => {
                        prop_assert_eq!((status, late), (wc_status::REM_ACCESS_ERR, 0));
                    }
                }
            }
            Ok(())
        })
        .unwrap();
}

#[test]
fn a_key_that_is_sent_behind_its_registration_is_good() {
    // D-MM-006, D-MM-012.
    let bed = Bed::new(2);
    let strategy = (any::<bool>(), any::<bool>(), 1usize..6);
    TestRunner::new(config(40))
        .run(&strategy, |(long, window, count)| {
            let l = Long::new(&bed);
            let many = Backing::new(&bed.b, 2, LONG);
            let mw = l.b_process.pd.window(mw_type::TYPE_2).unwrap();
            for i in 0..count as u8 {
                // All at once: registration, bind, message with the key.
                let key = l.region.key(i);
                let rkey = mw.rkey & !0xff | u32::from(i + 1);
                let mut batch = l.b.qp.send_queue().batch();
                let wqe = |opcode, imm| SendWqe {
                    opcode,
                    imm,
                    ..SendWqe::default()
                };
                let reg = many.reg(key, l.physical, long);
                batch.push_reg(&wqe(wr_opcode::REG_MR, 0), &reg).unwrap();
                let carried = if window { rkey } else { key };
                if window {
                    let bind = BindMw {
                        addr: IOVA,
                        mw_rkey: rkey - 1,
                        length: 64,
                        access: access::REMOTE_WRITE,
                        mr_lkey: key,
                        mr_addr: IOVA,
                        new_rkey: rkey,
                        ..BindMw::default()
                    };
                    batch.push_bind(&wqe(wr_opcode::BIND_MW, 0), &bind).unwrap();
                }
                let send = wqe(wr_opcode::SEND_WITH_IMM, carried);
                batch.push(&send, []).unwrap();
                batch.commit();
                l.a.qp.post_recv(0, &[]).unwrap();
                l.b.qp.ring().unwrap();
                // The peer does not wait for any completion of ours.
                let cqe = bed.until(|| l.a.received.poll())?;
                l.own.write(0, &[i + 1; 8]);
                l.a.qp.write(0, &[l.own.sge(0, 8)], IOVA, cqe.imm).unwrap();
                l.good(&bed, &l.a)?;
                prop_assert_eq!(many.memory.view().get(0, 8), [i + 1; 8]);
                if window {
                    l.b.qp.invalidate(0, rkey).unwrap();
                }
                l.b.qp.invalidate(0, key).unwrap();
                for _ in 0..if window { 5 } else { 3 } {
                    l.good(&bed, &l.b)?;
                }
            }
            Ok(())
        })
        .unwrap();
}

#[test]
fn memory_that_is_gone_for_a_while_leaves_its_registrations() {
    // D-MM-013.
    let bed = Bed::new(1);
    let l = Long::new(&bed);
    let number = bed.b.add_memory(1 << 20).unwrap();
    let memory = bed.b.region(number).buffer(2 * PAGE, Placement::Scattered);
    let memory = memory.unwrap();
    let pages = [memory.page(0), memory.page(1)];
    let (pages, _tables) = page_list(&bed.b.region(0), &pages).unwrap();
    let reg = FastReg {
        pages,
        length: 2 * PAGE as u64,
        ..l.reg(0)
    };
    let write = |end: &End| {
        let own = Sge {
            addr: l.backings[0].memory.page(0),
            length: 8,
            lkey: l.physical,
        };
        end.qp.write(0, &[own], IOVA, reg.key).unwrap();
        outcome(&bed.until(|| end.sent.poll()).unwrap())
    };
    l.b.qp.post_reg(0, &reg).unwrap();
    l.good(&bed, &l.b).unwrap();
    for round in 0..3u8 {
        bed.b.remove_memory(number).unwrap();
        let end = l.b_process.end(qp_type::RC);
        connect_to(&end, &end);
        let gone = (wc_status::REM_ACCESS_ERR, vendor_err::MEMORY_GONE);
        assert_eq!(write(&end), gone);
        bed.b.replug_memory(number).unwrap();
        l.backings[0].memory.view().write(0, &[round + 1; 8]);
        assert_eq!(write(&l.c), (wc_status::SUCCESS, 0));
        assert_eq!(memory.view().get(0, 8), [round + 1; 8]);
    }
    bed.b.remove_memory(number).unwrap();
    l.b.qp.invalidate(0, reg.key).unwrap();
    l.good(&bed, &l.b).unwrap();
    bed.b.replug_memory(number).unwrap();
    let unknown = (wc_status::REM_ACCESS_ERR, vendor_err::KEY_UNKNOWN);
    assert_eq!(write(&l.c), unknown);
}

#[test]
fn a_long_registration_keeps_nobody_waiting() {
    // D-REG-003.
    const PAGES: u64 = 1 << 20;
    let bed = Bed::with(1, 5 << 30);
    let l = Long::new(&bed);
    let start = bed.b.region(0).guest_addr();
    let somewhere = bed.b.buffer(PAGE, Placement::Contiguous).unwrap();
    let own = Sge {
        addr: somewhere.page(0),
        length: 8,
        lkey: l.physical,
    };
    // No page behind the one before; all; and all but the last, so that they must be written down
    // one by one at the end.
    let orders: [fn(u64) -> u64; 3] = [
        |i| PAGES - 1 - i,
        |i| i,
        |i| if i + 1 < PAGES { i } else { 0 },
    ];
    for order in orders {
        let pages: Vec<u64> = (0..PAGES).map(|i| start + order(i) * PAGE as u64).collect();
        let (pages, _tables) = page_list(&bed.b.region(0), &pages).unwrap();
        let reg = FastReg {
            pages,
            length: PAGES * PAGE as u64,
            ..l.reg(0)
        };
        l.b.qp.post_reg(0, &reg).unwrap();
        let mut messages = 0;
        let done = loop {
            // Another queue pair's message takes no more than its budget, and one of those who
            // registers.
            l.c.qp
                .write(0, &[own], somewhere.page(0) + 8, l.physical)
                .unwrap();
            let cqe = (0..3).find_map(|_| {
                bed.round();
                l.c.sent.poll()
            });
            assert_eq!(cqe.map(|cqe| outcome(&cqe)), Some((wc_status::SUCCESS, 0)));
            messages += 1;
            if let Some(cqe) = l.b.sent.poll() {
                break cqe;
            }
        };
        assert_eq!(outcome(&done), (wc_status::SUCCESS, 0));
        assert!(messages > 60, "{messages} messages meanwhile");
        l.b.qp.invalidate(0, reg.key).unwrap();
        l.good(&bed, &l.b).unwrap();
    }
}
