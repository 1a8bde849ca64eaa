// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Objects of all kinds by commands alone, as many as the device gives, and lists of more pages
//! than there are.
use std::sync::Arc;

use vhost_device_rdma_bare::core::command::{
    AllocMr, AllocMw, AttachMcast, Command, CreateContext, CreateCq, CreatePd, CreateQp, CreateSrq,
    CreateXrcd, DeallocMw, DeregMr, DestroyContext, DestroyCq, DestroyPd, DestroyQp, DestroySrq,
    DestroyXrcd, DetachMcast, RegMr,
};
use vhost_device_rdma_bare::spec::command::{self, mw_type, Handle, Multicast, PageList};
use vhost_device_rdma_bare::spec::verbs::{access, qp_type};
use vhost_device_rdma_bare::{page_list, Buffer, Error, Pd, Placement, Vm, PAGE};

/// A list of 2^27 pages that takes three tables: the first two name the next table again and again,
/// and the third one page.
///
/// # Errors
/// If the VM has no memory.
pub fn aliased(vm: &Vm) -> Result<(PageList, Buffer), Error> {
    let tables = vm.buffer(3 * PAGE, Placement::Contiguous)?;
    let page = tables.page(0);
    for (table, entry) in [tables.page(1), tables.page(2), page]
        .into_iter()
        .enumerate()
    {
        for word in 0..512 {
            tables
                .view()
                .write(table * PAGE + 8 * word, &entry.to_le_bytes());
        }
    }
    let list = PageList {
        addr: page,
        count: 1 << 27,
        levels: 3,
        page_shift: 12,
        reserved: 0,
    };
    Ok((list, tables))
}

/// Registers what a list of pages describes.
///
/// # Errors
/// If the device refuses.
pub fn register(vm: &Vm, pd: &Pd, pages: PageList) -> Result<u32, Error> {
    let body = command::RegMr {
        pd: pd.handle(),
        access: access::LOCAL_WRITE,
        iova: 0,
        length: u64::from(pages.count) * PAGE as u64,
        pages,
        ..command::RegMr::default()
    };
    Ok(vm.execute::<RegMr>(&body)?.lkey)
}

/// An object of each kind, by commands alone: all use the same memory.
#[derive(Debug)]
pub struct Maker {
    vm: Arc<Vm>,
    buffer: Buffer,
    pd: u32,
    context: u32,
    cq: u32,
    datagram_qp: u32,
}

/// What a maker makes, and how it goes.
pub type Kind = (
    &'static str,
    fn(&Maker, u32) -> Result<u32, Error>,
    fn(&Vm, u32) -> Result<(), Error>,
);

/// Destroys an object.
///
/// # Errors
/// If the device refuses.
pub fn destroy<C: Command<Body = Handle>>(vm: &Vm, handle: u32) -> Result<(), Error> {
    let reserved = 0;
    vm.execute::<C>(&Handle { handle, reserved }).map(drop)
}

/// All kinds, by their names in the status.
pub const KINDS: [Kind; 9] = [
    (
        "contexts",
        |maker, _| maker.context(),
        destroy::<DestroyContext>,
    ),
    (
        "pds",
        |maker, _| Ok(maker.vm.execute::<CreatePd>(&[])?.handle),
        destroy::<DestroyPd>,
    ),
    (
        "xrcds",
        |maker, _| Ok(maker.vm.execute::<CreateXrcd>(&[])?.handle),
        destroy::<DestroyXrcd>,
    ),
    ("cqs", |maker, _| maker.cq(), destroy::<DestroyCq>),
    (
        "qps",
        |maker, _| maker.qp(qp_type::RC),
        destroy::<DestroyQp>,
    ),
    ("srqs", |maker, _| maker.srq(), destroy::<DestroySrq>),
    ("mrs", |maker, i| maker.mr(i), destroy::<DeregMr>),
    ("mws", |maker, _| maker.mw(), destroy::<DeallocMw>),
    (
        "attachments",
        |maker, i| maker.attach(i),
        // They go with the queue pair.
        |_, _| Ok(()),
    ),
];

