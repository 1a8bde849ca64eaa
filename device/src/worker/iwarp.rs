// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Connections of iWARP, as a worker has them: when it looks at them.
use std::io;
use std::sync::Arc;

use vhost_device_rdma_sync::ReadSection;

use super::pace::Pace;
use super::scheduler::QpQueue;
use crate::engine::queue_pair::Qp;
use crate::engine::send_queue::Polled;
use crate::engine::tables::Tables;
use crate::engine::Budget;
use crate::epoll_fd::EpollFd;
use crate::fabric::iwarp::port::Request;
use crate::fabric::iwarp::{Here, Iwarp};
use crate::fabric::registry::Registry;

/// The connections of iWARP that are a worker's.
#[derive(Debug)]
pub(super) struct IwarpEnd {
    iwarp: Iwarp,
    worker: u16,
    pace: Pace,
}

impl IwarpEnd {
    pub(super) fn new(worker: u16) -> io::Result<Self> {
        Ok(Self {
            iwarp: Iwarp::new()?,
            worker,
            pace: Pace::default(),
        })
    }

    /// Has `epoll` wait for them, with the number `data`.
    pub(super) fn wait_in(&self, epoll: &EpollFd, data: u64) -> io::Result<()> {
        epoll.add(&self.iwarp, data)
    }

    /// Drivers want something.
    pub(super) fn ask(
        &mut self,
        requests: Vec<Request>,
        section: &ReadSection<'_>,
        registry: &Registry,
        now: u64,
    ) {
        let here = Here {
            section,
            registry,
            now,
        };
        for request in requests {
            self.iwarp.ask(request, here);
        }
        self.look_soon();
    }

    /// The next poll iteration looks at them.
    pub(super) fn look_soon(&mut self) {
        self.pace.soon();
    }

    /// When one of them is to be looked at whatever happens, nanoseconds.
    pub(super) fn timer(&self) -> Option<u64> {
        self.iwarp.timer()
    }

    /// Whether there is something to do that nothing tells of.
    pub(super) fn has_more(&self) -> bool {
        self.iwarp.has_more()
    }

    /// Whether they have anything to send that the system has not taken.
    pub(super) fn waits_to_send(&self) -> bool {
        self.iwarp.waits_to_send()
    }

    /// Looks at them, if it is time to. Returns whether there was anything to do.
    #[inline(always)]
    pub(super) fn look(
        &mut self,
        now: u64,
        section: &ReadSection<'_>,
        registry: &Registry,
        queue: &mut QpQueue,
    ) -> bool {
        if self.iwarp.is_empty() || !(self.pace.is_due(now) || self.iwarp.has_more()) {
            return false;
        }
        self.look_now(now, section, registry, queue)
    }

    #[inline(never)]
    fn look_now(
        &mut self,
        now: u64,
        section: &ReadSection<'_>,
        registry: &Registry,
        queue: &mut QpQueue,
    ) -> bool {
        let here = Here {
            section,
            registry,
            now,
        };
        let came = self.iwarp.look(here);
        for (vm, bytes) in self.iwarp.charges() {
            queue.charge_frame(&vm, self.worker, bytes);
        }
        if came {
            self.pace.busy(now);
        }
        self.pace.looked(now);
        came
    }

    /// Polls a queue pair of iWARP. Returns what it led to, and what was done; `None` if its messages
    /// go another way.
    pub(super) fn poll(
        &mut self,
        tables: &Tables,
        qp: &Arc<Qp>,
        section: &ReadSection<'_>,
        registry: &Registry,
        now: u64,
        budget: Budget,
    ) -> Option<(Polled, Budget)> {
        let here = Here {
            section,
            registry,
            now,
        };
        let polled = self.iwarp.poll(tables, qp, here, budget)?;
        if polled.1.messages != 0 {
            // Most messages have an answer.
            self.pace.busy(now);
            self.pace.soon();
        }
        Some(polled)
    }
}
