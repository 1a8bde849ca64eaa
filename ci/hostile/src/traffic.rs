// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Connected queue pairs of guests that are no VMs.

use std::sync::Arc;

use anyhow::{Context as _, Result};
use vhost_device_rdma_bare::spec::ring::Cqe;
use vhost_device_rdma_bare::spec::verbs::{access, wc_status};
use vhost_device_rdma_bare::{Connection, Context, Cq, Error, Mr, Pd, Qp, QpOptions, Uses, Vm};

use crate::{completed, TIMEOUT};

/// All access that an application can give.
pub const ACCESS: u32 = access::LOCAL_WRITE | access::REMOTE_WRITE | access::REMOTE_READ;

/// What a [`Side`] is made with.
#[derive(Clone, Copy, Debug)]
pub struct SideOptions {
    /// Its queue pair.
    pub qp: QpOptions,
    /// Entries of each completion queue.
    pub cqe: u32,
    /// Size of the memory region, bytes.
    pub memory: usize,
}

impl Default for SideOptions {
    fn default() -> Self {
        Self {
            qp: QpOptions::default(),
            cqe: 256,
            memory: 1 << 16,
        }
    }
}

/// What a guest process has, with one queue pair.
#[derive(Debug)]
pub struct Side {
    // Dropped in this order: each before what it needs.
    /// The queue pair.
    pub qp: Qp,
    /// Its memory, which peers may access.
    pub mr: Mr,
    /// Completions of sends.
    pub send_cq: Arc<Cq>,
    /// Completions of receives.
    pub recv_cq: Arc<Cq>,
    /// The protection domain of all.
    pub pd: Arc<Pd>,
    /// The context of all.
    pub context: Arc<Context>,
}

impl Side {
    /// A queue pair in RESET and all it needs.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn new(vm: &Arc<Vm>, options: &SideOptions) -> Result<Self, Error> {
        let context = Context::new(vm)?;
        let pd = Pd::new(vm)?;
        let send_cq = Cq::new(vm, options.cqe, 0)?;
        let recv_cq = Cq::new(vm, options.cqe, 0)?;
        let uses = Uses {
            context: Some(&context),
            pd: Some(&pd),
            send_cq: Some(&send_cq),
            recv_cq: Some(&recv_cq),
            ..Uses::default()
        };
        let qp = Qp::create(vm, &uses, &options.qp)?;
        let mr = pd.register(options.memory, ACCESS)?;
        Ok(Self {
            qp,
            mr,
            send_cq,
            recv_cq,
            pd,
            context,
        })
    }

    /// The status of the next completion of a send.
    ///
    /// # Errors
    /// If there is none in time.
    pub fn sent(&self) -> Result<u8> {
        let cqe: Cqe = self.send_cq.wait(TIMEOUT).context("no send completion")?;
        Ok(cqe.status)
    }

    /// The same for a receive.
    ///
    /// # Errors
    /// If there is none in time.
    pub fn received(&self) -> Result<u8> {
        let cqe: Cqe = self.recv_cq.wait(TIMEOUT).context("no receive")?;
        Ok(cqe.status)
    }
}

/// Two sides, connected.
#[derive(Debug)]
pub struct Pair {
    /// One.
    pub a: Side,
    /// The other.
    pub b: Side,
}

impl Pair {
    /// Within a VM, as usual.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn new(vm: &Arc<Vm>) -> Result<Self, Error> {
        Self::connect(vm, vm, &SideOptions::default(), |_| ())
    }

    /// Connected as `change` wants it on both sides.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn connect(
        a: &Arc<Vm>,
        b: &Arc<Vm>,
        options: &SideOptions,
        change: impl Fn(&mut Connection),
    ) -> Result<Self, Error> {
        let pair = Self {
            a: Side::new(a, options)?,
            b: Side::new(b, options)?,
        };
        for (from, to) in [(&pair.a, &pair.b), (&pair.b, &pair.a)] {
            let mut connection = Connection::to(&to.qp);
            change(&mut connection);
            from.qp.connect(&connection)?;
        }
        Ok(pair)
    }

    /// A message gets through.
    ///
    /// # Errors
    /// If it does not.
    pub fn works(&self) -> Result<()> {
        let (a, b) = (&self.a, &self.b);
        b.qp.post_recv(500, &[b.mr.sge(0, 64)])?;
        a.qp.send(501, &[a.mr.sge(0, 64)])?;
        completed("a send", a.sent()?, &[wc_status::SUCCESS])?;
        completed("a receive", b.received()?, &[wc_status::SUCCESS])
    }
}

/// A connection that gives up soon.
pub fn impatient(connection: &mut Connection) {
    connection.timeout = 1;
    connection.retry_cnt = 0;
    connection.rnr_retry = 0;
}
