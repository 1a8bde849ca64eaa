// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the targets stand on: a device in this process whose worker runs when it is told to, and
//! VMs whose driver sends commands as bytes and writes rings by hand.
use std::fs::File;
use std::sync::atomic::Ordering;
use std::sync::Arc;

use rustix::fs::{memfd_create, MemfdFlags};
use vhost_device_rdma::adapter::{Adapter, AdapterSettings};
use vhost_device_rdma::config::{OpenUplink, UplinksConfig};
use vhost_device_rdma::control::execute;
use vhost_device_rdma::engine::events::EventSink;
use vhost_device_rdma::engine::vm::Uplink;
use vhost_device_rdma::fabric::iwarp::port::PortSettings;
use vhost_device_rdma::limits::Limits;
use vhost_device_rdma::memory::{GuestMemory, RegionInfo};
use vhost_device_rdma::rnic::{Rnic, RnicSettings};
use vhost_device_rdma::worker::Loop;
use vhost_device_rdma_bare::mapping::{Mapping, View};
use virtio_rdma_spec::command::{
    opcode, status, CommandHeader, Handle, HandleResponse, PageList, ResponseHeader, SetGid,
};
use virtio_rdma_spec::config::feature;
use virtio_rdma_spec::doorbell::{self, Bit, BLOCK_PAGES};
use virtio_rdma_spec::event::{AsyncEvent, CompletionEvent};
use virtio_rdma_spec::layout::Layout;
use virtio_rdma_spec::PAGE_SIZE;

/// Bytes of a page.
pub const PAGE: usize = PAGE_SIZE as usize;
/// Pages of a VM's memory.
pub const PAGES: usize = 256;
/// Guest-physical address of the first of them: zero is no memory.
pub const BASE: u64 = 0x10_0000;
/// The regions that a VM's memory consists of: they follow each other.
pub const REGIONS: usize = 4;

/// All features but that of regions of all memory.
pub const FEATURES: u64 = ((1 << (feature::SRD + 1)) - 1) & !(1 << feature::PHYSICAL_MR);

/// Those that go with iWARP.
pub const FEATURES_OF_IWARP: u64 = (FEATURES | 1 << feature::IWARP)
    & !(1 << feature::UD
        | 1 << feature::UC
        | 1 << feature::XRC
        | 1 << feature::FLUSH
        | 1 << feature::HEADER_TYPE
        | 1 << feature::SRD);

/// Limits that an input can reach.
pub const LIMITS: Limits = Limits {
    contexts: 8,
    pds: 8,
    mrs: 24,
    mws: 8,
    cqs: 24,
    qps: 32,
    srqs: 8,
    xrcds: 4,
    multicast: 8,
    footprint: Some(4 << 20),
    memory: None,
};

/// The device.
pub struct Host {
    /// Its adapter.
    pub adapter: Arc<Adapter>,
    work: Vec<Loop>,
}

impl Default for Host {
    fn default() -> Self {
        Self::new()
    }
}

impl Host {
    /// A device with one worker, which does nothing by itself.
    ///
    /// # Panics
    /// If the system refuses.
    #[must_use]
    pub fn new() -> Self {
        Self::with_uplinks(UplinksConfig::default()).expect("an adapter")
    }

    /// The same with ways out of this process.
    ///
    /// # Errors
    /// If the system refuses an address.
    ///
    /// # Panics
    /// If it refuses more.
    pub fn with_uplinks(uplinks: UplinksConfig) -> Result<Self, OpenUplink> {
        Ok(Self::with(&AdapterSettings {
            uplinks: uplinks.open()?,
            ..AdapterSettings::default()
        }))
    }

    /// The same for VMs with a port of iWARP.
    ///
    /// # Panics
    /// If the system refuses.
    #[must_use]
    pub fn with_iwarp() -> Self {
        Self::with(&AdapterSettings {
            iwarp: true,
            ..AdapterSettings::default()
        })
    }

    fn with(settings: &AdapterSettings) -> Self {
        let made = Adapter::without_threads(settings);
        let (adapter, work) = made.expect("an adapter");
        Self { adapter, work }
    }

    /// Lets the worker do some rounds.
    pub fn rounds(&mut self, count: usize) {
        for _ in 0..count {
            for work in &mut self.work {
                work.round();
            }
        }
    }

    /// The same with busy polling.
    pub fn busy_round(&mut self) {
        for work in &mut self.work {
            work.busy_round();
        }
    }

    /// A VM that runs, whose driver accepted `features`, and which has the GID with this last byte.
    ///
    /// # Panics
    /// If the system refuses, or the device the GID.
    #[must_use]
    pub fn guest(&self, number: u8, features: u64) -> Guest {
        self.guest_with(number, features, None)
    }

    /// The same with a way out of this process.
    ///
    /// # Panics
    /// If the system refuses, or the device the GID.
    #[must_use]
    pub fn guest_with(&self, number: u8, features: u64, uplink: Option<Uplink>) -> Guest {
        let mut guest = self.attach(number, features, uplink, None);
        guest.set_gid();
        guest
    }

