// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the messages of the front end mean: features, memory, configuration, and the life of the
//! virtqueues.
use std::fs::File;
use std::io;
use std::sync::Arc;

use log::{debug, info};
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserShMemConfig, VhostUserSharedMsg,
    VhostUserSingleMemoryRegion, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{
    Error, GpuBackend, Result, VhostUserBackendReqHandlerMut, VhostUserProtocolFeatures,
    VhostUserVirtioFeatures,
};
use vhost::VhostUserMemoryRegionBase;
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use virtio_rdma_spec::command::{status, ResponseHeader};
use virtio_rdma_spec::config::{feature, first_doorbell_queue, CONTROL_QUEUE};
use vmm_sys_util::epoll::Epoll;

use super::events::Events;
use super::ring::{self, Ring, TooLong};
use crate::control;
use crate::memory::{GuestMemory, RegionInfo};
use crate::rnic::Rnic;

/// Memory regions of a VM, at most.
const MAX_MEMORY_REGIONS: u64 = 509;
/// Commands that are handled before the front end and the other queues are looked at again.
const COMMANDS_PER_TURN: usize = 64;
/// Event numbers of virtqueue kicks start here.
pub const FIRST_KICK_TOKEN: u64 = 1 << 16;

/// The virtio features that we offer.
const FEATURES: u64 = 1 << feature::RC
    | 1 << feature::UD
    | 1 << feature::UC
    | 1 << feature::SRQ
    | 1 << feature::XRC
    | 1 << feature::ATOMIC
    | 1 << feature::MW
    | 1 << feature::REREG_MR
    | 1 << feature::RESIZE_CQ
    | 1 << feature::CQ_TIMESTAMP
    | 1 << feature::FLUSH
    | 1 << feature::PHYSICAL_MR
    | 1 << feature::SRQ_RESIZE
    | 1 << feature::CQ_MODERATION
    | 1 << feature::FAST_REG
    | 1 << feature::PORT_STATE
    | 1 << feature::HEADER_TYPE
    | 1 << VIRTIO_RING_F_INDIRECT_DESC
    | 1 << VIRTIO_RING_F_EVENT_IDX
    | 1 << VIRTIO_F_VERSION_1
    | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();

/// What the response of a command is held in.
enum Response<R> {
    Executed(R),
    Refused([u8; ResponseHeader::SIZE]),
}

impl<R: AsRef<[u8]>> AsRef<[u8]> for Response<R> {
    fn as_ref(&self) -> &[u8] {
        match self {
            Self::Executed(response) => response.as_ref(),
            Self::Refused(response) => response,
        }
    }
}

/// The device, as one front end sees it.
pub struct Device {
    rnic: Arc<Rnic>,
    epoll: Arc<Epoll>,
    first_doorbell_queue: u16,
    memory: Option<GuestMemory>,
    control: Ring,
    events: Arc<Events>,
    doorbells: Vec<Ring>,
    /// Whether the rnic may touch guest memory.
    running: bool,
    /// Next available index of the control queue when it was stopped last.
    stopped_at: Option<u16>,
    /// The control queue has more commands than are executed at a time.
    more_commands: bool,
}

impl Device {
    /// `rnic` behind a new connection; kicks go to `epoll`.
    pub fn new(rnic: Arc<Rnic>, epoll: Arc<Epoll>) -> Self {
        let config = rnic.config();
        let events = Arc::new(Events::new(&rnic));
        let first_doorbell_queue = first_doorbell_queue(config.num_completion_queues);
        let end = first_doorbell_queue.saturating_add(config.num_doorbell_queues);
        Self {
            rnic,
            epoll,
            first_doorbell_queue,
            memory: None,
            control: Ring::new(CONTROL_QUEUE),
            events,
            doorbells: (first_doorbell_queue..end).map(Ring::new).collect(),
            running: false,
            stopped_at: None,
            more_commands: false,
        }
    }

    /// Whether [`Device::kicked`] should be called again for the control queue.
    pub fn has_more_commands(&self) -> bool {
        self.more_commands
    }

    /// The guest kicked virtqueue `index`.
    pub fn kicked(&mut self, index: u16) {
        if index == CONTROL_QUEUE {
            self.serve_commands();
        } else {
            self.events.deliver(index);
        }
    }

    /// The front end is gone.
    pub fn disconnect(&mut self) {
        self.stop_all();
        self.rnic.detach();
    }

    fn serve_commands(&mut self) {
        let rnic = &self.rnic;
        let result = self
            .control
            .serve(COMMANDS_PER_TURN, |command| match command {
                Ok(command) => Response::Executed(control::execute(rnic, command)),
                Err(TooLong) => Response::Refused(
                    ResponseHeader {
                        status: status::EINVAL,
                        reserved: 0,
                        length: ResponseHeader::SIZE as u32,
                    }
                    .to_bytes(),
                ),
            });
        self.more_commands = match result {
            Ok(more) => more,
            Err(error) => {
                self.rnic
                    .vm()
                    .warn(format_args!("{}", super::sentence(&error)));
                false
            }
        };
    }

