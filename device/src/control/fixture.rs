// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What unit tests of commands and of the RNIC stand on: an adapter without threads, and VMs whose
//! driver sends commands as bytes. Nothing here has a socket, a thread of its own, or a clock.
use std::sync::atomic::Ordering;
use std::sync::Arc;

use virtio_rdma_spec::command::{
    opcode, status, AllocMr, AllocMw, CommandHeader, CreateContext, CreateCq, CreateQp,
    CreateQpResponse, CreateSrq, CreateSrqResponse, Handle, HandleResponse, ModifyQp, PageList,
    QpAttr, RegMr, RegMrResponse, ResponseHeader, SetGid,
};
use virtio_rdma_spec::layout::Layout;
use virtio_rdma_spec::verbs::{access, qp_attr, qp_state, qp_type};
use virtio_rdma_spec::PAGE_SIZE;

use super::execute;
use crate::adapter::{Adapter, AdapterSettings};
use crate::engine::fixture::RecordedEvents;
use crate::limits::Limits;
use crate::memory::{region, GuestMemory, Pages};
use crate::rnic::{Rnic, RnicSettings};
use crate::worker::Loop;

/// Pages of each of the two ranges of a VM's memory, of which one follows the other. A page of 8
/// KiB can lie in both.
pub(crate) const PAGES: u64 = 63;
/// Workers: doorbell queues.
pub(crate) const WORKERS: u16 = 2;

/// Limits that a test can reach.
pub(crate) const LIMITS: Limits = Limits {
    contexts: 2,
    pds: 3,
    mrs: 3,
    mws: 2,
    cqs: 3,
    qps: 3,
    srqs: 2,
    xrcds: 2,
    multicast: 2,
    footprint: Some(1 << 17),
    memory: None,
};

/// The adapter of a test, which does nothing by itself.
pub(crate) struct Host {
    pub adapter: Arc<Adapter>,
    /// Dropped with the adapter: nobody runs them.
    _loops: Vec<Loop>,
}

impl Host {
    pub(crate) fn new() -> Self {
        Self::serving(&[])
    }

    /// The same for devices that are configured, whose own GIDs are reserved. None has a VM yet.
    pub(crate) fn serving(devices: &[RnicSettings]) -> Self {
        let settings = AdapterSettings {
            workers: WORKERS,
            ..AdapterSettings::default()
        };
        let (adapter, loops) = Adapter::without_threads(&settings).unwrap();
        for device in devices {
            adapter.reserve_gids_of(device);
        }
        Self {
            adapter,
            _loops: loops,
        }
    }

    /// A VM whose driver accepted `features`. It runs, and has no objects.
    pub(crate) fn vm(&self, features: u64) -> TestVm {
        self.vm_with(features, &RnicSettings::default())
    }

    /// The same with other settings; limits are [`LIMITS`].
    pub(crate) fn vm_with(&self, features: u64, settings: &RnicSettings) -> TestVm {
        let settings = RnicSettings {
            limits: LIMITS,
            ..settings.clone()
        };
        self.vm_of(features, settings)
    }

    /// The same with these settings.
    pub(crate) fn vm_of(&self, features: u64, settings: RnicSettings) -> TestVm {
        let rnic = self.adapter.attach(settings);
        let ranges = vec![region(0, PAGES), region(PAGES * PAGE_SIZE, PAGES)];
        let memory = GuestMemory::new(ranges).unwrap();
        let events = Arc::new(RecordedEvents::default());
        rnic.set_features(features);
        rnic.set_memory(Some(memory.clone()));
        rnic.start(events.clone());
        TestVm {
            rnic,
            memory,
            events,
        }
    }
}

/// A VM and its driver.
pub(crate) struct TestVm {
    pub rnic: Arc<Rnic>,
    pub memory: GuestMemory,
    pub events: Arc<RecordedEvents>,
}

/// Attributes of the change to RTR.
pub(crate) const RTR: u32 = qp_attr::STATE
    | qp_attr::AV
    | qp_attr::PATH_MTU
    | qp_attr::DEST_QPN
    | qp_attr::RQ_PSN
    | qp_attr::MAX_DEST_RD_ATOMIC
    | qp_attr::MIN_RNR_TIMER;

/// The same with values that there may be.
pub(crate) fn ready_to_receive() -> QpAttr {
    let mut attr = QpAttr {
        qp_state: qp_state::RTR,
        path_mtu: 5,
        dest_qp_num: 77,
        max_dest_rd_atomic: 4,
        ..QpAttr::default()
    };
    attr.av.port_num = 1;
    attr.av.dgid = [1; 16];
    attr
}

/// A list of one page.
pub(crate) fn page(number: u64) -> PageList {
    PageList {
        addr: number * PAGE_SIZE,
        count: 1,
        levels: 0,
        page_shift: 12,
        reserved: 0,
    }
}

