// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the messages of the front end mean for the device.
use std::fs::File;
use std::io;
use std::sync::Arc;

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

use crate::epoll_fd::EpollFd;
use crate::error::sentence;
use crate::memory::{GuestMemory, RegionInfo};
use crate::virtio::{Addresses, Ring, VirtioDevice, FEATURES};

/// Memory regions of a VM, at most.
const MAX_MEMORY_REGIONS: u64 = 509;
/// Event numbers of virtqueue kicks start here.
pub const FIRST_KICK_TOKEN: u64 = 1 << 16;
/// The feature of which vhost-user itself makes use.
const PROTOCOL_FEATURES: u64 = VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();

/// A device, and the messages of its front end.
pub struct Backend {
    pub device: VirtioDevice,
    epoll: Arc<EpollFd>,
    memory: Option<GuestMemory>,
    /// How the guest notifies virtqueues, as far as that is our affair, by their numbers.
    kicks: Vec<Option<File>>,
}

impl Backend {
    /// `device` behind a new connection; kicks go to `epoll`.
    pub fn new(device: VirtioDevice, epoll: Arc<EpollFd>) -> Self {
        Self {
            epoll,
            memory: None,
            kicks: (0..device.queues()).map(|_| None).collect(),
            device,
        }
    }

    /// Applies `f` to virtqueue `index`.
    fn with_ring<R>(&mut self, index: u32, f: impl FnOnce(&mut Ring) -> R) -> Result<R> {
        let index = self.index(index)?;
        self.device.with_ring(index, f).ok_or(Error::InvalidParam)
    }

    /// `index`, if that is a virtqueue.
    fn index(&self, index: u32) -> Result<u16> {
        let index = u16::try_from(index).ok();
        index
            .filter(|index| *index < self.device.queues())
            .ok_or(Error::InvalidParam)
    }

    /// Kicks of virtqueue `index` come from `kick`. They are edge triggered and never read, so that
    /// no file descriptor a front end might pass can block us.
    fn set_kick(&mut self, index: u16, kick: Option<File>) -> io::Result<()> {
        let Some(slot) = self.kicks.get_mut(usize::from(index)) else {
            return Ok(());
        };
        if let Some(old) = slot.take() {
            self.epoll.remove(&old)?;
        }
        if let Some(new) = kick {
            let token = FIRST_KICK_TOKEN + u64::from(index);
            self.epoll.add_edge_triggered(&new, token)?;
            *slot = Some(new);
        }
        Ok(())
    }

    fn forget_kicks(&mut self) {
        for index in 0..self.device.queues() {
            // Nothing can be wrong with what is registered.
            let _ = self.set_kick(index, None);
        }
    }

    fn use_memory(&mut self, memory: Option<GuestMemory>) {
        self.memory = memory.clone();
        self.device.set_memory(memory);
    }
}

/// An error that the front end is told of in the acknowledgement; the connection goes on.
fn refuse(error: impl std::error::Error) -> Error {
    Error::ReqHandlerError(io::Error::other(sentence(&error)))
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

impl VhostUserBackendReqHandlerMut for Backend {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        self.forget_kicks();
        self.device.stop_all();
        Ok(())
    }

    fn reset_device(&mut self) -> Result<()> {
        self.forget_kicks();
        self.device.reset();
        Ok(())
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(FEATURES | PROTOCOL_FEATURES)
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        self.device
            .set_features(features & !PROTOCOL_FEATURES)
            .map_err(|_| Error::FeatureMismatch)?;
        // Without protocol features there is no message to enable a virtqueue.
        if features & PROTOCOL_FEATURES == 0 {
            for index in 0..self.device.queues() {
                self.device.set_enabled(index, true);
            }
        }
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
        let memory = self.memory.as_ref().ok_or(Error::InvalidParam)?;
        let guest = |addr| memory.user_to_guest(addr).ok_or(Error::InvalidParam);
        let addresses = Addresses {
            descriptors: guest(descriptor)?,
            available: guest(available)?,
            used: guest(used)?,
        };
        self.with_ring(index, |ring| ring.set_addresses(addresses))
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        let index = self.index(index)?;
        let base = u16::try_from(base).map_err(|_| Error::InvalidParam)?;
        self.device.set_position(index, base);
        Ok(())
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        let number = self.index(index)?;
        self.device.stop(number);
        self.set_kick(number, None).map_err(refuse)?;
        let base = self.with_ring(index, |ring| ring.position())?;
        Ok(VhostUserVringState::new(index, base.into()))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let index = self.index(index.into())?;
        let Some(fd) = fd else {
            let error = "a virtqueue without a kick file descriptor is not supported";
            return Err(Error::ReqHandlerError(io::Error::other(error)));
        };
        if self.device.is_doorbell(index) {
            self.device.set_doorbell_kick(index, Some(fd));
        } else {
            self.set_kick(index, Some(fd)).map_err(refuse)?;
        }
        self.device.start(index);
        Ok(())
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        self.with_ring(index.into(), |ring| ring.set_interrupt(fd))?
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
        Ok(self.device.queues().into())
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        let index = self.index(index)?;
        self.device.set_enabled(index, enable);
        Ok(())
    }

    fn get_config(
        &mut self,
        offset: u32,
        size: u32,
        _flags: VhostUserConfigFlags,
    ) -> Result<Vec<u8>> {
        Ok(self.device.config(offset, size))
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