    /// Applies `f` to virtqueue `index`.
    fn with_ring<R>(&mut self, index: u32, f: impl FnOnce(&mut Ring) -> R) -> Result<R> {
        let index = u16::try_from(index).map_err(|_| Error::InvalidParam)?;
        if index == CONTROL_QUEUE {
            return Ok(f(&mut self.control));
        }
        if let Some(i) = index.checked_sub(self.first_doorbell_queue) {
            return self
                .doorbells
                .get_mut(usize::from(i))
                .map(f)
                .ok_or(Error::InvalidParam);
        }
        self.events.with_ring(index, f).ok_or(Error::InvalidParam)
    }

    fn for_each_ring(&mut self, mut f: impl FnMut(&mut Ring)) {
        let queues = self
            .first_doorbell_queue
            .saturating_add(self.doorbells.len() as u16);
        for index in 0..queues {
            // Every index below the number of queues is one.
            let _ = self.with_ring(index.into(), &mut f);
        }
    }

    /// The doorbell queue that virtqueue `index` is.
    fn doorbell(&self, index: u32) -> Option<u16> {
        let doorbell = u16::try_from(index)
            .ok()?
            .checked_sub(self.first_doorbell_queue)?;
        (usize::from(doorbell) < self.doorbells.len()).then_some(doorbell)
    }

    /// Brings the rnic to the state that the control queue asks for, after a change.
    fn update(&mut self) {
        let run = self.control.is_started() && self.memory.is_some();
        if run && !self.running {
            debug!("the VM runs");
            self.running = true;
            self.rnic.start(self.events.clone());
        } else if !run && self.running {
            self.running = false;
            self.rnic.stop();
            debug!("the VM is stopped");
        }
        if run {
            self.serve_commands();
        }
    }

    /// Stops the rnic and all virtqueues.
    fn stop_all(&mut self) {
        if self.running {
            self.running = false;
            self.rnic.stop();
        }
        for doorbell in (0..).take(self.doorbells.len()) {
            self.rnic.set_doorbell_kick(doorbell, None);
        }
        let epoll = self.epoll.clone();
        self.for_each_ring(|ring| {
            ring.stop(&epoll);
            ring.set_enabled(false);
        });
        self.more_commands = false;
    }

    /// The guest starts from nothing: all objects are destroyed.
    fn forget_all(&mut self) {
        self.rnic.reset();
        self.events.clear();
        self.stopped_at = None;
    }

    fn use_memory(&mut self, memory: Option<GuestMemory>) {
        self.for_each_ring(|ring| ring.set_memory(memory.as_ref()));
        self.memory = memory.clone();
        self.rnic.set_memory(memory);
        self.update();
    }
}

/// An error that the front end is told of in the acknowledgement; the connection goes on.
fn refuse(error: impl std::error::Error) -> Error {
    Error::ReqHandlerError(io::Error::other(super::sentence(&error)))
}

fn unsupported() -> Error {
    Error::InvalidOperation("not negotiated")
}

fn region_info(region: &VhostUserMemoryRegion, file: File) -> RegionInfo {
    RegionInfo {
        guest_addr: region.guest_phys_addr,
        size: region.memory_size,
        user_addr: region.user_addr,
        fd_offset: region.mmap_offset,
        file,
    }
}

