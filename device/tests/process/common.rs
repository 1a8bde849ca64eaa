// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the tests have in common: a process, its VMs, connected queue pairs.
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use vhost_device_rdma_bare::core::buffer::QpCaps;
use vhost_device_rdma_bare::spec::ring::Cqe;
use vhost_device_rdma_bare::spec::verbs::{access, wc_status};
use vhost_device_rdma_bare::{
    Connection, Context, Cq, DeviceProcess, Mr, Pd, ProcessOptions, Qp, QpOptions, Vm, VmOptions,
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
        let context = Context::new(vm).unwrap();
        let pd = Pd::new(vm).unwrap();
        let send_cq = Cq::new(vm, options.cqe, 0).unwrap();
        let recv_cq = Cq::new(vm, options.cqe, 1).unwrap();
        let qp = Qp::new(&context, &pd, &send_cq, &recv_cq, &options.qp).unwrap();
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

/// A process and two VMs.
pub struct Two {
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
        let process = process_with(2, arguments);
        Self {
            a: vm(process.socket(0)),
            b: vm(process.socket(1)),
            process,
        }
    }

    /// A connected pair.
    pub fn pair(&self) -> Pair {
        Pair::new(&self.a, &self.b)
    }

    /// A pair connected as told.
    pub fn pair_with(&self, options: &SideOptions, change: impl Fn(&mut Connection)) -> Pair {
        Pair::connect(&self.a, &self.b, options, change)
    }
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

/// How many objects of each kind the VM on `socket` has, as the status tells.
pub fn counts(process: &DeviceProcess, socket: &Path) -> [u64; 5] {
    let status = process.status().unwrap();
    let devices = status["devices"].as_array().unwrap();
    let device = devices
        .iter()
        .find(|device| device["name"] == socket.to_str().unwrap())
        .unwrap_or_else(|| panic!("{} is not in {status}", socket.display()));
    ["contexts", "pds", "mrs", "cqs", "qps"].map(|kind| device["counts"][kind].as_u64().unwrap())
}