/// The status of a response, by name.
pub(crate) fn name(of: u16) -> &'static str {
    status::name(of).unwrap_or("no status")
}

impl TestVm {
    /// Sends a command; returns the body of the response, or the status of the refusal.
    pub(crate) fn send(&self, command: &[u8]) -> Result<Vec<u8>, u16> {
        let response = execute(&self.rnic, command);
        let header = ResponseHeader::get(&response);
        assert_eq!(header.length as usize, response.len());
        assert_eq!(header.reserved, 0);
        if header.status == status::OK {
            return Ok(response[ResponseHeader::SIZE..].to_vec());
        }
        assert_eq!(response.len(), ResponseHeader::SIZE, "an error has no body");
        Err(header.status)
    }

    /// Sends a command with these bytes as its body.
    pub(crate) fn command(&self, opcode: u16, body: &[u8]) -> Result<Vec<u8>, u16> {
        let header = CommandHeader {
            opcode,
            reserved: 0,
            length: (CommandHeader::SIZE + body.len()) as u32,
        };
        self.send(&[&header.to_bytes()[..], body].concat())
    }

    /// Sends a command with this body, and takes the response as a `R`.
    pub(crate) fn ask<B: Layout, R: Layout>(&self, opcode: u16, body: &B) -> Result<R, u16> {
        let mut bytes = vec![0; B::SIZE];
        body.put(&mut bytes);
        let response = self.command(opcode, &bytes)?;
        assert_eq!(response.len(), R::SIZE);
        Ok(R::get(&response))
    }

    /// The same where the response has no body.
    pub(crate) fn tell<B: Layout>(&self, opcode: u16, body: &B) -> Result<(), u16> {
        self.ask::<B, [u8; 0]>(opcode, body).map(drop)
    }

    /// A command about a handle, with no body in its response.
    pub(crate) fn handle(&self, opcode: u16, handle: u32) -> Result<(), u16> {
        let reserved = 0;
        self.tell(opcode, &Handle { handle, reserved })
    }

    /// Creates what needs no body.
    pub(crate) fn create(&self, opcode: u16) -> Result<u32, u16> {
        let made: HandleResponse = self.ask::<[u8; 0], _>(opcode, &[])?;
        Ok(made.handle)
    }

    pub(crate) fn pd(&self) -> u32 {
        self.create(opcode::CREATE_PD).unwrap()
    }

    /// Doorbell memory is in the last pages of the second range.
    pub(crate) fn context_body(&self) -> CreateContext {
        let pages: Vec<u64> = (0..3 * u64::from(WORKERS))
            .map(|n| (2 * PAGES - 1 - n) * PAGE_SIZE)
            .collect();
        let table = 2 * PAGES - 10;
        self.write(table, &pages);
        CreateContext {
            doorbell: PageList {
                addr: table * PAGE_SIZE,
                count: pages.len() as u32,
                levels: 1,
                page_shift: 12,
                reserved: 0,
            },
            reserved: 0,
        }
    }

    pub(crate) fn context(&self) -> u32 {
        let body = self.context_body();
        let made: HandleResponse = self.ask(opcode::CREATE_CONTEXT, &body).unwrap();
        made.handle
    }

    /// A completion queue that there may be.
    pub(crate) fn cq_body(&self) -> CreateCq {
        CreateCq {
            entries: 64,
            comp_vector: 0,
            stride: 32,
            ring_offset: 128,
            flags: 0,
            buffer: self.pages(10, &[10, 11]),
            reserved: 0,
        }
    }

    pub(crate) fn cq(&self) -> u32 {
        let made: HandleResponse = self.ask(opcode::CREATE_CQ, &self.cq_body()).unwrap();
        made.handle
    }

    /// A list of these pages, whose table is behind page `first` of the second range.
    pub(crate) fn pages(&self, first: u64, pages: &[u64]) -> PageList {
        let table = PAGES + first;
        let pages: Vec<u64> = pages.iter().map(|page| page * PAGE_SIZE).collect();
        self.write(table, &pages);
        PageList {
            addr: table * PAGE_SIZE,
            count: pages.len() as u32,
            levels: 1,
            page_shift: 12,
            reserved: 0,
        }
    }

    /// Writes words to a page of memory.
    pub(crate) fn write(&self, page: u64, words: &[u64]) {
        let page = Pages::resolve(&self.memory, &[page * PAGE_SIZE], 12).unwrap();
        for (i, word) in words.iter().enumerate() {
            let at = page.word(8 * i as u64).unwrap();
            at.store(word.to_le(), Ordering::SeqCst);
        }
    }

    /// The first half-word of a page.
    pub(crate) fn read(&self, page: u64) -> u32 {
        let page = Pages::resolve(&self.memory, &[page * PAGE_SIZE], 12).unwrap();
        u32::from_le(page.half_word(0).unwrap().load(Ordering::SeqCst))
    }