impl VhostUserBackendReqHandlerMut for Device {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        self.stop_all();
        Ok(())
    }

    fn reset_device(&mut self) -> Result<()> {
        debug!("the VM resets the device");
        self.stop_all();
        self.forget_all();
        Ok(())
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(FEATURES)
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        let has = |feature: u32| features & (1 << feature) != 0;
        let needs_srq = has(feature::XRC) || has(feature::SRQ_RESIZE);
        let lacks =
            needs_srq && !has(feature::SRQ) || has(feature::FAST_REG) && !has(feature::PHYSICAL_MR);
        if features & !FEATURES != 0 || lacks {
            return Err(Error::FeatureMismatch);
        }
        self.rnic.set_features(features);
        let event_index = features & (1 << VIRTIO_RING_F_EVENT_IDX) != 0;
        // Without protocol features there is no message to enable a virtqueue.
        let enabled = features & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits() == 0;
        self.for_each_ring(|ring| {
            ring.set_event_index(event_index);
            if enabled {
                ring.set_enabled(true);
            }
        });
        Ok(())
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy: Option<bool>,
    ) -> Result<Option<Vec<VhostUserMemoryRegionBase>>> {
        let regions = regions
            .iter()
            .zip(files)
            .map(|(region, file)| region_info(region, file))
            .collect();
        let memory = GuestMemory::new(regions).map_err(refuse)?;
        self.use_memory(Some(memory));
        Ok(None)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        self.with_ring(index, |ring| ring.set_size(num))?
            .map_err(refuse)
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        _flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        _log: u64,
    ) -> Result<()> {
        self.with_ring(index, |ring| {
            ring.set_addresses(descriptor, available, used)
        })
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        let base = u16::try_from(base).map_err(|_| Error::InvalidParam)?;
        if index == u32::from(CONTROL_QUEUE) && self.stopped_at.is_some_and(|at| at != base) {
            // A stopped VM goes on where it was. This one does not: its driver began anew, and the
            // front end does not know (or did not negotiate) RESET_DEVICE.
            info!("the driver starts anew");
            self.forget_all();
        }
        self.with_ring(index, |ring| ring.set_base(base))
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        if index == u32::from(CONTROL_QUEUE) && self.running {
            self.running = false;
            self.rnic.stop();
            debug!("the VM is stopped");
        }
        if let Some(doorbell) = self.doorbell(index) {
            self.rnic.set_doorbell_kick(doorbell, None);
        }
        let epoll = self.epoll.clone();
        let base = self.with_ring(index, |ring| ring.stop(&epoll))?;
        if index == u32::from(CONTROL_QUEUE) {
            self.stopped_at = Some(base);
            self.more_commands = false;
        }
        Ok(VhostUserVringState::new(index, base.into()))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let index = u32::from(index);
        if let Some(doorbell) = self.doorbell(index) {
            let fd = fd.ok_or(ring::Error::NoKick).map_err(refuse)?;
            let own = fd.try_clone().map_err(refuse)?;
            self.with_ring(index, |ring| ring.set_foreign_kick(Some(own)))?;
            self.rnic.set_doorbell_kick(doorbell, Some(fd));
            return Ok(());
        }
        let epoll = self.epoll.clone();
        let token = FIRST_KICK_TOKEN + u64::from(index);
        let placed = self.with_ring(index, |ring| {
            ring.set_kick(fd, &epoll, token)?;
            Ok(ring.is_placed())
        })?;
        if !placed.map_err(|error: ring::Error| refuse(error))? {
            self.rnic.vm().warn(format_args!(
                "virtqueue {index} was started, but is not in guest memory"
            ));
        }
        self.started(index);
        Ok(())
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        self.with_ring(index.into(), |ring| ring.set_call(fd))?
            .map_err(refuse)
    }

    fn set_vring_err(&mut self, index: u8, _fd: Option<File>) -> Result<()> {
        self.with_ring(index.into(), |_| ())
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        Ok(VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::RESET_DEVICE
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS)
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<()> {
        let offered = self.get_protocol_features()?.bits();
        if features & !offered != 0 {
            return Err(Error::FeatureMismatch);
        }
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(u64::from(self.first_doorbell_queue) + self.doorbells.len() as u64)
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        self.with_ring(index, |ring| ring.set_enabled(enable))?;
        self.started(index);
        Ok(())
    }

    fn get_config(
        &mut self,
        offset: u32,
        size: u32,
        _flags: VhostUserConfigFlags,
    ) -> Result<Vec<u8>> {
        // What lies behind the fields is reserved for fields to come, and zero.
        let (offset, size) = (offset as usize, (size as usize).min(256));
        let config = self.rnic.config().to_bytes();
        let mut bytes: Vec<u8> = config.into_iter().skip(offset).take(size).collect();
        bytes.resize(size, 0);
        Ok(bytes)
    }

    fn set_config(
        &mut self,
        _offset: u32,
        _buf: &[u8],
        _flags: VhostUserConfigFlags,
    ) -> Result<()> {
        // No field is writable; a driver's attempt must not cost the VM its connection.
        Ok(())
    }

    fn set_gpu_socket(&mut self, _gpu_backend: GpuBackend) -> Result<()> {
        Err(unsupported())
    }

    fn get_shared_object(&mut self, _uuid: VhostUserSharedMsg) -> Result<File> {
        Err(unsupported())
    }

    fn get_inflight_fd(
        &mut self,
        _inflight: &VhostUserInflight,
    ) -> Result<(VhostUserInflight, File)> {
        Err(unsupported())
    }

    fn set_inflight_fd(&mut self, _inflight: &VhostUserInflight, _file: File) -> Result<()> {
        Err(unsupported())
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(MAX_MEMORY_REGIONS)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        file: File,
        _postcopy: Option<bool>,
    ) -> Result<Option<VhostUserMemoryRegionBase>> {
        let region = region_info(region, file);
        let memory = match &self.memory {
            Some(memory) => memory.with_region(region),
            None => GuestMemory::new(vec![region]),
        };
        self.use_memory(Some(memory.map_err(refuse)?));
        Ok(None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        if let Some(memory) = &self.memory {
            let memory = memory.without_region(region.guest_phys_addr);
            self.use_memory(Some(memory));
        }
        Ok(())
    }

    fn set_device_state_fd(
        &mut self,
        _direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        _fd: File,
    ) -> Result<Option<File>> {
        Err(unsupported())
    }

    fn check_device_state(&mut self) -> Result<()> {
        Err(unsupported())
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        Err(unsupported())
    }

    fn set_log_base(&mut self, _log: &VhostUserLog, _file: File) -> Result<()> {
        Err(unsupported())
    }
}

impl Device {
    /// Virtqueue `index` may have been started or stopped: acts on it.
    fn started(&mut self, index: u32) {
        if index == u32::from(CONTROL_QUEUE) {
            self.update();
        } else if let Ok(index) = u16::try_from(index) {
            self.events.deliver(index);
        }
    }
}