    /// A VM with a port of iWARP.
    ///
    /// # Panics
    /// If the system refuses.
    #[must_use]
    pub fn guest_of_iwarp(&self, number: u8, port: PortSettings) -> Guest {
        self.attach(number, FEATURES_OF_IWARP, None, Some(Arc::new(port)))
    }

    fn attach(
        &self,
        number: u8,
        features: u64,
        uplink: Option<Uplink>,
        iwarp: Option<Arc<PortSettings>>,
    ) -> Guest {
        let settings = RnicSettings {
            name: format!("vm{number}"),
            mac: [0x52, 0x54, 0, 0, 0, number],
            limits: LIMITS,
            uplink,
            iwarp,
            ..RnicSettings::default()
        };
        let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).expect("memory"));
        file.set_len((PAGES * PAGE) as u64).expect("memory");
        let mapping = Mapping::new(&file, 0, PAGES * PAGE).expect("a mapping");
        let view = View::new(Arc::new(mapping), 0, PAGES * PAGE).expect("a view");
        let guest = Guest {
            rnic: self.adapter.attach(settings),
            file,
            view,
            gid: gid(number),
            free: std::array::from_fn(|region| region * PAGES / REGIONS),
            returned: Vec::new(),
            spread: None,
        };
        guest.rnic.set_features(features);
        guest.set_memory([true; REGIONS]);
        guest.rnic.start(Arc::new(Ignored));
        guest
    }

    /// The VM goes away. What it made the device keep is gone then.
    ///
    /// # Panics
    /// If anything is left.
    pub fn remove(&mut self, guest: Guest) {
        guest.rnic.detach();
        self.rounds(2);
        let left = guest.status();
        assert_eq!(left["footprint_bytes"], 0, "{left}");
        let counts = left["counts"].as_object().expect("counts");
        assert!(counts.values().all(|count| *count == 0), "{left}");
    }
}

/// Events are of no interest to a guest that breaks the rules.
struct Ignored;

impl EventSink for Ignored {
    fn completion(&self, _: u16, _: CompletionEvent) {}
    fn asynchronous(&self, _: AsyncEvent) {}
    fn forget_cq(&self, _: u16, _: u32) {}
    fn forget_qp(&self, _: u32) {}
    fn forget_srq(&self, _: u32) {}
}

/// The GID of a VM.
#[must_use]
pub fn gid(number: u8) -> [u8; 16] {
    let mut gid = [0; 16];
    (gid[0], gid[1], gid[15]) = (0xfe, 0x80, number);
    gid
}

/// A VM.
pub struct Guest {
    /// What it sees of the device.
    pub rnic: Arc<Rnic>,
    file: File,
    /// Its memory.
    pub view: View,
    /// Its GID.
    pub gid: [u8; 16],
    /// The next free page of each region.
    free: [usize; REGIONS],
    /// Pages that were given back.
    returned: Vec<usize>,
    /// What is taken next comes from this region, and then from the next; otherwise, all comes from
    /// the first.
    spread: Option<usize>,
}

impl Guest {
    /// Guest-physical address of a page.
    #[must_use]
    pub fn address(page: usize) -> u64 {
        BASE + (page * PAGE) as u64
    }

    /// Gives the device those of the VM's regions that `present` says.
    ///
    /// # Panics
    /// If the system refuses.
    pub fn set_memory(&self, present: [bool; REGIONS]) {
        let size = (PAGES / REGIONS * PAGE) as u64;
        let regions: Vec<_> = (0..)
            .zip(present)
            .filter(|(_, present)| *present)
            .map(|(number, _)| RegionInfo {
                guest_addr: BASE + number * size,
                size,
                fd_offset: number * size,
                file: self.file.try_clone().expect("a file"),
            })
            .collect();
        let memory = (!regions.is_empty()).then(|| GuestMemory::new(regions).expect("memory"));
        self.rnic.set_memory(memory);
    }

    /// Starts it again.
    pub fn start(&self) {
        self.rnic.start(Arc::new(Ignored));
    }

    /// Sets its GID, as after a reset.
    ///
    /// # Panics
    /// If the device refuses.
    pub fn set_gid(&mut self) {
        let body = SetGid {
            gid: self.gid,
            gid_type: 1,
            port_num: 1,
            vlan: 0xffff,
            mac: self.rnic.config().mac,
            ..SetGid::default()
        };
        self.tell(opcode::SET_GID, &body).expect("a GID");
    }

    /// What is taken from now on is in all regions in turn.
    pub fn spread(&mut self) {
        self.spread = Some(0);
    }

    /// Takes pages that nobody has taken before.
    ///
    /// # Panics
    /// If there are no more.
    pub fn take_pages(&mut self, count: usize) -> usize {
        if count == 1 {
            if let Some(page) = self.returned.pop() {
                return page;
            }
        }
        let region = self.spread.unwrap_or(0);
        let end = self
            .spread
            .map_or(PAGES, |_| (region + 1) * PAGES / REGIONS);
        self.spread = self.spread.map(|region| (region + 1) % REGIONS);
        let first = self.free[region];
        self.free[region] += count;
        assert!(self.free[region] <= end, "there are no pages left");
        first
    }

