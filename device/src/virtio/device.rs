// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The device: features, configuration, commands, and the life of the virtqueues.
use std::fs::File;
use std::sync::Arc;

use log::{debug, info};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use virtio_rdma_spec::command::{status, ResponseHeader};
use virtio_rdma_spec::config::{feature, first_doorbell_queue, CONTROL_QUEUE};

use super::events::Events;
use super::ring::{Ring, TooLong};
use crate::control::{self, MAX_COMMAND};
use crate::error::sentence;
use crate::memory::GuestMemory;
use crate::rnic::Rnic;

/// Commands that are handled before the front end and the other queues are looked at again.
const COMMAND_BUDGET: usize = 64;
/// Bytes of the configuration that are read at a time, at most.
const MAX_CONFIG: usize = 256;

/// The features that the device offers.
pub const FEATURES: u64 = 1 << feature::RC
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
    | 1 << feature::COUNTERS
    | 1 << feature::SRD
    | 1 << VIRTIO_RING_F_INDIRECT_DESC
    | 1 << VIRTIO_RING_F_EVENT_IDX
    | 1 << VIRTIO_F_VERSION_1;

/// What a port of iWARP lacks of that.
const NOT_OF_IWARP: u64 = 1 << feature::UD
    | 1 << feature::UC
    | 1 << feature::XRC
    | 1 << feature::FLUSH
    | 1 << feature::HEADER_TYPE
    | 1 << feature::SRD;

/// The driver accepted features that do not go together, or that were not offered.
#[derive(Debug, thiserror::Error)]
#[error("the features {0:#x} were not offered, or one lacks another that it needs")]
pub struct FeatureError(u64);

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
pub struct VirtioDevice {
    rnic: Arc<Rnic>,
    first_doorbell_queue: u16,
    memory: Option<GuestMemory>,
    control: Ring,
    /// The command that is executed. It is as long as the longest one, and to clear it for each
    /// would be an eighth of the time of a short one.
    command: Box<[u8; MAX_COMMAND]>,
    events: Arc<Events>,
    doorbells: Vec<Ring>,
    /// Whether the rnic may touch guest memory.
    running: bool,
    /// Next available index of the control queue when it was stopped last.
    stopped_at: Option<u16>,
    /// The control queue has more commands than are executed at a time.
    more_commands: bool,
}

impl VirtioDevice {
    /// `rnic` behind a new front end, with all virtqueues stopped.
    pub fn new(rnic: Arc<Rnic>) -> Self {
        let config = rnic.config();
        let events = Arc::new(Events::new(&rnic));
        let first_doorbell_queue = first_doorbell_queue(config.num_completion_queues);
        let end = first_doorbell_queue.saturating_add(config.num_doorbell_queues);
        Self {
            rnic,
            first_doorbell_queue,
            memory: None,
            control: Ring::new(CONTROL_QUEUE),
            command: Box::new([0; MAX_COMMAND]),
            events,
            doorbells: (first_doorbell_queue..end).map(Ring::new).collect(),
            running: false,
            stopped_at: None,
            more_commands: false,
        }
    }

    /// Number of virtqueues.
    #[must_use]
    pub fn queues(&self) -> u16 {
        self.first_doorbell_queue
            .saturating_add(self.doorbells.len() as u16)
    }

    /// Whether virtqueue `index` is a doorbell queue: its notifications are a worker's.
    #[must_use]
    pub fn is_doorbell(&self, index: u16) -> bool {
        self.doorbell(index).is_some()
    }

    /// A part of the configuration space.
    #[must_use]
    pub fn config(&self, offset: u32, size: u32) -> Vec<u8> {
        // What lies behind the fields is reserved for fields to come, and zero.
        let (offset, size) = (offset as usize, (size as usize).min(MAX_CONFIG));
        let config = self.rnic.config().to_bytes();
        let mut bytes: Vec<u8> = config.into_iter().skip(offset).take(size).collect();
        bytes.resize(size, 0);
        bytes
    }

    /// The features that the device offers.
    #[must_use]
    pub fn features(&self) -> u64 {
        match self.rnic.iwarp() {
            Some(_) => FEATURES & !NOT_OF_IWARP | 1 << feature::IWARP,
            None => FEATURES,
        }
    }

    /// Takes the features that the driver accepted.
    ///
    /// # Errors
    /// If they were not offered, or one lacks another that it needs. Then nothing has changed.
    pub fn set_features(&mut self, features: u64) -> Result<(), FeatureError> {
        let has = |feature: u32| features & (1 << feature) != 0;
        let needs_srq = has(feature::XRC) || has(feature::SRQ_RESIZE);
        let lacks =
            needs_srq && !has(feature::SRQ) || has(feature::FAST_REG) && !has(feature::PHYSICAL_MR);
        if features & !self.features() != 0 || lacks {
            return Err(FeatureError(features));
        }
        self.rnic.set_features(features);
        let event_index = has(VIRTIO_RING_F_EVENT_IDX);
        self.for_each_ring(|ring| ring.set_event_index(event_index));
        Ok(())
    }

    /// Guest memory from now on. Returns when nobody uses the old one.
    pub fn set_memory(&mut self, memory: Option<GuestMemory>) {
        self.for_each_ring(|ring| ring.set_memory(memory.as_ref()));
        self.memory = memory.clone();
        self.rnic.set_memory(memory);
        self.update();
    }

