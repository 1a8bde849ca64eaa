// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Shared receive queues and XRC domains of a [`Vm`].
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use virtio_rdma_driver_core::buffer::SrqLayout;
use virtio_rdma_driver_core::command::{
    CreateSrq, CreateXrcd, DestroySrq, DestroyXrcd, ModifySrq, QuerySrq, ResizeSrq,
};
use virtio_rdma_driver_core::{Doorbell, SharedRecvQueue};
use virtio_rdma_spec::command::{self as spec, resize_srq_flag, srq_type, QuerySrqResponse};
use virtio_rdma_spec::ring::Sge;

use crate::mapping::View;
use crate::memory::{Buffer, Placement};
use crate::verbs::handle;
use crate::{Context, Cq, Error, Pd, Vm};

/// An XRC domain.
#[derive(Debug)]
pub struct Xrcd {
    vm: Arc<Vm>,
    handle: u32,
}

impl Xrcd {
    /// Creates an XRC domain.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn new(vm: &Arc<Vm>) -> Result<Arc<Self>, Error> {
        let response = vm.execute::<CreateXrcd>(&[])?;
        Ok(Arc::new(Self {
            vm: vm.clone(),
            handle: response.handle,
        }))
    }

    /// Its handle.
    #[must_use]
    pub fn handle(&self) -> u32 {
        self.handle
    }

    /// The VM that it belongs to.
    #[must_use]
    pub fn vm(&self) -> &Arc<Vm> {
        &self.vm
    }
}

impl Drop for Xrcd {
    fn drop(&mut self) {
        let _ = self.vm.execute::<DestroyXrcd>(&handle(self.handle));
    }
}

/// Sizes of a shared receive queue.
#[derive(Debug, Clone, Copy)]
pub struct SrqOptions {
    /// Receive work requests.
    pub max_wr: u32,
    /// Scatter/gather entries of each.
    pub max_sge: u32,
    /// Limit that is armed at once; zero: none.
    pub limit: u32,
    /// The region that it lies in.
    pub region: usize,
}

impl Default for SrqOptions {
    fn default() -> Self {
        Self {
            max_wr: 64,
            max_sge: 4,
            limit: 0,
            region: 0,
        }
    }
}

/// A shared receive queue.
#[derive(Debug)]
pub struct Srq {
    vm: Arc<Vm>,
    srqn: u32,
    doorbell_queue: u32,
    slot: u32,
    doorbell: Doorbell<View>,
    queue: Mutex<SharedRecvQueue<View>>,
    buffer: Buffer,
    max_sge: u32,
    /// The buffer since it was resized.
    resized: Mutex<Option<Buffer>>,
    // Destroyed after the shared receive queue, which names them.
    _context: Arc<Context>,
    _pd: Arc<Pd>,
    _xrc: Option<(Arc<Xrcd>, Arc<Cq>)>,
}