    /// Gives a page back, zeroed: the next one that is taken is this.
    pub fn give_page(&mut self, page: usize) {
        self.view.write(page * PAGE, &[0; PAGE]);
        self.returned.push(page);
    }

    /// A list of pages that follow each other. Its table is one more page.
    pub fn list(&mut self, first: usize, count: usize) -> PageList {
        if count == 1 {
            return PageList {
                addr: Self::address(first),
                count: 1,
                page_shift: 12,
                ..PageList::default()
            };
        }
        let table = self.take_pages(1);
        self.list_at(table, first, count)
    }

    /// The same with the table in a given page.
    pub fn list_at(&self, table: usize, first: usize, count: usize) -> PageList {
        for i in 0..count.min(512) {
            let entry = self.view.u64(table * PAGE + 8 * i);
            entry.store(Self::address(first + i).to_le(), Ordering::Relaxed);
        }
        PageList {
            addr: Self::address(table),
            count: count as u32,
            levels: 1,
            page_shift: 12,
            reserved: 0,
        }
    }

    /// Sends bytes as a command. Returns the body of the response, or its status.
    ///
    /// # Errors
    /// The status.
    ///
    /// # Panics
    /// If the response is none.
    pub fn send(&self, command: &[u8]) -> Result<Vec<u8>, u16> {
        let response = execute(&self.rnic, command);
        let header = ResponseHeader::get(&response);
        assert_eq!(header.length as usize, response.len());
        assert_eq!(header.reserved, 0);
        assert!(status::name(header.status).is_some(), "{}", header.status);
        if header.status == status::OK {
            return Ok(response[ResponseHeader::SIZE..].to_vec());
        }
        assert_eq!(response.len(), ResponseHeader::SIZE);
        Err(header.status)
    }

    /// Sends a command with a body.
    ///
    /// # Errors
    /// The status.
    pub fn command(&self, opcode: u16, body: &[u8]) -> Result<Vec<u8>, u16> {
        self.send(&command(opcode, body))
    }

    /// The same with layouts.
    ///
    /// # Errors
    /// The status.
    pub fn ask<B: Layout, R: Layout>(&self, opcode: u16, body: &B) -> Result<R, u16> {
        let response = self.command(opcode, &bytes(body))?;
        assert_eq!(response.len(), R::SIZE);
        Ok(R::get(&response))
    }

    /// The same without a body in the response.
    ///
    /// # Errors
    /// The status.
    pub fn tell<B: Layout>(&self, opcode: u16, body: &B) -> Result<(), u16> {
        self.ask::<B, [u8; 0]>(opcode, body).map(drop)
    }

    /// A command about a handle.
    ///
    /// # Errors
    /// The status.
    pub fn handle(&self, opcode: u16, handle: u32) -> Result<(), u16> {
        let body = Handle {
            handle,
            reserved: 0,
        };
        self.command(opcode, &bytes(&body)).map(drop)
    }

    /// Creates what needs no body.
    ///
    /// # Errors
    /// The status.
    pub fn create(&self, opcode: u16) -> Result<u32, u16> {
        let made: HandleResponse = self.ask(opcode, &[0u8; 0])?;
        Ok(made.handle)
    }

    /// Sets the bit of a slot in doorbell memory.
    pub fn ring(&self, doorbell_page: usize, slot: u32) {
        let start = doorbell_page * PAGE;
        let set = |offset: usize, mask: u64| {
            let word = self.view.u64(start + offset);
            word.fetch_or(mask.to_le(), Ordering::SeqCst);
        };
        match doorbell::bit(slot) {
            Some(Bit::Direct { root }) => set(0, root),
            Some(Bit::Leaf {
                leaf_offset,
                leaf,
                summary_offset,
                summary,
                root,
            }) => {
                set(leaf_offset, leaf);
                set(summary_offset, summary);
                set(0, root);
            }
            None => {}
        }
    }

    /// What the device says of it.
    #[must_use]
    pub fn status(&self) -> serde_json::Value {
        self.rnic.status()
    }

    /// Pages of the doorbell memory of a context.
    pub const DOORBELL_PAGES: usize = BLOCK_PAGES as usize;
}

/// A command with this body, as bytes.
#[must_use]
pub fn command(opcode: u16, body: &[u8]) -> Vec<u8> {
    let header = CommandHeader {
        opcode,
        reserved: 0,
        length: (CommandHeader::SIZE + body.len()) as u32,
    };
    [&header.to_bytes()[..], body].concat()
}

/// A layout as bytes.
#[must_use]
pub fn bytes<T: Layout>(value: &T) -> Vec<u8> {
    let mut bytes = vec![0; T::SIZE];
    value.put(&mut bytes);
    bytes
}
