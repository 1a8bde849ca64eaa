// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The connection of a VM to its device: by vhost-user or by vfio-user.
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex};

use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserHeaderFlag};
use vhost::vhost_user::{
    Frontend, VhostUserFrontend, VhostUserProtocolFeatures, VhostUserVirtioFeatures,
};
use vhost::VhostBackend;
use virtio_rdma_spec::config::{Config, MAX_QUEUES};

use crate::memory::Region;
use crate::pci::{self, PciDevice};
use crate::virtqueue::{Doorbell, Virtqueue};
use crate::vm::lock;
use crate::Error;

/// How a VM has the device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum FrontEnd {
    /// By vhost-user: notifications are eventfds.
    #[default]
    VhostUser,
    /// By vfio-user, as a PCI device: notifications are messages. Such a VM cannot be stopped.
    VfioUser,
}

/// A connection.
pub(crate) enum Session {
    VhostUser {
        frontend: Frontend,
        /// A second handle of the connection, to break it.
        stream: UnixStream,
    },
    VfioUser {
        device: Arc<Mutex<PciDevice>>,
    },
}

impl Session {
    /// Connects, and accepts these features; returns them with those of the connection.
    pub(crate) fn new(
        front_end: FrontEnd,
        path: &Path,
        features: u64,
    ) -> Result<(Self, u64), Error> {
        match front_end {
            FrontEnd::VhostUser => Self::vhost_user(path, features),
            FrontEnd::VfioUser => {
                let mut device = PciDevice::connect(path)?;
                let offered = device.features()?;
                if features & !offered != 0 {
                    return Err(Error::Features(offered));
                }
                let device = Arc::new(Mutex::new(device));
                Ok((Self::VfioUser { device }, features))
            }
        }
    }

    fn vhost_user(path: &Path, features: u64) -> Result<(Self, u64), Error> {
        let stream = UnixStream::connect(path)?;
        let mut frontend = Frontend::from_stream(stream.try_clone()?, u64::from(MAX_QUEUES));
        frontend.set_owner()?;
        let offered = frontend.get_features()?;
        let features = features | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
        if features & !offered != 0 {
            return Err(Error::Features(offered));
        }
        let protocol = VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::RESET_DEVICE
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS;
        let offered = frontend.get_protocol_features()?;
        if !offered.contains(protocol) {
            return Err(Error::Features(offered.bits()));
        }
        frontend.set_protocol_features(protocol)?;
        frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        Ok((Self::VhostUser { frontend, stream }, features))
    }

    /// The front end of vhost-user.
    pub(crate) fn frontend(&self) -> Result<Frontend, Error> {
        match self {
            Self::VhostUser { frontend, .. } => Ok(frontend.clone()),
            Self::VfioUser { .. } => Err(Error::VhostUserOnly),
        }
    }

    /// The device's configuration.
    pub(crate) fn config(&self) -> Result<Config, Error> {
        match self {
            Self::VhostUser { frontend, .. } => {
                let (size, flags) = (Config::SIZE as u32, VhostUserConfigFlags::empty());
                let mut frontend = frontend.clone();
                let (_, bytes) = frontend.get_config(0, size, flags, &[0; Config::SIZE])?;
                let bytes = bytes.as_slice().try_into().map_err(|_| Error::BadLayout)?;
                Ok(Config::from_bytes(bytes))
            }
            Self::VfioUser { device } => {
                let mut bytes = [0; Config::SIZE];
                lock(device).config(&mut bytes)?;
                Ok(Config::from_bytes(&bytes))
            }
        }
    }

    /// Number of virtqueues that there can be.
    pub(crate) fn queues(&self) -> Result<u64, Error> {
        match self {
            Self::VhostUser { frontend, .. } => Ok(frontend.clone().get_queue_num()?),
            Self::VfioUser { device } => Ok(lock(device).queues()?.into()),
        }
    }

    /// What notifies a virtqueue, if it is not an eventfd.
    pub(crate) fn doorbell(&self, queue: u16) -> Option<Doorbell> {
        match self {
            Self::VhostUser { .. } => None,
            Self::VfioUser { device } => Some(Doorbell {
                device: device.clone(),
                queue,
            }),
        }
    }

    /// Gives the device a region of memory; as the only one, by SET_MEM_TABLE, if `table`.
    pub(crate) fn map(&self, region: &Region, table: bool) -> Result<(), Error> {
        match self {
            Self::VhostUser { frontend, .. } if table => {
                frontend.set_mem_table(&[region.info()])?;
            }
            Self::VhostUser { frontend, .. } => {
                frontend.clone().add_mem_region(&region.info())?;
            }
            Self::VfioUser { device } => lock(device).map_region(region)?,
        }
        Ok(())
    }

    /// Takes a region of memory away from it.
    pub(crate) fn unmap(&self, region: &Region) -> Result<(), Error> {
        match self {
            Self::VhostUser { frontend, .. } => {
                Ok(frontend.clone().remove_mem_region(&region.info())?)
            }
            Self::VfioUser { device } => {
                lock(device).unmap(region.guest_addr(), region.size() as u64)
            }
        }
    }

    /// Before the virtqueues are started.
    pub(crate) fn accept(&self, features: u64) -> Result<(), Error> {
        match self {
            Self::VhostUser { frontend, .. } => Ok(frontend.set_features(features)?),
            Self::VfioUser { device } => lock(device).accept(features),
        }
    }

    /// Starts a virtqueue.
    pub(crate) fn start(&self, index: u16, base: u16, queue: &Virtqueue) -> Result<(), Error> {
        let number = usize::from(index);
        match self {
            Self::VhostUser { frontend, .. } => {
                frontend.set_vring_num(number, queue.size())?;
                frontend.set_vring_base(number, base)?;
                frontend.set_vring_addr(number, &queue.config())?;
                frontend.set_vring_call(number, &queue.call)?;
                frontend.set_vring_kick(number, &queue.kick)?;
                frontend.clone().set_vring_enable(number, true)?;
            }
            Self::VfioUser { device } => {
                let mut device = lock(device);
                device.set_vectors(pci::vector(index), &[queue.call.as_raw_fd()])?;
                device.enable(index, &queue.rings())?;
            }
        }
        Ok(())
    }

    /// When all virtqueues are started.
    pub(crate) fn run(&self) -> Result<(), Error> {
        match self {
            Self::VhostUser { .. } => Ok(()),
            Self::VfioUser { device } => lock(device).run(),
        }
    }

    /// Resets the device, whose virtqueues are stopped if that can be.
    pub(crate) fn reset(&self) -> Result<(), Error> {
        match self {
            Self::VhostUser { frontend, .. } => Ok(frontend.clone().reset_device()?),
            Self::VfioUser { device } => lock(device).reset(),
        }
    }

    /// Breaks it.
    pub(crate) fn kill(&self) {
        // Broken already is as good.
        match self {
            Self::VhostUser { stream, .. } => drop(stream.shutdown(Shutdown::Both)),
            Self::VfioUser { device } => drop(lock(device).client().shutdown()),
        }
    }
}
