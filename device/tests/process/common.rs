// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the tests have in common: a process, its VMs, connected queue pairs.
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::Duration;

use vhost_device_rdma_bare::core::buffer::QpCaps;
use vhost_device_rdma_bare::spec::command::status;
use vhost_device_rdma_bare::spec::config::feature;
use vhost_device_rdma_bare::spec::event::event_type;
use vhost_device_rdma_bare::spec::ring::{Cqe, SendWqe, Sge};
use vhost_device_rdma_bare::spec::verbs::{access, qp_state, send_flag, wc_status, wr_opcode};
use vhost_device_rdma_bare::{
    Connection, Context, Cq, DeviceProcess, Error, Mr, Pd, ProcessOptions, Qp, QpOptions, Uses, Vm,
    VmOptions,
};

/// Long enough for a busy machine.
pub const TIMEOUT: Duration = Duration::from_secs(20);
/// Long enough to believe that nothing comes.
pub const NOTHING: Duration = Duration::from_millis(100);
/// All access that an application can give.
pub const ALL: u32 = access::LOCAL_WRITE | access::REMOTE_WRITE | access::REMOTE_READ;

/// A process for so many VMs.
pub fn process(vms: u8) -> DeviceProcess {
    process_with(vms, &[])
}

/// A process for so many VMs, with further arguments.
pub fn process_with(vms: u8, arguments: &[&str]) -> DeviceProcess {
    let options = ProcessOptions::vms(vms).binary(env!("CARGO_BIN_EXE_vhost-device-rdma"));
    DeviceProcess::start(&options.arguments(arguments)).unwrap()
}

/// A VM on `socket`.
pub fn vm(socket: &Path) -> Arc<Vm> {
    Vm::connect(socket, VmOptions::default()).unwrap()
}

/// The features of all types of queue pairs.
pub const ALL_TYPES: u64 = 1 << feature::UD
    | 1 << feature::UC
    | 1 << feature::SRQ
    | 1 << feature::XRC
    | 1 << feature::SRQ_RESIZE;

/// Options of a VM with every feature that there is, but iWARP, with which there are fewer.
pub fn everything() -> VmOptions {
    let all = feature::ALL.iter().fold(0, |all, (_, bit)| all | 1 << bit);
    VmOptions {
        features: all & !(1 << feature::IWARP),
        ..VmOptions::default()
    }
}

/// Options of a VM with all types of queue pairs.
pub fn all_types() -> VmOptions {
    VmOptions {
        features: ALL_TYPES,
        ..VmOptions::default()
    }
}

/// What a guest process has, with one queue pair.
pub struct Side {
    // Dropped in this order: each before what it needs.
    pub qp: Qp,
    pub mr: Mr,
    pub send_cq: Arc<Cq>,
    pub recv_cq: Arc<Cq>,
    pub pd: Arc<Pd>,
    pub context: Arc<Context>,
}

/// What both sides of a [`Pair`] are made with.
#[derive(Clone, Copy)]
pub struct SideOptions {
    pub qp: QpOptions,
    /// Entries of each completion queue.
    pub cqe: u32,
    /// Size of the memory region.
    pub memory: usize,
}

impl Default for SideOptions {
    fn default() -> Self {
        Self {
            qp: QpOptions::default(),
            cqe: 256,
            memory: 1 << 20,
        }
    }
}

impl Side {
    /// A queue pair in RESET and all it needs.
    pub fn new(vm: &Arc<Vm>, options: &SideOptions) -> Self {
        Self::build(vm, options, |vm, uses| {
            Qp::create(vm, &uses, &options.qp).unwrap()
        })
    }