impl Maker {
    /// Makes what the others need.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn new(vm: &Arc<Vm>) -> Result<Self, Error> {
        let buffer = vm.buffer(64 * PAGE, Placement::Scattered)?;
        let mut maker = Self {
            vm: vm.clone(),
            buffer,
            pd: vm.execute::<CreatePd>(&[])?.handle,
            context: 0,
            cq: 0,
            datagram_qp: 0,
        };
        maker.context = maker.context()?;
        maker.cq = maker.cq()?;
        maker.datagram_qp = maker.qp(qp_type::UD)?;
        Ok(maker)
    }

    /// The list of one page.
    #[must_use]
    pub fn page(&self) -> PageList {
        PageList {
            addr: self.buffer.page(0),
            count: 1,
            page_shift: 12,
            ..PageList::default()
        }
    }

    fn context(&self) -> Result<u32, Error> {
        let pages = usize::from(self.vm.config().num_doorbell_queues) * 3;
        let pages: Vec<u64> = (0..pages).map(|page| self.buffer.page(page)).collect();
        let (doorbell, _tables) = page_list(&self.vm.region(0), &pages)?;
        let body = command::CreateContext {
            doorbell,
            reserved: 0,
        };
        Ok(self.vm.execute::<CreateContext>(&body)?.handle)
    }

    fn cq(&self) -> Result<u32, Error> {
        let body = command::CreateCq {
            entries: 16,
            stride: 32,
            ring_offset: 128,
            buffer: self.page(),
            ..command::CreateCq::default()
        };
        Ok(self.vm.execute::<CreateCq>(&body)?.handle)
    }

    fn qp(&self, qp_type: u8) -> Result<u32, Error> {
        let body = command::CreateQp {
            pd: self.pd,
            context: self.context,
            send_cq: self.cq,
            recv_cq: self.cq,
            qp_type,
            sq_entries: 4,
            sq_stride: 128,
            sq_offset: 128,
            rq_entries: 4,
            rq_stride: 32,
            rq_offset: 1024,
            max_send_sge: 1,
            max_recv_sge: 1,
            buffer: self.page(),
            ..command::CreateQp::default()
        };
        Ok(self.vm.execute::<CreateQp>(&body)?.qpn)
    }

    fn srq(&self) -> Result<u32, Error> {
        let body = command::CreateSrq {
            pd: self.pd,
            context: self.context,
            entries: 16,
            stride: 32,
            ring_offset: 128,
            max_sge: 1,
            buffer: self.page(),
            ..command::CreateSrq::default()
        };
        Ok(self.vm.execute::<CreateSrq>(&body)?.srqn)
    }

    /// A region of one page, of many, or a fast one.
    fn mr(&self, i: u32) -> Result<u32, Error> {
        let pd = self.pd;
        if i % 3 == 0 {
            let body = command::AllocMr {
                pd,
                max_pages: 1 << 20,
                ..command::AllocMr::default()
            };
            return Ok(self.vm.execute::<AllocMr>(&body)?.lkey);
        }
        let (pages, _tables) = match i % 3 {
            1 => (self.page(), None),
            _ => self.buffer.page_list()?,
        };
        let body = command::RegMr {
            pd,
            access: access::LOCAL_WRITE,
            length: u64::from(pages.count) * PAGE as u64,
            pages,
            ..command::RegMr::default()
        };
        Ok(self.vm.execute::<RegMr>(&body)?.lkey)
    }

    fn mw(&self) -> Result<u32, Error> {
        let body = command::AllocMw {
            pd: self.pd,
            mw_type: mw_type::TYPE_2,
            ..command::AllocMw::default()
        };
        Ok(self.vm.execute::<AllocMw>(&body)?.handle)
    }

    fn attach(&self, i: u32) -> Result<u32, Error> {
        let [a, b, c, d] = i.to_be_bytes();
        let body = Multicast {
            gid: [0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, a, b, c, d],
            qpn: self.datagram_qp,
            reserved: 0,
        };
        self.vm.execute::<AttachMcast>(&body)?;
        self.vm.execute::<DetachMcast>(&body)?;
        self.vm.execute::<AttachMcast>(&body)?;
        Ok(i)
    }

    /// Destroys what is in all objects.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn end(self) -> Result<(), Error> {
        let Self { vm, .. } = self;
        destroy::<DestroyQp>(&vm, self.datagram_qp)?;
        destroy::<DestroyCq>(&vm, self.cq)?;
        destroy::<DestroyContext>(&vm, self.context)?;
        destroy::<DestroyPd>(&vm, self.pd)
    }
}