impl Srq {
    /// Creates a shared receive queue for queue pairs that are created with it.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn new(
        context: &Arc<Context>,
        pd: &Arc<Pd>,
        options: &SrqOptions,
    ) -> Result<Arc<Self>, Error> {
        Self::create(context, pd, None, options)
    }

    /// Creates a shared receive queue for the messages to an XRC domain that name it. Its receives
    /// complete in `cq`.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn xrc(
        context: &Arc<Context>,
        pd: &Arc<Pd>,
        domain: &Arc<Xrcd>,
        cq: &Arc<Cq>,
        options: &SrqOptions,
    ) -> Result<Arc<Self>, Error> {
        Self::create(context, pd, Some((domain, cq)), options)
    }

    fn create(
        context: &Arc<Context>,
        pd: &Arc<Pd>,
        xrc: Option<(&Arc<Xrcd>, &Arc<Cq>)>,
        options: &SrqOptions,
    ) -> Result<Arc<Self>, Error> {
        let vm = context.vm();
        let layout = SrqLayout::new(options.max_wr, options.max_sge).ok_or(Error::BadLayout)?;
        let region = vm.region(options.region);
        let buffer = region.buffer(layout.size, Placement::Scattered)?;
        let (pages, _tables) = buffer.page_list()?;
        let body = spec::CreateSrq {
            pd: pd.handle(),
            context: context.handle(),
            entries: layout.ring.entries,
            stride: layout.ring.stride,
            ring_offset: layout.ring.offset,
            max_sge: options.max_sge as u16,
            srq_type: if xrc.is_some() {
                srq_type::XRC
            } else {
                srq_type::BASIC
            },
            xrcd: xrc.map_or(0, |(domain, _)| domain.handle),
            cq: xrc.map_or(0, |(_, cq)| cq.number()),
            limit: options.limit,
            buffer: pages,
            ..spec::CreateSrq::default()
        };
        let created = vm.execute::<CreateSrq>(&body)?;
        let queue = SharedRecvQueue::new(buffer.view().clone(), &layout.ring, options.max_sge)?;
        let doorbell = Doorbell::new(
            context.doorbell().clone(),
            vm.status_page().clone(),
            created.doorbell_queue,
            created.slot,
        )?;
        Ok(Arc::new(Self {
            vm: vm.clone(),
            srqn: created.srqn,
            doorbell_queue: created.doorbell_queue,
            slot: created.slot,
            doorbell,
            queue: Mutex::new(queue),
            buffer,
            max_sge: options.max_sge,
            resized: Mutex::new(None),
            _context: context.clone(),
            _pd: pd.clone(),
            _xrc: xrc.map(|(domain, cq)| (domain.clone(), cq.clone())),
        }))
    }

    /// Its number.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.srqn
    }

    /// Its slot in the doorbell block.
    #[must_use]
    pub fn slot(&self) -> u32 {
        self.slot
    }

    /// Record and ring, as they were created.
    #[must_use]
    pub fn memory(&self) -> &View {
        self.buffer.view()
    }

    /// The queue, for batches.
    pub fn queue(&self) -> MutexGuard<'_, SharedRecvQueue<View>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Goes over to another buffer for at least `max_wr` work requests, in region `region`, and to
    /// another limit if there is one.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn resize(&self, max_wr: u32, limit: Option<u32>, region: usize) -> Result<(), Error> {
        let layout = SrqLayout::new(max_wr, self.max_sge).ok_or(Error::BadLayout)?;
        let region = self.vm.region(region);
        let buffer = region.buffer(layout.size, Placement::Scattered)?;
        let (pages, _tables) = buffer.page_list()?;
        let mut queue = self.queue();
        let next = queue.prepare_resize(buffer.view().clone(), &layout.ring)?;
        self.vm.execute::<ResizeSrq>(&spec::ResizeSrq {
            srqn: self.srqn,
            flags: limit.map_or(0, |_| resize_srq_flag::LIMIT),
            entries: layout.ring.entries,
            ring_offset: layout.ring.offset,
            limit: limit.unwrap_or(0),
            buffer: pages,
            ..spec::ResizeSrq::default()
        })?;
        queue.resized(next);
        *self.resized.lock().unwrap_or_else(PoisonError::into_inner) = Some(buffer);
        Ok(())
    }

    /// Rings the doorbell, and notifies the worker if it sleeps.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn ring(&self) -> Result<(), Error> {
        if self.doorbell.ring() {
            self.vm.notify_doorbell(self.doorbell_queue)?;
        }
        Ok(())
    }

    /// Posts a receive work request.
    ///
    /// # Errors
    /// If the queue is full, or cannot take it.
    pub fn post_recv(&self, wr_id: u64, sges: &[Sge]) -> Result<(), Error> {
        let waited = self.queue().post(wr_id, sges.iter().copied())?;
        if waited {
            self.ring()?;
        }
        Ok(())
    }

    /// Arms the limit.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn set_limit(&self, limit: u32) -> Result<(), Error> {
        self.vm.execute::<ModifySrq>(&spec::ModifySrq {
            srqn: self.srqn,
            limit,
            reserved: 0,
        })?;
        Ok(())
    }

    /// The attributes.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn query(&self) -> Result<QuerySrqResponse, Error> {
        self.vm.execute::<QuerySrq>(&handle(self.srqn))
    }
}

impl Drop for Srq {
    fn drop(&mut self) {
        let _ = self.vm.execute::<DestroySrq>(&handle(self.srqn));
    }
}