    /// A queue pair that there may be, with new objects.
    pub(crate) fn qp_body(&self) -> CreateQp {
        let cq = self.cq();
        CreateQp {
            pd: self.pd(),
            context: self.context(),
            send_cq: cq,
            recv_cq: cq,
            qp_type: qp_type::RC,
            sq_entries: 16,
            sq_stride: 64,
            sq_offset: 64,
            rq_entries: 16,
            rq_stride: 32,
            rq_offset: 64 + 16 * 64,
            max_send_sge: 1,
            max_recv_sge: 1,
            buffer: page(20),
            ..CreateQp::default()
        }
    }

    pub(crate) fn make_qp(&self, body: &CreateQp) -> Result<CreateQpResponse, u16> {
        self.ask(opcode::CREATE_QP, body)
    }

    /// A shared receive queue that there may be, with new objects.
    pub(crate) fn srq_body(&self) -> CreateSrq {
        CreateSrq {
            pd: self.pd(),
            context: self.context(),
            entries: 16,
            stride: 32,
            ring_offset: 128,
            max_sge: 1,
            limit: 4,
            buffer: page(30),
            ..CreateSrq::default()
        }
    }

    pub(crate) fn make_srq(&self, body: &CreateSrq) -> Result<CreateSrqResponse, u16> {
        self.ask(opcode::CREATE_SRQ, body)
    }

    /// A region that there may be: two pages in a new protection domain.
    pub(crate) fn mr_body(&self) -> RegMr {
        RegMr {
            pd: self.pd(),
            access: access::LOCAL_WRITE | access::REMOTE_WRITE,
            iova: 0x10000,
            length: 2 * PAGE_SIZE,
            offset: 0,
            pages: self.pages(1, &[40, 41]),
            key: 7,
            reserved: [0; 7],
        }
    }

    pub(crate) fn register(&self, body: &RegMr) -> Result<RegMrResponse, u16> {
        self.ask(opcode::REG_MR, body)
    }

    pub(crate) fn allocate_mr(&self, body: &AllocMr) -> Result<RegMrResponse, u16> {
        self.ask(opcode::ALLOC_MR, body)
    }

    pub(crate) fn allocate_mw(&self, body: &AllocMw) -> Result<HandleResponse, u16> {
        self.ask(opcode::ALLOC_MW, body)
    }

    pub(crate) fn modify(&self, qpn: u32, attr_mask: u32, attr: QpAttr) -> Result<(), u16> {
        let body = ModifyQp {
            qpn,
            attr_mask,
            attr,
        };
        self.tell(opcode::MODIFY_QP, &body)
    }

    /// From RESET to INIT.
    pub(crate) fn init(&self, qpn: u32) -> Result<(), u16> {
        let attr = QpAttr {
            qp_state: qp_state::INIT,
            port_num: 1,
            ..QpAttr::default()
        };
        let mask = qp_attr::STATE | qp_attr::PKEY_INDEX | qp_attr::PORT | qp_attr::ACCESS_FLAGS;
        self.modify(qpn, mask, attr)
    }

    /// Makes a queue pair and connects it to one at `dgid`: it is in RTR.
    pub(crate) fn connected(&self, body: &CreateQp, dgid: [u8; 16]) -> u32 {
        let qpn = self.make_qp(body).unwrap().qpn;
        self.init(qpn).unwrap();
        let mut attr = ready_to_receive();
        attr.av.dgid = dgid;
        self.modify(qpn, RTR, attr).unwrap();
        qpn
    }

    /// Gives a queue pair in RTR another path, in SQD.
    pub(crate) fn redirect(&self, qpn: u32, dgid: [u8; 16]) {
        let mut attr = ready_to_receive();
        attr.av.dgid = dgid;
        let requester = qp_attr::SQ_PSN
            | qp_attr::TIMEOUT
            | qp_attr::RETRY_CNT
            | qp_attr::RNR_RETRY
            | qp_attr::MAX_QP_RD_ATOMIC;
        for (qp_state, mask) in [
            (qp_state::RTS, requester),
            (qp_state::SQD, 0),
            (qp_state::SQD, qp_attr::AV),
        ] {
            attr.qp_state = qp_state;
            self.modify(qpn, mask | qp_attr::STATE, attr).unwrap();
        }
    }

    /// An entry of the GID table.
    pub(crate) fn gid_body(gid: [u8; 16]) -> SetGid {
        SetGid {
            gid,
            index: 0,
            gid_type: 1,
            port_num: 1,
            vlan: 0xffff,
            mac: [2, 0, 0, 0, 0, 1],
            reserved: [0; 12],
        }
    }

    pub(crate) fn set_gid(&self, body: &SetGid) -> Result<(), u16> {
        self.tell(opcode::SET_GID, body)
    }
}