    /// The same with the queue pair that `make` makes of the rest.
    pub fn with(vm: &Arc<Vm>, make: impl FnOnce(&Arc<Vm>, Uses<'_>) -> Qp) -> Self {
        Self::build(vm, &SideOptions::default(), make)
    }

    fn build(
        vm: &Arc<Vm>,
        options: &SideOptions,
        make: impl FnOnce(&Arc<Vm>, Uses<'_>) -> Qp,
    ) -> Self {
        let context = Context::new(vm).unwrap();
        let pd = Pd::new(vm).unwrap();
        let send_cq = Cq::new(vm, options.cqe, 0).unwrap();
        let recv_cq = Cq::new(vm, options.cqe, 1).unwrap();
        let uses = Uses {
            context: Some(&context),
            pd: Some(&pd),
            send_cq: Some(&send_cq),
            recv_cq: Some(&recv_cq),
            ..Uses::default()
        };
        let qp = make(vm, uses);
        let mr = pd.register(options.memory, ALL).unwrap();
        Self {
            qp,
            mr,
            send_cq,
            recv_cq,
            pd,
            context,
        }
    }

    /// The next completion of a send.
    pub fn sent(&self) -> Cqe {
        self.send_cq.wait(TIMEOUT).expect("a send completion")
    }

    /// The next completion of a receive.
    pub fn received(&self) -> Cqe {
        self.recv_cq.wait(TIMEOUT).expect("a receive completion")
    }

    /// Nothing completes.
    pub fn assert_quiet(&self) {
        std::thread::sleep(NOTHING);
        assert_eq!(self.send_cq.poll(), None);
        assert_eq!(self.recv_cq.poll(), None);
    }
}

/// Two sides, connected.
pub struct Pair {
    pub a: Side,
    pub b: Side,
}

impl Pair {
    /// Connected as `change` wants it on both sides.
    pub fn connect(
        a: &Arc<Vm>,
        b: &Arc<Vm>,
        options: &SideOptions,
        change: impl Fn(&mut Connection),
    ) -> Self {
        let pair = Self {
            a: Side::new(a, options),
            b: Side::new(b, options),
        };
        for (from, to) in [(&pair.a, &pair.b), (&pair.b, &pair.a)] {
            let mut connection = Connection::to(&to.qp);
            change(&mut connection);
            from.qp.connect(&connection).unwrap();
        }
        pair
    }

    /// Connected as usual.
    pub fn new(a: &Arc<Vm>, b: &Arc<Vm>) -> Self {
        Self::connect(a, b, &SideOptions::default(), |_| ())
    }
}

/// When a test is over: VMs without objects make the process keep nothing. What workers still have
/// in their lists goes a moment later.
struct EmptyAccounts {
    status_socket: PathBuf,
}

impl EmptyAccounts {
    /// A VM that has no objects, and makes the process keep something.
    fn exception(&self) -> Option<serde_json::Value> {
        // The process may have been ended on purpose.
        let mut stream = UnixStream::connect(&self.status_socket).ok()?;
        stream.shutdown(std::net::Shutdown::Write).ok()?;
        let mut text = String::new();
        stream.read_to_string(&mut text).ok()?;
        let status: serde_json::Value = serde_json::from_str(&text).ok()?;
        let mut devices = status["devices"].as_array().unwrap().iter();
        let left = |device: &&serde_json::Value| {
            let counts = device["counts"].as_object().unwrap();
            counts.values().all(|count| *count == 0) && device["footprint_bytes"] != 0
        };
        devices.find(left).cloned()
    }
}

impl Drop for EmptyAccounts {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        let deadline = std::time::Instant::now() + TIMEOUT;
        while let Some(left) = self.exception() {
            assert!(std::time::Instant::now() < deadline, "{left}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// A process and two VMs.
pub struct Two {
    // Dropped first: the VMs are still there.
    _check: EmptyAccounts,
    pub a: Arc<Vm>,
    pub b: Arc<Vm>,
    pub process: DeviceProcess,
}

impl Two {
    /// With two VMs.
    pub fn new() -> Self {
        Self::with(&[])
    }

    /// With further arguments.
    pub fn with(arguments: &[&str]) -> Self {
        Self::of(arguments, &VmOptions::default())
    }

    /// With VMs that have all types of queue pairs.
    pub fn with_all_types() -> Self {
        Self::of(&[], &all_types())
    }

    /// With further arguments, and VMs like this.
    pub fn of(arguments: &[&str], options: &VmOptions) -> Self {
        Self::on(process_with(2, arguments), options)
    }

    /// With this process, and VMs like this.
    pub fn on(process: DeviceProcess, options: &VmOptions) -> Self {
        let [a, b] = [0, 1].map(|i| Vm::connect(process.socket(i), options.clone()).unwrap());
        let status_socket = process.status_socket();
        Self {
            _check: EmptyAccounts { status_socket },
            a,
            b,
            process,
        }
    }

    /// A connected pair.
    pub fn pair(&self) -> Pair {
        Pair::new(&self.a, &self.b)
    }

    /// Whatever was done to the process, it is there, and nothing in it panicked.
    #[track_caller]
    pub fn assert_unharmed(&mut self) {
        assert!(self.process.is_alive());
        let log = self.process.log();
        assert!(!log.contains("panic"), "{log}");
    }

    /// A pair connected as told.
    pub fn pair_with(&self, options: &SideOptions, change: impl Fn(&mut Connection)) -> Pair {
        Pair::connect(&self.a, &self.b, options, change)
    }
}

/// What the status says of the VM on `socket`.
pub fn device_status(process: &DeviceProcess, socket: &Path) -> serde_json::Value {
    let status = process.status().unwrap();
    let devices = status["devices"].as_array().unwrap();
    let name = socket.to_str().unwrap();
    let device = devices.iter().find(|device| device["name"] == name);
    device
        .unwrap_or_else(|| panic!("{name} is not in {status}"))
        .clone()
}

/// What the VM on `socket` makes the process keep, bytes.
pub fn footprint(process: &DeviceProcess, socket: &Path) -> u64 {
    let device = device_status(process, socket);
    device["footprint_bytes"].as_u64().unwrap()
}

/// Waits until the VM on `socket` makes the process keep no more than `bytes`: what was destroyed
/// may be in the list of a worker for a moment.
#[track_caller]
pub fn assert_footprint_falls_to(process: &DeviceProcess, socket: &Path, bytes: u64) {
    let deadline = std::time::Instant::now() + TIMEOUT;
    while footprint(process, socket) > bytes {
        let left = || footprint(process, socket);
        assert!(std::time::Instant::now() < deadline, "{} bytes", left());
        std::thread::sleep(Duration::from_millis(2));
    }
    assert_eq!(footprint(process, socket), bytes);
}

/// Sizes for queue pairs.
pub fn caps(wr: u32, sge: u32, inline: u32) -> QpCaps {
    QpCaps {
        max_send_wr: wr,
        max_recv_wr: wr,
        max_send_sge: sge,
        max_recv_sge: sge,
        max_inline: inline,
    }
}

/// Bytes that do not repeat soon, different for each seed.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        })
        .collect()
}

/// A completion is a success; shows its status otherwise.
#[track_caller]
pub fn assert_success(cqe: &Cqe) {
    assert_status(cqe, wc_status::SUCCESS);
}

/// A completion has this status; shows names otherwise.
#[track_caller]
pub fn assert_status(cqe: &Cqe, status: u8) {
    assert_eq!(
        wc_status::name(cqe.status),
        wc_status::name(status),
        "vendor_err {} in {cqe:?}",
        cqe.vendor_err
    );
}

/// A message gets through, and both sides are as they were.
#[track_caller]
pub fn assert_works(pair: &Pair) {
    let (a, b) = (&pair.a, &pair.b);
    assert_eq!(a.qp.state().unwrap(), qp_state::RTS);
    assert_eq!(b.qp.state().unwrap(), qp_state::RTS);
    b.qp.post_recv(500, &[b.mr.sge(0, 64)]).unwrap();
    a.qp.send(501, &[a.mr.sge(0, 64)]).unwrap();
    assert_success(&a.sent());
    assert_success(&b.received());
}

/// A pair whose first side has written more often than its completion queue has entries.
pub fn overflown(two: &Two) -> Pair {
    overflown_by_lists(two, 1)
}

/// The same, by lists of so many work requests.
pub fn overflown_by_lists(two: &Two, list: u64) -> Pair {
    let options = SideOptions {
        qp: QpOptions {
            caps: caps(64, 1, 0),
            ..QpOptions::default()
        },
        cqe: 16,
        ..SideOptions::default()
    };
    let pair = two.pair_with(&options, |_| ());
    let (a, b) = (&pair.a, &pair.b);
    for first in (0..32).step_by(list as usize) {
        let mut batch = a.qp.send_queue().batch();
        for wr_id in first..first + list {
            let wqe = SendWqe {
                opcode: wr_opcode::RDMA_WRITE,
                flags: send_flag::SIGNALED,
                wr_id,
                remote_addr: b.mr.iova,
                rkey: b.mr.rkey,
                ..SendWqe::default()
            };
            batch.push(&wqe, [a.mr.sge(0, 8)]).unwrap();
        }
        batch.commit();
        a.qp.ring().unwrap();
    }
    pair
}

/// Puts an entry, whatever it is, and scatter/gather entries behind it into the buffer of a queue
/// pair; what makes it valid comes last.
pub fn put_entry(qp: &Qp, at: usize, entry: &[u8], sges: &[(u64, u32, u32)]) {
    let memory = qp.memory();
    let (head, rest) = entry.split_at(8);
    memory.write(at + 8, rest);
    for (i, (addr, length, lkey)) in sges.iter().enumerate() {
        let sge = Sge {
            addr: *addr,
            length: *length,
            lkey: *lkey,
        };
        memory.write(at + entry.len() + Sge::SIZE * i, &sge.to_bytes());
    }
    let head = u64::from_ne_bytes(head.try_into().unwrap());
    memory.u64(at).store(head, Ordering::Release);
}

/// The device refused with this status.
#[track_caller]
pub fn assert_refused<T>(result: Result<T, Error>, expected: u16) {
    let got = result.map(drop).expect_err("the device accepted").status();
    assert_eq!(got.and_then(status::name), status::name(expected));
}

/// The next asynchronous event of the VM is this one.
#[track_caller]
pub fn assert_event(vm: &Vm, event: u16, number: u32) {
    let got = vm
        .wait_async_event(TIMEOUT)
        .unwrap()
        .expect("an asynchronous event");
    assert_eq!(
        (event_type::name(got.event_type), got.number),
        (event_type::name(event), number)
    );
}

/// No asynchronous event comes.
#[track_caller]
pub fn assert_no_event(vm: &Vm) {
    assert_eq!(vm.wait_async_event(NOTHING).unwrap(), None);
}

/// Senders that were woken were woken long before their time, which is 655.36 ms. (The usual time
/// counts: on a busy machine anything may take long once.)
#[track_caller]
pub fn assert_soon(mut times: Vec<Duration>) {
    times.sort_unstable();
    let usual = times[times.len() / 2];
    assert!(usual < Duration::from_millis(400), "{times:?}");
}

/// Waits for a queue pair to get to a state.
#[track_caller]
pub fn assert_reaches(qp: &Qp, state: u8) {
    let deadline = std::time::Instant::now() + TIMEOUT;
    loop {
        let now = qp.state().unwrap();
        if now == state {
            return;
        }
        assert!(
            std::time::Instant::now() < deadline,
            "{:?} and not {:?}",
            qp_state::name(now),
            qp_state::name(state)
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// How many objects of each kind the VM on `socket` has, as the status tells.
pub fn counts(process: &DeviceProcess, socket: &Path) -> [u64; 5] {
    let device = device_status(process, socket);
    ["contexts", "pds", "mrs", "cqs", "qps"].map(|kind| device["counts"][kind].as_u64().unwrap())
}

/// The user of this process.
pub fn own_user() -> u32 {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata("/proc/self").unwrap().uid()
}

/// Tests that need root have nothing to show without.
pub fn is_root() -> bool {
    let root = own_user() == 0;
    if !root {
        eprintln!("this test does nothing: it is not run by root");
    }
    root
}