    /// Applies `f` to virtqueue `index`; `None` if there is none.
    pub fn with_ring<R>(&mut self, index: u16, f: impl FnOnce(&mut Ring) -> R) -> Option<R> {
        if index == CONTROL_QUEUE {
            return Some(f(&mut self.control));
        }
        match self.doorbell(index) {
            Some(doorbell) => self.doorbells.get_mut(usize::from(doorbell)).map(f),
            None => self.events.with_ring(index, f),
        }
    }

    /// Next available index of virtqueue `index`.
    pub fn set_position(&mut self, index: u16, position: u16) {
        if index == CONTROL_QUEUE && self.stopped_at.is_some_and(|at| at != position) {
            // A stopped VM goes on where it was. This one does not: its driver began anew, and the
            // front end does not know of it.
            info!("the driver starts anew");
            self.forget_all();
        }
        self.with_ring(index, |ring| ring.set_position(position));
    }

    /// Starts virtqueue `index`.
    pub fn start(&mut self, index: u16) {
        let placed = self.with_ring(index, |ring| {
            ring.start();
            ring.is_placed()
        });
        // Nothing is ever read from a doorbell queue, wherever it lies.
        if placed == Some(false) && !self.is_doorbell(index) {
            self.warn(&format!(
                "virtqueue {index} was started, but is not in guest memory"
            ));
        }
        self.changed(index);
    }

    /// Enables or disables virtqueue `index`.
    pub fn set_enabled(&mut self, index: u16, enabled: bool) {
        self.with_ring(index, |ring| ring.set_enabled(enabled));
        self.changed(index);
    }

    /// Stops virtqueue `index`; with the control queue, the VM: then returns when nobody accesses
    /// its memory.
    pub fn stop(&mut self, index: u16) {
        if index == CONTROL_QUEUE {
            self.stop_rnic();
            self.more_commands = false;
        }
        self.set_doorbell_kick(index, None);
        let position = self.with_ring(index, Ring::stop);
        if index == CONTROL_QUEUE {
            self.stopped_at = position;
        }
    }

    /// The eventfd that the guest notifies a doorbell queue by; `None`: it notifies it no longer.
    pub fn set_doorbell_kick(&self, index: u16, kick: Option<File>) {
        if let Some(doorbell) = self.doorbell(index) {
            self.rnic.set_doorbell_kick(doorbell, kick);
        }
    }

    /// The guest notified virtqueue `index`.
    pub fn notified(&mut self, index: u16) {
        if index == CONTROL_QUEUE {
            self.serve_commands();
        } else {
            self.events.deliver(index);
        }
    }

    /// Whether [`VirtioDevice::notified`] should be called again for the control queue.
    #[must_use]
    pub fn has_more_commands(&self) -> bool {
        self.more_commands
    }

    /// Stops the rnic and all virtqueues.
    pub fn stop_all(&mut self) {
        self.stop_rnic();
        for index in 0..self.queues() {
            self.set_doorbell_kick(index, None);
        }
        self.for_each_ring(|ring| {
            ring.stop();
            ring.set_enabled(false);
        });
        self.more_commands = false;
    }

    /// The driver resets the device: all is stopped, and all objects are destroyed.
    pub fn reset(&mut self) {
        debug!("the VM resets the device");
        self.stop_all();
        self.forget_all();
    }

    /// The front end is gone.
    pub fn detach(&mut self) {
        self.stop_all();
        self.rnic.detach();
    }

    /// Warns of what the guest or the front end does, not too often.
    pub fn warn(&self, what: &str) {
        self.rnic.vm().warn(format_args!("{what}"));
    }

    fn serve_commands(&mut self) {
        let rnic = &self.rnic;
        let result =
            self.control
                .serve(&mut self.command, COMMAND_BUDGET, |command| match command {
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
                self.warn(&sentence(&error));
                false
            }
        };
    }

    fn for_each_ring(&mut self, mut f: impl FnMut(&mut Ring)) {
        for index in 0..self.queues() {
            // Every index below the number of queues is one.
            let _ = self.with_ring(index, &mut f);
        }
    }

    /// The doorbell queue that virtqueue `index` is.
    fn doorbell(&self, index: u16) -> Option<u16> {
        let doorbell = index.checked_sub(self.first_doorbell_queue)?;
        (usize::from(doorbell) < self.doorbells.len()).then_some(doorbell)
    }

    /// Virtqueue `index` may have been started, enabled or disabled: acts on it.
    fn changed(&mut self, index: u16) {
        if index == CONTROL_QUEUE {
            self.update();
        } else {
            self.events.deliver(index);
        }
    }

    /// Brings the rnic to the state that the control queue asks for, after a change.
    fn update(&mut self) {
        let run = self.control.is_started() && self.memory.is_some();
        if run && !self.running {
            debug!("the VM runs");
            self.running = true;
            self.rnic.start(self.events.clone());
        } else if !run {
            self.stop_rnic();
        }
        if run {
            self.serve_commands();
        }
    }

    /// Returns when nobody accesses the VM's memory.
    fn stop_rnic(&mut self) {
        if self.running {
            self.running = false;
            self.rnic.stop();
            debug!("the VM is stopped");
        }
    }

    /// The guest starts from nothing: all objects are destroyed.
    fn forget_all(&mut self) {
        self.rnic.reset();
        self.events.clear();
        self.stopped_at = None;
    }
}
