// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What is completed before the process ends: the work requests that VMs have posted by then.
//!
//! The workers go on as they do. Another thread looks, again and again, how far they are: it reads,
//! and changes nothing.
use std::sync::atomic::Ordering;
use std::sync::mpsc::{channel, Receiver, TryRecvError};
use std::sync::{Arc, Weak};

use crate::adapter::Adapter;
use crate::engine::queue_pair::Qp;
use crate::engine::vm::Vm;
use crate::verbs::cq::Cq;

/// Send work requests that were posted when it began, and what their ends lead to. Nothing is left
/// when
///
/// - each of these work requests has ended: it is completed, in error or flushed, or its queue pair is
///   destroyed, was reset, or sends no more. On the wire that takes the acknowledgement;
/// - the events for their completions that moderation held back are raised;
/// - what connections of iWARP have to send is with the system.
///
/// VMs that are stopped have nothing that could go on. What is posted later is carried out as well,
/// but not waited for, but for reliable datagrams (SRD), which end in any order.
#[derive(Debug)]
pub struct Drain {
    adapter: Arc<Adapter>,
    posted: Vec<Posted>,
    held: Option<Vec<HeldEvent>>,
    unsent: Option<Receiver<bool>>,
}

/// What was posted to a queue pair.
#[derive(Debug)]
struct Posted {
    qp: Arc<Qp>,
    life: u32,
    /// Its send queue's position behind the last work request.
    end: u32,
}

impl Posted {
    fn has_ended(&self) -> bool {
        let qp = &self.qp;
        // Guest memory is not looked at: only whether it may be accessed.
        if qp.dead.load(Ordering::SeqCst) || !qp.vm.tables().running {
            return true;
        }
        let send_queue = qp.send_queue();
        qp.life() != self.life || send_queue.has_ended(qp.state(), self.end)
    }
}

/// An event that a completion queue holds back.
#[derive(Debug)]
struct HeldEvent {
    vm: Weak<Vm>,
    cq: Arc<Cq>,
    number: u32,
}

impl HeldEvent {
    fn waits(&self) -> bool {
        let running = |vm: Arc<Vm>| vm.tables().running;
        let is_this = |(number, _)| number == self.number;
        self.vm.upgrade().is_some_and(running) && self.cq.held().is_some_and(is_this)
    }
}

impl Drain {
    /// Of all that is posted now.
    #[must_use]
    pub fn begin(adapter: &Arc<Adapter>) -> Self {
        let mut posted = Vec::new();
        for rnic in adapter.rnics() {
            let tables = rnic.vm().tables();
            if !tables.running {
                continue;
            }
            posted.extend(tables.qps.iter().filter_map(|(_, qp)| {
                let end = qp.send_queue().end_of_posted(qp.state())?;
                let (qp, life) = (qp.clone(), qp.life());
                Some(Posted { qp, life, end })
            }));
        }
        Self {
            adapter: adapter.clone(),
            posted,
            held: None,
            unsent: None,
        }
    }

    /// Looks again. Returns whether nothing is left.
    pub fn is_over(&mut self) -> bool {
        self.posted.retain(|posted| !posted.has_ended());
        if !self.posted.is_empty() {
            return false;
        }
        let adapter = &self.adapter;
        let held = self.held.get_or_insert_with(|| held(adapter));
        held.retain(HeldEvent::waits);
        held.is_empty() && self.is_sent()
    }

    /// How many queue pairs have work requests that have not ended.
    #[must_use]
    pub fn queue_pairs(&self) -> usize {
        self.posted.len()
    }

    /// Whether connections of iWARP have nothing to send, as their worker said last.
    fn is_sent(&mut self) -> bool {
        if !self.adapter.has_iwarp() {
            return true;
        }
        let answer = self.unsent.as_ref().map(Receiver::try_recv);
        match answer {
            Some(Ok(false)) => return true,
            Some(Err(TryRecvError::Empty)) => return false,
            // It is asked anew.
            Some(Ok(true) | Err(TryRecvError::Disconnected)) | None => {}
        }
        let (answer, answered) = channel();
        self.adapter.ask_unsent(answer);
        self.unsent = Some(answered);
        false
    }
}

/// The events that are held back now.
fn held(adapter: &Adapter) -> Vec<HeldEvent> {
    let mut held = Vec::new();
    for rnic in adapter.rnics() {
        let tables = rnic.vm().tables();
        held.extend(tables.cqs.iter().filter_map(|(_, cq)| {
            let (number, _) = cq.held()?;
            let (vm, cq) = (Arc::downgrade(rnic.vm()), cq.clone());
            Some(HeldEvent { vm, cq, number })
        }));
    }
    held
}
